"""Large answers are encoded in pieces, with the same bytes as in one piece."""

import asyncio
import time

import msgspec

from jpaged.outputs import Logprob
from jpaged.serving.openai_api.logprob_shapes import chat_logprob_pieces, chat_logprobs, completion_logprob_pieces
from jpaged.serving.openai_api.logprob_shapes import completion_logprobs as in_one
from jpaged.serving.schemas.answers import ChatLogprobs, CompletionLogprobs
from jpaged.serving.web.json_pieces import ITEMS, JSONPieces, Pieces, encode, list_pieces, plain_pieces


def entries(count: int, top: int) -> list[dict[int, Logprob]]:
    return [{i + j: Logprob(-1.0 - j, j + 1, f"t\0{i + j}", b"x") for j in range(top)} for i in range(count)]


def test_pieces_anywhere_in_a_struct():
    lists = [asyncio.run(plain_pieces(list(range(count)))) for count in (0, 1, ITEMS, ITEMS + 1, 3 * ITEMS + 5)]
    value = {"text": "a\0b\\u0000", "lists": lists, "last": [1]}
    wanted = {"text": "a\0b\\u0000", "lists": [list(range(n)) for n in (0, 1, ITEMS, ITEMS + 1, 3 * ITEMS + 5)]}
    assert msgspec.json.decode(b"".join(encode(value))) == wanted | {"last": [1]}
    squares = asyncio.run(list_pieces([1, 2, 3], lambda some, start: [start * 10 + one for one in some], at_once=2))
    assert b"".join(squares.parts) == b"[1,2,23]"


def test_log_probabilities_are_the_same_in_pieces():
    ids, logprobs = list(range(2 * ITEMS + 3)), entries(2 * ITEMS + 3, 3)
    for count in (0, 1, ITEMS, len(ids)):
        some = ids[:count], logprobs[:count]
        made = asyncio.run(completion_logprob_pieces(*some, ids[:count]))
        assert msgspec.json.decode(b"".join(encode(made)), type=CompletionLogprobs) == in_one(*some, ids[:count])
        made = asyncio.run(chat_logprob_pieces(*some, 2))
        assert msgspec.json.decode(b"".join(encode(made)), type=ChatLogprobs) == chat_logprobs(*some, 2)


def test_the_event_loop_runs_while_a_long_list_is_converted():
    """20,000 tokens with 20 log-probabilities each take a second together. No other task waits for a tenth of it."""
    ids, logprobs = list(range(20_000)), entries(20_000, 20)
    gaps = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - began)

    async def work() -> float:
        watching = asyncio.create_task(watch())
        began = time.perf_counter()
        await completion_logprob_pieces(ids, logprobs, ids)
        watching.cancel()
        return time.perf_counter() - began

    whole = asyncio.run(work())
    assert len(gaps) >= len(ids) // ITEMS
    assert max(gaps) < whole / 10


def test_a_response_in_pieces_announces_its_length():
    sent = []

    async def send(message):
        sent.append(message)

    body = JSONPieces({"a": [Pieces((b'["', b"1" * 50_000, b'","', b"2" * 50_000, b'"]'))] * 3})
    asyncio.run(body({"type": "http"}, None, send))
    start, *parts = sent
    length = sum(len(part["body"]) for part in parts)
    assert (b"content-length", str(length).encode()) in start["headers"]
    assert (b"content-type", b"application/json") in start["headers"]
    assert len(parts) < 9
    assert not parts[-1]["more_body"]
    assert len(msgspec.json.decode(b"".join(part["body"] for part in parts))["a"]) == 3
