"""Weights replaced over HTTP under 16 live streams, and checkpoints that are refused while the old weights serve."""

import concurrent.futures
import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError
from jpaged.runtime import weight_update
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.serving.http_client import error_of, wait_for
from tests.support.http_server import running
from tests.support.tiny_engine import sampling_programs

SIZES = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32, "row_buckets": (8,),
    "token_buckets": (32,), "kv_cache_memory_bytes": 2_000_000, "block_size": 16,
}  # fmt: skip
ADMIN = {"Authorization": "Bearer look"}
NUM_TOKENS = 160
STREAMS = 16  # twice as many as rows, so that some wait while the weights change
PROMPTS = [[3 + (5 * i + j * (i + 1)) % 90 for j in range(18 + i)] for i in range(STREAMS)]  # one full block or more
GREEDY = {"temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A stream as its client saw it. spans: (version, start, end). error: code of the last event."""

    ids: list[int]
    spans: list[tuple[str, int, int]]
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server, and engines of the old and of the new weights in this process."""

    base: str
    folder: Path
    old: LLM
    new: LLM

    def update(self, name: str, **fields: Any) -> httpx.Response:
        body = {"model_path": name, **fields}
        return httpx.post(f"{self.base}/update_weights_from_disk", json=body, headers=ADMIN, timeout=60)

    def ask(self, prompt: list[int], count: int = 8) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": count, "return_token_ids": True, "return_weight_versions": True}
        answer = httpx.post(f"{self.base}/v1/completions", json=body | GREEDY, timeout=60).json()
        return answer["choices"][0] | {"cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("old", "new")):
        write_checkpoint(BY_NAME["llama"], seed, folder / name)
    write_checkpoint(BY_NAME["qwen2"], 0, folder / "other")
    with sampling_programs(SamplerVariant.GREEDY):
        engine = AsyncLLM(str(folder / "old"), **SIZES)
        engine.wait_until_ready()
        app = create_app(
            Server(engine=engine, model_names=("tiny",)), AppOptions(admin_keys=("look",), weights_dirs=(folder,))
        )
        with LLM(str(folder / "old"), **SIZES) as old, LLM(str(folder / "new"), **SIZES) as new, running(app) as base:
            yield Served(base, folder, old, new)


def answer_of(llm: LLM, ids: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids


def streamed(base: str, prompt: list[int], begun: threading.Semaphore) -> Streamed:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "return_token_ids": True,
            "return_weight_versions": True, **GREEDY}  # fmt: skip
    ids, spans, error = [], [], None
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as stream:
        if stream.status_code != 200:  # it ended before its first token
            return Streamed([], [], json.loads(stream.read())["error"]["code"])
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = event["error"]["code"]
                continue
            [choice] = event["choices"]
            ids += choice.get("token_ids", ())
            spans += [tuple(span.values()) for span in choice.get("weight_versions", ())]
            begun.release()
    return Streamed(ids, spans, error)


def streams_with_an_update(served: Served, **fields: Any) -> tuple[list[Streamed], dict[str, Any]]:
    """Run 16 streams, and update the weights while rows decode and other requests wait."""
    begun = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as threads:
        futures = [threads.submit(streamed, served.base, prompt, begun) for prompt in PROMPTS]
        for _ in range(150):
            assert begun.acquire(timeout=60)
        answer = served.update("new", weight_version="new", **fields)
        assert answer.status_code == 200, answer.text
        return [future.result(60) for future in futures], answer.json()


@pytest.fixture
def old_weights(served):
    """The server has the old weights, as version 'old', and an empty prefix cache."""
    assert served.update("old", weight_version="old").json()["success"]


def test_streams_continue_with_the_new_weights(served, old_weights):
    """mode=recompute: each answer is that of the old weights up to the change, and the new weights' from there on."""
    found, answer = streams_with_an_update(served, mode="recompute")
    assert answer["num_paused_requests"] == STREAMS
    changed = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert (len(one.ids), one.error) == (NUM_TOKENS, None)
        assert [start for _, start, _ in one.spans] + [NUM_TOKENS] == [0, *(end for *_, end in one.spans)]
        first = one.spans[0][2] if one.spans[0][0] == "old" else 0
        assert one.ids[:first] == answer_of(served.old, prompt, max(first, 1))[:first]
        if first < NUM_TOKENS:
            assert one.spans[-1] == ("new", first, NUM_TOKENS)
            rest = NUM_TOKENS - first
            assert one.ids[first:] == answer_of(served.new, prompt + one.ids[:first], rest)
            assert first == 0 or one.ids[first:] != answer_of(served.old, prompt + one.ids[:first], rest)
        changed += 0 < first < NUM_TOKENS
    assert changed >= 4
    assert any(one.spans[0][0] == "new" for one in found)  # requests that waited during the update


def continued(served: Served, prompt: list[int], first: int) -> list[int]:
    """The answer of an engine in this process whose weights change after `first` tokens, with the KV kept."""
    llm, engine = served.old, served.old.engine
    params = SamplingParams(max_tokens=NUM_TOKENS, **GREEDY)
    engine.add_request("kept", {"prompt_token_ids": prompt}, params, stream=True)
    count = 0
    while count < first - 1:
        count += sum(len(output.outputs[0].token_ids) - count for output in engine.step())
    for output in engine.flush():
        count = len(output.outputs[0].token_ids)
    assert count == first
    [of_engine] = llm._prepared(str(served.folder / "new"), None, None)
    engine.update_weights(of_engine())
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            ids = output.outputs[0].token_ids
    llm.update_weights(str(served.folder / "old"))
    return ids


def test_streams_keep_their_kv(served, old_weights):
    """mode=keep: the answers have the bits of an engine in one process whose weights change at the same token."""
    found, _ = streams_with_an_update(served, mode="keep")
    changed = [(prompt, one) for prompt, one in zip(PROMPTS, found, strict=True) if len(one.spans) == 2]
    assert len(changed) >= 4
    for prompt, one in changed:
        assert one.ids == continued(served, prompt, one.spans[0][2])
    for prompt, one in zip(PROMPTS, found, strict=True):
        if one.spans == [("new", 0, NUM_TOKENS)]:
            assert one.ids == answer_of(served.new, prompt, NUM_TOKENS)


def test_an_update_can_wait_for_the_streams(served, old_weights):
    found, answer = streams_with_an_update(served)
    assert answer["weight_version"] == "new"
    for prompt, one in zip(PROMPTS, found, strict=True):
        [(version, start, end)] = one.spans
        assert (start, end, one.error) == (0, NUM_TOKENS, None)
        assert one.ids == answer_of(served.old if version == "old" else served.new, prompt, NUM_TOKENS)
    assert "old" in {one.spans[0][0] for one in found}


def test_an_update_can_abort_the_streams(served, old_weights):
    found, _ = streams_with_an_update(served, abort_all_requests=True)
    assert {one.error for one in found} == {"aborted"}
    assert served.ask(PROMPTS[0])["token_ids"] == answer_of(served.new, PROMPTS[0], 8)


def test_nothing_cached_under_the_old_weights_is_found(served, old_weights):
    for name, llm, cached in (("old", served.old, [0, 16]), ("new", served.new, [0, 16]), ("old", served.old, [0, 16])):
        assert served.update(name, flush_cache=False, mode="keep").json()["success"]
        answers = [served.ask(PROMPTS[0]) for _ in range(2)]
        assert [answer["cached"] for answer in answers] == cached
        assert [answer["token_ids"] for answer in answers] == [answer_of(llm, PROMPTS[0], 8)] * 2


def damaged(folder: Path, name: str) -> Path:
    """A copy of the new checkpoint."""
    copy = folder / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "new", copy)
    return copy


def test_checkpoints_that_do_not_fit_leave_the_old_weights(served, old_weights):
    damaged(served.folder, "no-config").joinpath("config.json").unlink()
    damaged(served.folder, "no-weights").joinpath("model.safetensors").unlink()
    cut = damaged(served.folder, "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    cut = damaged(served.folder, "text") / "model.safetensors"
    cut.write_bytes(b"not a checkpoint")
    (served.folder / "empty").mkdir(exist_ok=True)
    (served.folder / "bad.gguf").write_bytes(b"GGUF")
    expected = answer_of(served.old, PROMPTS[1], 8)
    for name in ("other", "no-config", "no-weights", "cut", "text", "empty", "bad.gguf"):
        error = error_of(served.update(name, weight_version=name), 400)
        assert (error["param"], error["code"]) == ("model_path", "bad_weights"), name
        assert name in error["message"], error["message"]
    error_of(served.update("missing"), 404)
    error_of(served.update(str(served.folder.parent)), 403)
    answer = served.ask(PROMPTS[1])
    assert (answer["token_ids"], answer["weight_versions"][0]["version"]) == (expected, "old")
    assert httpx.get(f"{served.base}/weight_version").json() == {"weight_version": "old"}


def test_an_update_that_fails_in_the_middle_is_repaired_by_the_next(served, old_weights):
    check, calls = weight_update._check, []

    def fails(*leaf):
        calls.append(leaf)
        if len(calls) == 5:
            raise ModelLoadError("model.safetensors cannot be read")
        check(*leaf)

    with mock.patch.object(weight_update, "_check", fails):
        error = error_of(served.update("new", keep_pause=True), 503)
    assert error["code"] == "no_weights"
    assert "cannot be read; an update of the weights has failed" in error["message"]
    asked = httpx.post(f"{served.base}/v1/completions", json={"prompt": PROMPTS[0], "max_tokens": 2})
    assert error_of(asked, 503)["code"] == "no_weights"
    assert httpx.get(f"{served.base}/ready").status_code == 503
    assert served.update("new").json()["success"]
    httpx.post(f"{served.base}/resume", headers=ADMIN).raise_for_status()
    assert served.ask(PROMPTS[0])["token_ids"] == answer_of(served.new, PROMPTS[0], 8)
    assert httpx.get(f"{served.base}/ready").status_code == 200


def test_paused_and_sleeping_servers_are_updated(served, old_weights):
    post = lambda path: httpx.post(f"{served.base}{path}", headers=ADMIN, timeout=60).raise_for_status()  # noqa: E731
    post("/pause?mode=keep&clear_cache=false")
    assert served.update("new", weight_version=1).json()["weight_version"] == "1"
    assert httpx.get(f"{served.base}/is_paused", headers=ADMIN).json()["is_paused"]
    post("/resume")
    assert served.ask(PROMPTS[2])["token_ids"] == answer_of(served.new, PROMPTS[2], 8)
    assert served.update("old", keep_pause=True).json()["success"]
    assert httpx.get(f"{served.base}/is_paused", headers=ADMIN).json()["is_paused"]
    post("/resume")
    for order in (["wake_up", "update"], ["update", "wake_up"], ["wake_up?tags=weights", "update", "wake_up"]):
        post("/sleep?level=2")
        for step in order:
            if step == "update":
                assert served.update("new").json()["success"]
            else:
                post(f"/{step}")
        assert served.ask(PROMPTS[2])["token_ids"] == answer_of(served.new, PROMPTS[2], 8)
    wait_for(lambda: httpx.get(f"{served.base}/ready").status_code == 200)
    metrics = httpx.get(f"{served.base}/metrics").text
    assert 'jpaged:weight_version_info{engine="0",model_name="tiny",version="' in metrics
    inspected = httpx.get(f"{served.base}/admin/inspect", headers=ADMIN).json()
    assert inspected["weight_version"] > 1
    assert inspected["stats"]["compiles_after_ready"] == 0
