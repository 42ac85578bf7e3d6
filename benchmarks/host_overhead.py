"""Measures the host side: a step of the engine, a block of the pool, a token of text. Needs no model and no device.

    python benchmarks/host_overhead.py

Prints a table and the machine. The runner does nothing, so an engine step consists of host time only.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models

from jpaged.engine.engine import Engine
from jpaged.engine.inspect import capture
from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, block_digest, prefix_root, token_bytes
from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.detokenizer import TextDecoder, WindowDecoder, text_decoder
from jpaged.engine.step_plan import RowMask, StepPlan, StepResult
from jpaged.params.sampling import SamplingParams

STOPPING = SamplingParams(stop=["\n\n", "rex"])


class NoDevice:
    """A runner that answers every step with the same token at once."""

    num_blocks = 40_000
    block_size = 16
    max_num_batched_tokens = 8192
    max_model_len = 2048
    vocab_size = 50_000
    max_logprobs = 20
    compiles_after_ready = 0
    is_ready = True
    longrope_switch_len = None
    host_slots = 0
    transfer_costs = None
    min_jump_per_request = 0.0

    def __init__(self, max_num_seqs: int, windows: tuple[int | None, ...]):
        self.max_num_seqs = max_num_seqs
        self.windows = windows

    def dispatch(self, plan: StepPlan) -> int:
        return len(plan.rows)

    def sample(self, handle: int, masks: Sequence[RowMask]) -> int:
        return handle

    def collect(self, handle: int) -> StepResult:
        return StepResult(np.full(handle, 5, np.int32))

    def set_params(self, params: object) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def can_run(self, sampler: SamplerVariant, *, scores: bool) -> bool:
        return True

    def prefix_cacheable(self, prompt_len: int) -> bool:
        return True

    def close(self) -> None:
        pass


class Backend:
    """A tokenizer of `tokenizers` with the interface of the window decoder."""

    def __init__(self, backend: Tokenizer):
        self.backend = backend

    def __len__(self) -> int:
        return self.backend.get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self.backend


def microseconds(work: Callable[[], int], rounds: int = 5) -> float:
    """Median time of one unit of work. `work` returns the number of units that it did."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        count = work()
        times.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(times)


def decoding(rows: int, windows: tuple[int | None, ...] = (None,)) -> Engine:
    """An engine with `rows` requests, all decoding."""
    engine = Engine(NoDevice(rows, windows))
    for row in range(rows):
        engine.add_request(str(row), [row] * 100, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    while any(not request.schedule.decoding for request in engine._scheduler.running) or engine._scheduler.waiting:
        engine.step()
    return engine


def decode_step(rows: int, windows: tuple[int | None, ...] = (None,)) -> float:
    """Microseconds of one step with `rows` rows, all decoding. windows: one per kv_group."""
    engine = decoding(rows, windows)

    def steps() -> int:
        for _ in range(100):
            engine.step()
        return 100

    return microseconds(steps)


def inspection() -> tuple[float, float, float]:
    """Microseconds to capture an engine with 40,000 blocks and 256 requests, to describe it, and to check it."""
    engine = decoding(256)
    copy = capture(engine._scheduler)
    copying, describing, checking = [], [], []
    for _ in range(9):
        copying.append(microseconds(lambda: len((capture(engine._scheduler),)), rounds=1))
        describing.append(microseconds(lambda: len((copy.snapshot(),)), rounds=1))
        checking.append(microseconds(lambda: len((engine.check_integrity(),)), rounds=1))
    return statistics.median(copying), statistics.median(describing), statistics.median(checking)


def pool_block(num_blocks: int) -> float:
    """Microseconds to allocate, name, find and free one block of a full pool."""
    pool, root = BlockPool(num_blocks), prefix_root()
    names = []
    for index in range(num_blocks):
        tokens = token_bytes((index,) * 16)
        names.append(BlockName(block_digest(root, tokens), root, tokens))

    def turn() -> int:
        blocks = pool.allocate(num_blocks)
        for block, name in zip(blocks, names, strict=True):
            pool.put_name(block, name)
        for name in names:
            pool.find(name)
        pool.free(blocks)
        return num_blocks

    return microseconds(turn)


def texts() -> list[tuple[str, Callable[[], int]]]:
    """Ways to turn 12,000 tokens of a few letters each into text: decoders alone, and in an answer."""
    pieces = ["return", "self", "def", "(", ")", ":", "read", "_", "json", "é", "漢字", "Ġthe", "Ġand", "Ġof"]
    byte_level = [piece for piece in pieces if piece.isascii() or "Ġ" in piece] + ["Ã", "©"]
    spaced = [piece.replace("Ġ", "▁") for piece in pieces] + ["<0xC3>", "<0xA9>"]
    ways = []
    for kind, tokens, decoder in (
        ("byte-level", byte_level, decoders.ByteLevel()),
        ("SentencePiece", spaced, decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )),
    ):  # fmt: skip
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        backend.decoder = decoder
        ids = (list(range(len(tokens))) * 1000)[:12_000]
        table, windows = text_decoder(Backend(backend)), WindowDecoder(Backend(backend))
        assert type(table) is not WindowDecoder
        ways += [
            (f"{kind} table", _text(table, ids)),
            (f"{kind} table, in an answer", _answer(table, ids, SamplingParams())),
            (f"{kind} table, in an answer with 2 stop strings", _answer(table, ids, STOPPING)),
            (f"{kind} by windows", _text(windows, ids)),
        ]
    return ways


def _text(decoder: TextDecoder, token_ids: list[int]) -> Callable[[], int]:
    def turn() -> int:
        detokenizer = decoder.new(skip_special_tokens=True)
        for token_id in token_ids:
            detokenizer.add(token_id)
        detokenizer.finish()
        return len(token_ids)

    return turn


def _answer(decoder: TextDecoder, token_ids: list[int], params: SamplingParams) -> Callable[[], int]:
    def turn() -> int:
        text = AnswerText(decoder.new(skip_special_tokens=True), params)
        for token_id in token_ids:
            text.add(token_id)
        text.end()
        text.whole()
        return len(token_ids)

    return turn


def main() -> None:
    """Print the table."""
    copying, describing, checking = inspection()
    rows = [
        *((f"engine step, {count} rows decoding", decode_step(count)) for count in (8, 64, 256)),
        ("engine step, 64 rows decoding, 7 kv_groups", decode_step(64, (512,) * 6 + (None,))),
        *((f"one block, of {size:,}: allocate, name, find, free", pool_block(size)) for size in (1000, 100_000)),
        ("inspect 40,000 blocks: the copy; the engine stands still", copying),
        ("inspect 40,000 blocks: its description, on another thread", describing),
        ("check_integrity of 40,000 blocks, when idle", checking),
        *((f"text of one token, {way}", microseconds(turn)) for way, turn in texts()),
    ]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, medians of 5")
    for what, cost in rows:
        print(f"{what:<60}{cost:>10.2f} us")


if __name__ == "__main__":
    main()
