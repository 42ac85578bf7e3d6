"""Whole steps on an accelerator: forward pass and sampling, with the programs that an engine runs.

    python benchmarks/steps.py --out benchmarks/results/steps.jsonl          # about 10 minutes on a GPU
    python benchmarks/steps.py --out FILE --only qwen3-0.6b                  # one model
    python benchmarks/steps.py --tiny --out /tmp/steps.jsonl                 # a rehearsal on any machine
    python benchmarks/steps.py --report benchmarks/results/steps.jsonl       # the table and the plot again

1. The GPU's limits, measured: bytes copied per second and bf16 flops per second.
2. Decode steps of Llama 3.1 8B and Qwen3 0.6B, with random weights: 1 to 256 rows, greedy and with random sampling.
3. The largest mixed step: one chunk of a prompt, whose earlier tokens are in the pages.

A time is per step, in a run of steps without waits of the host. It is the median of the repeats, without the first run.
`share` is the GPU's shortest possible time divided by the step's time. The shortest time is for reading weights and KV
once, or for the matmuls of a prompt. Each result is a line of the file. Measured cases are not measured again, so an
interrupted run continues.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from kernels import measure_card, sentence
from tqdm import tqdm

from jpaged.engine.step_plan import SamplerVariant
from jpaged.frontend.engine_config import engine_config
from jpaged.models.spec import DecoderSpec, Params, QKNorm, Rope, param_shapes
from jpaged.params.sampling import COLUMNS
from jpaged.runtime.compile.blueprint import Blueprint, FittedBuild, ServedModel
from jpaged.runtime.memory.device_memory import free_device_bytes
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.roofline import Load, least_bytes
from jpaged.runtime.state import DeviceState, Field
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.forward import flat_weights, run_forward
from jpaged.runtime.step.output_programs import SampleShape, lm_head_params

MODELS = {
    "llama-3.1-8b": DecoderSpec(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position=131_072, rope=Rope(theta=500_000.0), tie_embeddings=False,
    ),
    "qwen3-0.6b": DecoderSpec(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
        head_dim=128, max_position=40_960, rope=Rope(theta=1_000_000.0), tie_embeddings=True, qk_norm=QKNorm.HEAD,
    ),
}  # fmt: skip
TINY = DecoderSpec(
    vocab_size=1024, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position=256, rope=Rope(), tie_embeddings=True,
)  # fmt: skip
DECODES = (Load(1, 1024), Load(1, 32_768), Load(8, 4096), Load(64, 2048), Load(256, 1024))
CHUNK = Load(1, 8192)  # its last tokens are the chunk
VARIANTS = {"greedy": SamplerVariant.GREEDY, "random": SamplerVariant.RANDOM}
TRACED = ("greedy-1-1024", "greedy-64-2048", "random-64-2048", "chunk-8192", "greedy-3-40")


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured case, as a line of the file."""

    model: str
    step: str
    rows: int
    context: int
    least_bytes: int
    flops: float
    seconds: list[float]  # of a step, for each repeat; empty if the case failed
    error: str = ""


class Steps:
    """A model with random weights on the device, and programs that compile on demand."""

    def __init__(self, spec: DecoderSpec, loads: list[Load], turns: int, tiny: bool, traces: pathlib.Path | None):
        self.turns, self.traces = turns, traces
        options: dict[str, Any] = {"max_num_seqs": max(load.rows for load in loads)}
        if tiny:
            options |= {"max_num_batched_tokens": 32}
        config = engine_config("steps", options)
        placement = Placement.single(jax.devices()[0])
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        blueprint = Blueprint.draw(ServedModel(spec, param_shapes(spec, dtype)), config, placement)
        free = free_device_bytes(jax.devices()[0], config)  # too small a pool would make block tables narrow
        size = blueprint.limits.block_size
        self.blocks = [load.rows * -(-(load.context + 2 * turns) // size) for load in loads]
        self.build: FittedBuild = blueprint.fit(free_bytes=free).with_blocks(max(self.blocks))
        if (longest := max(load.context for load in loads) + 2 * turns) > self.build.limits.max_model_len:
            found = f"requests of {longest:,} tokens, and the engine's longest has {self.build.limits.max_model_len:,}"
            raise SystemExit(f"{found}: this device has too little memory")
        self.params = random_params(param_shapes(spec, dtype))
        self._compile = functools.cache(self.build.compile)

    def compile(self, decodes: Sequence[Load], variants: Sequence[SamplerVariant]) -> None:
        """Compile the programs of these decodes and of the chunk, in parallel. Measuring a case raises its error."""
        shapes = {shape for load in decodes for variant in variants for shape in self.decode_shapes(load, variant)}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            concurrent.futures.wait([pool.submit(self._compile, shape) for shape in (*shapes, self.chunk_shape)])

    @property
    def spec(self) -> DecoderSpec:
        return self.build.blueprint.model.spec

    def decode_shapes(self, load: Load, variant: SamplerVariant) -> tuple[ForwardShape, SampleShape]:
        """The smallest programs that fit the rows."""
        shapes = self.build.blueprint.program_shapes
        forwards = [s for s in shapes if isinstance(s, ForwardShape) and s.is_decode and s.rows >= load.rows]
        samplers = [s for s in shapes if isinstance(s, SampleShape) and s.variant is variant and s.rows >= load.rows]
        return min(forwards, key=lambda s: s.rows), min(samplers, key=lambda s: s.rows)

    @property
    def chunk_shape(self) -> ForwardShape:
        """The largest mixed step."""
        mixed = [s for s in self.build.blueprint.program_shapes if isinstance(s, ForwardShape) and not s.is_decode]
        return max(mixed, key=lambda s: s.tokens)

    def state(self, load: Load, temperature: float, tokens: int) -> DeviceState:
        """State of requests with `load.context - tokens` tokens in the pages. The KV is random."""
        state, size = self.build.create_state(), self.build.limits.block_size
        table = np.zeros(state.table.shape, np.int32)
        rows = slice(0, load.rows)
        table[rows, Field.LENGTH] = load.context - tokens
        table[rows, Field.LAST_TOKEN] = np.arange(load.rows)
        table[rows, Field.TEMPERATURE] = np.float32(temperature).view(np.int32)
        table[rows, COLUMNS["top_p"]] = np.float32(0.95).view(np.int32)
        table[:, COLUMNS["repetition_penalty"]] = np.float32(1).view(np.int32)
        each = -(-(load.context + 2 * self.turns) // size)
        blocks = np.zeros(state.blocks.shape, np.int32)
        order = np.random.default_rng(0).permutation(self.build.memory_plan.num_blocks)[: load.rows * each]
        blocks[rows, : min(each, blocks.shape[1])] = order.reshape(load.rows, each)[:, : blocks.shape[1]]
        put = self.build.blueprint.placement.put
        pages = jax.tree.map(_random_like, state.pages)
        return dataclasses.replace(state.with_pages(pages), table=put(table), blocks=put(blocks))

    def decode(self, load: Load, variant: SamplerVariant, repeats: int) -> Result:
        """Time consecutive decode steps. Each reads the token that the previous step sampled."""
        forward, sampler = self.decode_shapes(load, variant)
        run, sample = self._compile(forward), self._compile(sampler)
        packed = np.full(forward.packed_size, -1, np.int32)
        packed[forward.cuts["rows"]][: load.rows] = np.arange(load.rows)
        packed[forward.cuts["output_rows"]].reshape(2, forward.rows)[:, : load.rows] = np.arange(load.rows)
        weights, head = flat_weights(self.params), lm_head_params(self.spec, self.params)

        def step(state: DeviceState) -> tuple[DeviceState, Any]:
            state, _ = run_forward(run, weights, state, packed)
            table, _, output = sample(head, None, state.table, None, state.hidden, state.output_rows)
            return dataclasses.replace(state, table=table), output

        name = f"{variant.name.lower()}-{load.rows}-{load.context}"
        seconds = self._time(name, self.state(load, float(variant is SamplerVariant.RANDOM), 1), step, repeats)
        read = least_bytes(self.build, forward, load) + least_bytes(self.build, sampler, load)
        return Result("", f"decode, {variant.name.lower()}", load.rows, load.context, read, 0.0, seconds)

    def chunk(self, load: Load, repeats: int) -> Result:
        """Time the largest mixed step: the last tokens of one prompt, repeated."""
        shape = self.chunk_shape
        run = self._compile(shape)
        packed = np.full(shape.packed_size, -1, np.int32)
        packed[shape.cuts["rows"]][0], packed[shape.cuts["num_decodes"]] = 0, 0
        packed[shape.cuts["num_tokens"]] = 0
        packed[shape.cuts["num_tokens"]][0] = shape.tokens
        packed[shape.cuts["prompt_tokens"]] = np.arange(shape.tokens) % self.spec.vocab_size
        state = self.state(load, 0.0, shape.tokens)
        weights, table = flat_weights(self.params), state.table.copy()

        def step(state: DeviceState) -> tuple[DeviceState, Any]:
            state, tokens = run_forward(run, weights, dataclasses.replace(state, table=table.copy()), packed)
            return state, tokens

        seconds = self._time(f"chunk-{load.context}", state, step, repeats)
        matrices = sum(leaf.size for leaf in jax.tree.leaves(self.params["layers"]))
        seen = shape.tokens * (load.context - shape.tokens / 2)
        attention = 4.0 * seen * self.spec.num_layers * self.spec.num_heads * self.spec.head_dim
        read = least_bytes(self.build, shape, load)
        flops = 2.0 * shape.tokens * matrices + attention
        return Result("", f"chunk of {shape.tokens:,}", 1, load.context, read, flops, seconds)

    def _time(
        self, name: str, state: DeviceState, step: Callable[[DeviceState], tuple[DeviceState, Any]], repeats: int
    ) -> list[float]:
        """Seconds of a step, for each run of `turns` steps. With --trace, three more steps are recorded afterwards."""
        times, lengths, output = [], np.asarray(state.table), None
        for _ in range(repeats + 1):
            table = self.build.blueprint.placement.put(lengths)  # undo the growth of the requests
            state = dataclasses.replace(state, table=table)
            jax.block_until_ready(state)
            begin = time.perf_counter()
            for _ in range(self.turns):
                state, output = step(state)
            jax.block_until_ready((state, output))
            times.append((time.perf_counter() - begin) / self.turns)
        if self.traces is not None and name in TRACED:
            with jax.profiler.trace(self.traces / name):
                for _ in range(3):
                    state, output = step(state)
                jax.block_until_ready((state, output))
        return times[1:]


@functools.partial(jax.jit, donate_argnums=0)
def _random_like(x: jax.Array) -> jax.Array:
    """Random numbers with an array's shape and dtype, in its memory. float32 would need twice the memory."""
    return jax.random.normal(jax.random.key(1), x.shape, x.dtype)


def random_params(shapes: Params) -> Params:
    """Random arrays of these shapes on the device. Zeros would change the times."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, dtype)

    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(make(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True))


def lines_of(file: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of results. Exits with a message if the file cannot be read or a line is not JSON."""
    try:
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except ValueError:
        raise SystemExit(f"{file}: has a line that is not JSON: remove the line, or name another file") from None


def case_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a case."""
    return tuple(result[name] for name in ("model", "step", "rows", "context"))


def report(file: pathlib.Path) -> None:
    """Print the table of a file's results, and draw a plot next to it if matplotlib is installed."""
    lines = lines_of(file)
    card = next((line for line in lines if "card" in line), None)
    if card is None:
        raise SystemExit(f"{file}: has no results of this script")
    found = [line["result"] for line in lines if "result" in line]
    results = [Result(**result) for result in {case_of(one): one for one in found}.values()]  # the last of each case
    copy, products = card["card"]["copy_bytes_per_s"], card["card"]["bf16_flops_per_s"]
    print(
        f"{card['device']}, JAX {card['jax']}, {card['date']}: copy {copy / 1e9:,.0f} GB/s, products "
        f"{products / 1e12:,.1f} Tflop/s"
    )
    if card["tiny"]:
        print("a rehearsal: the figures mean nothing")
    print(f"{'model':14}{'step':20}{'rows':>5}{'context':>9}{'ms':>9}{'limit':>9}{'share':>7}{'tokens/s':>10}")
    names, shares, times = [], [], []
    for result in results:
        name = f"{result.model:14}{result.step:20}{result.rows:5}{result.context:9,}"
        if not result.seconds:
            print(f"{name}  failed: {result.error}")
            continue
        limit = max(result.least_bytes / copy, result.flops / products)
        middle = statistics.median(result.seconds)
        tokens = float(result.step.split()[-1].replace(",", "")) if result.flops else result.rows
        names.append(f"{result.model}, {result.step}, {result.rows} x {result.context:,}")
        shares.append(min(1.0, limit / middle))  # above 1, the limit was measured too low
        times.append(f" {1e3 * middle:.3g} ms")
        print(f"{name}{1e3 * middle:9.3f}{1e3 * limit:9.3f}{limit / middle:7.0%}{tokens / middle:10,.0f}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 0.28 * len(shares) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, [100 * share for share in shares], color="C0")
    axes.bar_label(bars, times)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)  # room for the labels
    axes.set_xticks(range(0, 101, 20))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("limit of the device / time of the step, percent")
    note = " (rehearsal: the figures mean nothing)" if card["tiny"] else ""
    axes.set_title(f"{card['device']}, JAX {card['jax']}, {card['date']}{note}", fontsize="medium")
    figure.savefig(file.with_suffix(".png"), dpi=120)


def main() -> None:
    """Measure the cases that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="file of the results, one JSON object a line")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="only print the table of a file")
    parser.add_argument("--only", choices=MODELS, help="one model; default: all")
    parser.add_argument("--turns", type=int, default=30, help="steps of a repeat (default: 30)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace", type=pathlib.Path, metavar="FOLDER", help="also record three steps of some cases")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: both")
    parser.add_argument("--tiny", action="store_true", help="a small model: a rehearsal on any machine")
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    if args.out is None:
        parser.exit(2, "name a file: --out FILE\n")
    if args.turns < 1 or args.repeats < 1:
        parser.exit(2, "--turns and --repeats must be at least 1\n")
    old = lines_of(args.out) if args.out.exists() else []
    here = (jax.devices()[0].device_kind, jax.__version__, args.tiny)
    for line in old:
        there = tuple(line[name] for name in ("device", "jax", "tiny")) if "card" in line else here
        if there != here:
            parser.exit(2, f"{args.out}: has (device, JAX, tiny) {there}, not {here}: name another file\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # A case that failed is measured again.
    done = {case_of(line["result"]) for line in old if "result" in line and line["result"]["seconds"]}

    def keep(**line: Any) -> None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    if not any("card" in line for line in old):
        keep(
            card=measure_card(args.tiny, args.repeats), device=jax.devices()[0].device_kind, jax=jax.__version__,
            date=datetime.date.today().isoformat(), tiny=args.tiny,
        )  # fmt: skip
    models = {"tiny": TINY} if args.tiny else MODELS if args.only is None else {args.only: MODELS[args.only]}
    decodes, chunk = ((Load(3, 40), Load(8, 100)), Load(1, 100)) if args.tiny else (DECODES, CHUNK)
    for name, spec in models.items():
        traces = args.trace / name if args.trace else None
        variants = [VARIANTS[name] for name in args.variants]
        steps = Steps(spec, [*decodes, chunk], 2 if args.tiny else args.turns, args.tiny, traces)
        jobs: list[tuple[str, Load, Callable[[], Result]]]
        jobs = [(f"decode, {v.name.lower()}", load, functools.partial(steps.decode, load, v, args.repeats))
                for load in decodes for v in variants]  # fmt: skip
        tokens = steps.build.limits.max_num_batched_tokens
        jobs.append((f"chunk of {tokens:,}", chunk, functools.partial(steps.chunk, chunk, args.repeats)))
        jobs = [job for job in jobs if (name, job[0], job[1].rows, job[1].context) not in done]
        if jobs:
            steps.compile(decodes, variants)
        for step, load, measure in tqdm(jobs, desc=name):
            try:
                result = dataclasses.replace(measure(), model=name)
            except Exception as error:  # compilers and drivers raise many types; the other cases are measured
                result = Result(name, step, load.rows, load.context, 0, 0.0, [], sentence(error))
            keep(result=dataclasses.asdict(result))
        del steps  # before the weights of the next model
    report(args.out)


if __name__ == "__main__":
    main()
