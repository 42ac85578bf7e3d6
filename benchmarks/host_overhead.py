"""Measures the host side: a step of the engine, a call of a program, a block of the pool, a token of text.

    python benchmarks/host_overhead.py

Prints tables and the machine. Needs no model and no accelerator. `engine step` has a runner that does nothing.
`engine and runner` has the real runner, with the weights' leaves of Llama 3.1 8B and programs that compute nothing.
`clock` and `processor` are the minimum of several rounds, because other programs only add to them.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import prometheus_client
from tokenizers import Tokenizer, decoders, models

from jpaged import async_llm
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, block_digest, prefix_root, token_bytes
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.detokenizer import TextDecoder, WindowDecoder, text_decoder
from jpaged.engine.output.output_processor import OutputProcessor
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.step_plan import RowMask, SamplerVariant, StepPlan, StepResult, TextShape
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.remote.host import FrontEndLink
from jpaged.frontend.remote.messages import (
    TOKENS,
    Begin,
    Call,
    FrameReader,
    Results,
    frame,
    message_of_engine,
    tokens_of,
)
from jpaged.metrics import TOKEN_BOUNDS, Histogram, ProgramMetrics
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.runtime import stage_runner
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step import forward as step
from jpaged.runtime.step import output_programs

# The layers and matrices of Llama 3.1 8B, each of them tiny: a call's cost follows the number of arrays.
MANY_LEAVES = DecoderSpec(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_layers=32, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=2048, rope=Rope(),
)  # fmt: skip
ROWS = (1, 64, 256)
BEGINNING, MEASURED = 50, 250  # tokens of a stream, of 400
STEPS = 600  # measured one by one, so that some are undisturbed on a busy machine
DECODING = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
DELTAS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
# Parts of a step: (name, object that has the function, attribute).
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("schedule", Scheduler, "schedule"),
    ("changes of block tables", stage_runner, "upload_long_rows"),
    ("pack the plan", stage_runner, "pack"),
    ("call of the forward program", stage_runner, "run_forward"),
    ("call of the sampling program", stage_runner.LastStageRunner, "_run_output"),
    ("collect the tokens", ModelRunner, "collect"),
    ("text, stops, outputs", OutputProcessor, "process"),
)
STOPPING = SamplingParams(stop=["\n\n", "rex"])


class NoDevice:
    """A runner that answers every step with the same token at once."""

    num_blocks = 40_000
    block_size = 16
    max_num_batched_tokens = 8192
    num_stages = 1
    max_model_len = 2048
    vocab_size = 50_000
    max_logprobs = 20
    logprobs_mode = "raw_logprobs"
    returns_sampling_mask = returns_routed_experts = False
    num_adapter_slots = 0
    compiles_after_ready = 0
    is_ready = True
    text_shapes: Sequence[TextShape] = ()
    recurrent_sizes: None = None
    longrope_switch_len = None
    host_slots = 0
    transfer_costs = None
    min_jump_per_request = 0.0
    max_drafts = 0
    verify_sizes: tuple[int, ...] = ()
    decode_sizes: Sequence[int] = ()
    device_drafter = None

    def __init__(self, max_num_seqs: int, windows: tuple[int | None, ...]):
        self.max_num_seqs = max_num_seqs
        self.windows = windows

    def program_metrics(self) -> ProgramMetrics:
        return ProgramMetrics(ready=0, missing=0, seconds=0.0)

    def dispatch(self, plan: StepPlan) -> int:
        return len(plan.rows)

    def sample(self, handle: int, masks: Sequence[RowMask]) -> int:
        return handle

    def collect(self, handle: int) -> StepResult:
        return StepResult(np.full(handle, 5, np.int32))

    def update_params(self, leaves: object) -> None:
        pass

    def weights_problem(self) -> None:
        return None

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


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time of one unit of work, in microseconds. Load on the machine changes processor time less than clock time."""

    clock: float      # minimum
    processor: float  # of the calling thread, minimum
    median: float     # of the processor time


def microseconds(work: Callable[[], int], rounds: int = 5) -> Cost:
    """Time of one unit of work. `work` returns its number of units."""
    clock, processor = [], []
    for _ in range(rounds):
        cpu, began = time.thread_time(), time.perf_counter()
        count = work()
        clock.append((time.perf_counter() - began) / count * 1e6)
        processor.append((time.thread_time() - cpu) / count * 1e6)
    return Cost(min(clock), min(processor), statistics.median(processor))


def idle_runner(max_num_seqs: int) -> ModelRunner:
    """A runner of MANY_LEAVES whose programs compute nothing: they return their input state."""

    def forward(
        params: Any, state: Any, packed: jax.Array, hidden: None, proposed: None, **static: Any
    ) -> tuple[Any, jax.Array]:
        return state, packed[0]

    def sample(
        params: Any, mask: Any, table: Any, sampling: Any, hidden: Any, rows: jax.Array, *, num_rows: int, **static: Any
    ) -> tuple[Any, Any, jax.Array]:
        return table, sampling, rows[0, :num_rows, None]

    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(MANY_LEAVES, jnp.float32))
    with (
        tempfile.TemporaryDirectory() as folder,  # engines find stored programs by name, and must not find these
        mock.patch.object(step, "forward", forward),
        mock.patch.object(output_programs, "sample", sample),
    ):
        config = EngineConfig(model="", max_num_seqs=max_num_seqs, max_model_len=2048, compilation_cache_dir=folder)
        return ModelRunner.create(MANY_LEAVES, params, config)


def tokenizer() -> "Backend":
    """A byte-level tokenizer of 250 tokens, each a short word."""
    backend = Tokenizer(models.BPE({f"word{i}": i for i in range(250)}, []))
    backend.decoder = decoders.ByteLevel()
    return Backend(backend)


def decoding(
    runner: Any, rows: int, params: SamplingParams = DECODING, text: "Backend | None" = None,
    options: EngineOptions | None = None,
) -> Engine:  # fmt: skip
    """An engine with `rows` requests, all decoding."""
    engine = Engine(runner, text, options or EngineOptions())
    for row in range(rows):
        stream = params.output_kind is RequestOutputKind.DELTA
        engine.add_request(str(row), [row] * 100, params, stream=stream)
    while any(not request.schedule.decoding for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def decode_step(runner: Any, rows: int, params: SamplingParams = DECODING, text: "Backend | None" = None) -> Cost:
    """Cost of one step with `rows` rows, all decoding. Existing objects are frozen (`gc.freeze`), as in the server."""
    engine = decoding(runner, rows, params, text)
    gc.freeze()

    def turn() -> int:
        engine.step()
        return 1

    cost = microseconds(turn, rounds=STEPS)
    engine.start_over()
    return cost


def parts_of_step(runner: ModelRunner, rows: int, text: "Backend") -> list[float]:
    """Minimum microseconds of each of PARTS, and of the rest of a step."""
    engine, clock = decoding(runner, rows, text=text), time.perf_counter
    gc.freeze()
    totals = [0.0] * len(PARTS)

    def timed(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = function(*args, **kwargs)
            totals[index] += clock() - began
            return result

        return call

    rounds = []
    with contextlib.ExitStack() as stack:
        for index, (_, owner, name) in enumerate(PARTS):
            stack.enter_context(mock.patch.object(owner, name, timed(index, getattr(owner, name))))
        for _ in range(STEPS):
            totals[:] = [0.0] * len(PARTS)
            began = clock()
            engine.step()
            whole = clock() - began
            rounds.append([*totals, whole - sum(totals)])
    engine.start_over()
    return [min(each) * 1e6 for each in zip(*rounds, strict=True)]


def async_steps(runner: ModelRunner, text: "Backend") -> list[tuple[float, float]]:
    """(clock, processor) microseconds of a step of `AsyncLLM`, for each number of ROWS streams. Closes the runner.

    Each stream has a reader on the event loop.
    """
    engine = Engine(runner, text)

    def built(*args: Any, **kwargs: Any) -> BuiltEngine:
        return BuiltEngine(engine, EngineConfig(model=""), MANY_LEAVES, None, SamplingParams())

    async def read(llm: async_llm.AsyncLLM, row: int) -> None:
        async for _ in llm.generate({"prompt_token_ids": [row] * 100}, dataclasses.replace(DELTAS, max_tokens=400)):
            pass

    async def step(llm: async_llm.AsyncLLM, streams: int) -> tuple[float, float]:
        costs = []
        for _ in range(3):
            gc.freeze()
            before, began, cpu = llm.stats().steps, time.perf_counter(), time.process_time()
            await asyncio.gather(*(read(llm, row) for row in range(streams)))
            steps = (llm.stats().steps - before) / 1e6
            costs.append(((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps))
        return min(costs)

    async def run() -> list[tuple[float, float]]:
        async with async_llm.AsyncLLM("") as llm:
            return [await step(llm, streams) for streams in ROWS]

    with mock.patch.object(async_llm, "build_engine", built):
        return asyncio.run(run())


def drain(sock: socket.socket, rounds: int) -> None:
    """A front end that reads everything and makes no text. It runs in a process of its own.

    It calls `is_paused` after BEGINNING tokens of all streams of a round, and again after MEASURED more.
    """
    frames = FrameReader()

    def messages() -> Iterator[Any]:
        while data := sock.recv(2**20):
            for kind, content in frames.feed(data):
                yield len(tokens_of(content)[0]) if kind == TOKENS else message_of_engine(content)

    read = messages()
    next(read)  # the welcome
    params = dataclasses.replace(DELTAS, max_tokens=400, detokenize=False)
    for streams in ROWS:
        for number in range(rounds * streams):
            prompt = {"prompt_token_ids": [number % streams] * 100}
            sock.sendall(frame(Begin(number, f"{streams}-{number}", True, prompt, params, "")))
            if number % streams == streams - 1:
                left, tokens, marks = streams, 0, [BEGINNING * streams, (BEGINNING + MEASURED) * streams]
                while left:
                    match next(read):
                        case int(count):
                            tokens += count
                            if marks and tokens >= marks[0]:
                                sock.sendall(frame(Call(number * 2 + len(marks), "is_paused")))
                                del marks[0]
                        case Results(pairs):
                            left -= sum(1 for _, result in pairs if result is not None and result.finished)


def remote_steps(runner: ModelRunner, rounds: int = 3) -> list[float]:
    """Processor microseconds of a step in the engine's process, for each number of ROWS streams of a front end.

    All threads count, and nothing but steps: all streams have begun, and none ends.
    """
    engine = Engine(runner, None)
    costs: list[float] = []

    def built(*args: Any, **kwargs: Any) -> BuiltEngine:
        return BuiltEngine(engine, EngineConfig(model=""), MANY_LEAVES, None, SamplingParams())

    async def run() -> None:
        async with async_llm.AsyncLLM("") as llm:
            ours, theirs = socket.socketpair()
            questions = socket.socketpair()
            process = multiprocessing.get_context("spawn").Process(target=drain, args=(theirs, rounds), daemon=True)
            process.start()
            link = FrontEndLink(llm, ours, questions[0], lambda: None)
            ended = asyncio.Event()
            marks: list[tuple[float, int]] = []
            found: list[float] = []

            async def is_paused() -> bool:
                """The front end calls it at the begin and at the end of a measurement."""
                gc.freeze()
                marks.append((time.process_time(), llm.stats().steps))
                if len(marks) == 2:
                    (began, first), (until, last) = marks
                    marks.clear()
                    found.append((until - began) / (last - first) * 1e6)
                    if len(found) == rounds:
                        costs.append(min(found))
                        found.clear()
                        if len(costs) == len(ROWS):
                            ended.set()
                return False

            llm.is_paused = is_paused
            await link.open()
            await ended.wait()
            process.kill()

    with mock.patch.object(async_llm, "build_engine", built):
        asyncio.run(run())
    return costs


def metrics_cost(rows: int) -> list[Cost]:
    """Cost of a step of `rows` decodes, with metrics and with disable_log_stats. The engines alternate."""
    runner = NoDevice(rows, (None,))
    engines = [decoding(runner, rows, options=EngineOptions(disable_log_stats=off)) for off in (False, True)]
    gc.freeze()
    costs: list[list[Cost]] = [[], []]

    def steps(engine: Engine) -> int:
        for _ in range(20):
            engine.step()
        return 20

    for _ in range(40):
        for engine, found in zip(engines, costs, strict=True):
            found.append(microseconds(functools.partial(steps, engine), rounds=1))
    return [
        Cost(
            min(one.clock for one in found), min(one.processor for one in found),
            statistics.median(one.processor for one in found),
        )
        for found in costs
    ]  # fmt: skip


def observation() -> tuple[Cost, Cost]:
    """Costs of one observation, in the engine's histogram and in prometheus_client's."""
    own = Histogram(TOKEN_BOUNDS)
    theirs = prometheus_client.Histogram("x", "x", ("a",), registry=None, buckets=TOKEN_BOUNDS).labels("b")

    def turn(observe: Callable[[float], None]) -> Callable[[], int]:
        def observations() -> int:
            for _ in range(10_000):
                observe(0.03)
            return 10_000

        return observations

    return microseconds(turn(own.observe)), microseconds(turn(theirs.observe))


def inspection() -> tuple[Cost, Cost, Cost]:
    """Costs to capture an engine with 40,000 blocks and 256 requests, to describe it, and to check it."""
    engine = decoding(NoDevice(256, (None,)), 256)

    def capture() -> EngineCapture:
        answer: Future[EngineCapture] = Future()
        engine.inspect(answer)
        return answer.result()

    copy = capture()
    return (
        microseconds(lambda: len((capture(),)), rounds=9),
        microseconds(lambda: len((copy.snapshot(),)), rounds=9),
        microseconds(lambda: len((engine.check_integrity(),)), rounds=9),
    )


def pool_block(num_blocks: int) -> Cost:
    """Cost to allocate, name, find and free one block of a full pool."""
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
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    copying, describing, checking = inspection()
    costs, (own, theirs) = {n: metrics_cost(n) for n in ROWS}, observation()
    full_attention, seven = (None,), (512,) * 6 + (None,)
    runner, text = idle_runner(256), tokenizer()
    rows = [
        *((f"engine step, {n} rows decoding", decode_step(NoDevice(n, full_attention), n)) for n in ROWS),
        ("engine step, 64 rows decoding, 7 kv_groups", decode_step(NoDevice(64, seven), 64)),
        *((f"engine step, {n} rows, with figures for /metrics", cost) for n, (cost, _) in costs.items()),
        *((f"engine step, {n} rows, --disable-log-stats", cost) for n, (_, cost) in costs.items()),
        ("one observation of a histogram", own),
        ("one observation of prometheus_client's histogram", theirs),
        *((f"engine and runner, {n} rows decoding", decode_step(runner, n)) for n in ROWS),
        *((f"engine and runner, {n} rows, with text", decode_step(runner, n, text=text)) for n in ROWS),
        *((f"engine and runner, {n} rows, streamed text", decode_step(runner, n, DELTAS, text)) for n in ROWS),
        *((f"one block, of {size:,}: allocate, name, find, free", pool_block(size)) for size in (1000, 100_000)),
        ("inspect 40,000 blocks: the copy; the engine stands still", copying),
        ("inspect 40,000 blocks: its description, on another thread", describing),
        ("check_integrity of 40,000 blocks, when idle", checking),
        *((f"text of one token, {way}", microseconds(turn)) for way, turn in texts()),
    ]
    parts = [parts_of_step(runner, n, text) for n in ROWS]
    streams = async_steps(runner, text)
    remote = remote_steps(idle_runner(256))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, JAX {jax.__version__}")
    print(f"{'microseconds':<66}{'clock':>11}{'processor':>11}{'median':>11}")
    for what, cost in rows:
        print(f"{what:<66}{cost.clock:>11.2f}{cost.processor:>11.2f}{cost.median:>11.2f}")
    print(f"\n{'parts of a step with text, microseconds at best':<50}" + "".join(f"{n:>6} rows" for n in ROWS))
    for part, name in enumerate((*(name for name, _, _ in PARTS), "all else")):
        print(f"{name:<50}" + "".join(f"{each[part]:>11.1f}" for each in parts))
    print(f"\n{'AsyncLLM, microseconds a step at best':<50}{'clock':>12}{'processor':>12}")
    for n, (clock, processor) in zip(ROWS, streams, strict=True):
        print(f"{f'{n} streams with a reader each':<50}{clock:>12.0f}{processor:>12.0f}")
    for n, processor in zip(ROWS, remote, strict=True):
        print(f"{f'{n} streams of a front end, the engine process':<50}{'':>12}{processor:>12.0f}")


if __name__ == "__main__":
    main()
