"""Predicts how fast compiled programs run on a kind of device: `jpaged plan --roofline`.

The engine's own programs are compiled for the device, which need not be present. The time of an operation is the
longest of three: bytes / bandwidth, FLOPs / rate, and the time of a small kernel. A collective takes the time of its
bytes on the link, with no overlap. These are estimates: the constants below are assumptions, not measurements.
"""

import collections
import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from tqdm import tqdm

from jpaged.collectives import Link, collective_seconds
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.prediction.program_text import Operation, Program, Traffic
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import SampleShape, lm_head_params
from jpaged.runtime.step.program_shapes import Shape
from jpaged.runtime.targets import Target
from pallas_kernels.paged_attention.tiling import Tiling

KERNEL_SECONDS = {"gpu": 2.5e-6, "tpu": 0.5e-6}  # a small kernel in a CUDA graph; a small operation on TPU
COMMAND_SECONDS = 10e-6   # a command that the host sends
BYTES_SHARE = 0.8         # share of the bandwidth that a kernel reaches
PRODUCTS_SHARE = 0.6      # share of the matrix units' rate that a matmul reaches
_EVERY_TOKEN = ("layer_embed_in", "altup_in", "altup_out")
PAGED = re.compile("paged_|write_")  # names of kernels that read or write KV pages
_MERGE = "paged_decode_merge"
_DECODE = ("paged_decode", _MERGE)


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of a step."""

    rows: int
    context: int     # tokens per request
    drafts: int = 0  # drafts of each row in a verify step; 0: a plain step


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """Predicted cost of all collectives of one kind in one run of a program."""

    kind: str       # one of `COLLECTIVES`
    count: int
    num_bytes: int  # as in `collective_seconds`
    seconds: float


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Predicted cost of one run of a program, on each device."""

    program: str
    kernels: int           # once per loop iteration; of a conditional, the largest branch. No collectives
    commands: int | None   # sent by the host: CUDA graphs, kernels, copies. None: not an NVIDIA GPU
    loops: int             # with an unknown number of iterations; not in the other fields
    copies: int            # operations that only copy
    bytes_moved: int
    least_bytes: int       # weights and KV, read once; of the experts only `experts_read`
    seconds: float         # including collectives
    least_seconds: float   # without collectives: max(least_bytes / bandwidth, FLOPs / rate)
    experts_read: float | None  # see `experts_read`; None: the model has no experts
    collectives: tuple[CollectiveCost, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Predicted time of a decode step or a verify step: the forward program and the `sample` program.

    A verify step returns 1 to 1 + drafts tokens of each row. The program of a drafter is not counted.
    """

    load: Load
    least_seconds: float
    greedy_seconds: float
    random_seconds: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Predictions for a model on a kind of device."""

    device: str
    programs: tuple[ProgramCost, ...]
    steps: tuple[StepCost, ...]
    num_devices: int = 1
    link: Link | None = None  # between the devices


def predict(build: FittedBuild, target: Target, loads: Sequence[Load], *, progress: bool = False) -> Roofline:
    """Compile the programs that serve `loads` and the largest mixed program, and predict their times.

    build: placed on `target`. progress: show a bar. Loads that no program can serve are skipped. Raises
    ModelLoadError if the target's rates are unknown, its compiler is not installed, or the model pools.
    """
    if target.missing is not None:
        raise ModelLoadError(f"roofline: the compiler for {target.device_kind} is in {target.missing}: install it")
    num_devices = build.blueprint.placement.shards.num_devices
    if not target.bandwidth or not target.flops:
        raise ModelLoadError(f"roofline: the rates of {target.device_kind} are not known; name a GPU or TPU as target")
    shapes = build.blueprint.program_shapes
    forwards = [shape for shape in shapes if isinstance(shape, ForwardShape)]
    samplers = [shape for shape in shapes if isinstance(shape, SampleShape)]
    if not samplers:
        raise ModelLoadError("roofline: this model pools, and has no decodes to predict")
    served = [(load, programs) for load in loads if (programs := _programs_of(load, forwards, samplers))]
    jobs: list[tuple[Shape, Load]] = [(shape, load) for load, programs in served for shape in programs]
    chunk = max((s for s in forwards if not s.is_decode and not s.drafts), key=lambda shape: shape.tokens)
    jobs.append((chunk, Load(1, chunk.tokens)))
    different = list(dict.fromkeys(shape for shape, _ in jobs))
    bar = tqdm(different, desc="Compiling", unit="program", disable=None if progress else True, leave=False)
    compiled = {shape: _compile(build, target, shape) for shape in bar}
    costs = [_cost(build, target, shape, load, compiled[shape]) for shape, load in jobs]
    steps = []
    for (load, _), forward, greedy, random in zip(served, costs[0:-1:3], costs[1:-1:3], costs[2:-1:3], strict=True):
        least = forward.least_seconds + greedy.least_seconds
        steps.append(StepCost(load, least, forward.seconds + greedy.seconds, forward.seconds + random.seconds))
    return Roofline(target.device_kind, tuple(costs), tuple(steps), num_devices, target.link)


def _programs_of(load: Load, forwards: list[ForwardShape], samplers: list[SampleShape]) -> list[Shape]:
    """The smallest programs of a step: forward, GREEDY and RANDOM `sample`. Empty: the step is too large."""
    if load.drafts:
        tokens = load.rows * (1 + load.drafts)
        steps = [s for s in forwards if s.drafts >= load.drafts and s.tokens >= tokens and s.rows >= load.rows]
    else:
        steps = [shape for shape in forwards if shape.is_decode and shape.rows >= load.rows]
    if not steps:
        return []
    forward = min(steps, key=lambda shape: shape.tokens)
    rows = forward.tokens if load.drafts else load.rows
    programs: list[Shape] = [forward]
    for variant in (SamplerVariant.GREEDY, SamplerVariant.RANDOM):
        fitting = [s for s in samplers if s.variant is variant and s.checks == (load.drafts > 0) and s.rows >= rows]
        programs.append(min(fitting, key=lambda shape: shape.rows))
    return programs


def _compile(build: FittedBuild, target: Target, shape: Shape) -> tuple[Program, int | None]:
    """A compiled program and `ProgramCost.commands`."""
    with tempfile.TemporaryDirectory() as folder, target.tracing():
        program = Program(_with_dumps(build, folder).compile(shape).as_text() or "")
        return program, _commands(pathlib.Path(folder)) if target.platform == "gpu" else None


def _cost(
    build: FittedBuild, target: Target, shape: Shape, load: Load, compiled: tuple[Program, int | None]
) -> ProgramCost:
    """Cost of one run. compiled: from `_compile`."""
    program, commands = compiled
    traffic, num_devices = list(program.traffic()), build.blueprint.placement.shards.num_devices
    collectives = collective_costs(traffic, num_devices, target)
    counted = list(_of_load(build, shape, load, (one for one in traffic if not one.operation.collective)))
    seconds = sum(one.seconds for one in collectives) + sum(
        max(
            0.0 if operation.is_transfer else KERNEL_SECONDS[target.platform],
            moved / (BYTES_SHARE * target.bandwidth),
            flops / (PRODUCTS_SHARE * target.flops),
        )
        for operation, moved, flops in counted
    )
    least = least_bytes(build, shape, load)
    flops = sum(flops for _, _, flops in counted)
    return ProgramCost(
        program=f"{shape}, {load_name(load)}" if isinstance(shape, ForwardShape) else str(shape),
        kernels=sum(not operation.is_transfer for operation, _, _ in counted),
        commands=commands,
        loops=len(program.loops()),
        copies=sum(operation.kind == "copy" for operation, _, _ in counted),
        bytes_moved=sum(moved for _, moved, _ in counted),
        least_bytes=least,
        seconds=seconds + COMMAND_SECONDS * (commands or 1),
        least_seconds=max(least / target.bandwidth, flops / target.flops),
        experts_read=experts_read(build.blueprint.model.spec, shape, load),
        collectives=collectives,
    )


def load_name(load: Load) -> str:
    """Name of a step's requests in tables: rows, context and drafts."""
    name = f"{load.rows} x {load.context:,}"
    return f"{name} + {load.drafts}" if load.drafts else name


def collective_costs(traffic: Iterable[Traffic], devices: int, target: Target) -> tuple[CollectiveCost, ...]:
    """Costs of a program's collectives, by kind. Each takes at least a small kernel's time.

    devices: size of a collective without replica groups. Asynchronous collectives count in full, without overlap.
    """
    found: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for one in traffic:
        if kind := one.operation.collective:
            size = one.operation.group_size or devices
            found[kind].append((one.read * (size if kind == "all-gather" else 1), size))
    if not found:
        return ()
    assert target.link is not None
    least, link = KERNEL_SECONDS[target.platform], target.link
    return tuple(
        CollectiveCost(
            kind, len(each), sum(num_bytes for num_bytes, _ in each),
            sum(max(least, collective_seconds(kind, num_bytes, size, link)) for num_bytes, size in each),
        )
        for kind, each in found.items()
    )


def _with_dumps(build: FittedBuild, folder: str) -> FittedBuild:
    """The same build, but XLA also writes each program's commands to a folder."""
    placement = dataclasses.replace(build.blueprint.placement, dump_to=folder)
    return dataclasses.replace(build, blueprint=dataclasses.replace(build.blueprint, placement=placement))


def _commands(folder: pathlib.Path) -> int:
    """Number of commands that the host sends. XLA writes one a line, and indents commands inside a CUDA graph."""
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    return len(re.findall(r"^\d+: k", file.read_text("utf-8"), re.MULTILINE))


def _of_load(
    build: FittedBuild, shape: Shape, load: Load, traffic: Iterable[Traffic]
) -> Iterator[tuple[Operation, int, int]]:
    """Each operation with its bytes and FLOPs. Of KV pages and experts, only the part that the load reads counts."""
    layer, unlike = -1, bool(build.blueprint.model.spec.layer_kv)
    reads: collections.Counter[str] = collections.Counter()  # number of kernels that read pages, by name
    unread = itertools.cycle(_unread_bytes(build, shape, load, name) for name in ("expert_gate_up", "expert_down"))
    for one in traffic:
        name = one.operation.kernel
        if name.startswith(("grouped_dot", "quantized_grouped_dot")):
            yield one.operation, one.read + one.written - next(unread), one.flops
        elif isinstance(shape, ForwardShape) and PAGED.match(name):
            if not shape.is_decode and name in _DECODE:
                # Predicted chunks and verify steps have no row of one token, so the device skips the branch with
                # these kernels.
                continue
            if unlike:  # some layers write nothing: they read an earlier layer's pages
                begun = max(reads.values(), default=0)
                layer = begun if name.startswith("write_") else begun - 1 if name == _MERGE else reads[name]
                reads[name] += not name.startswith("write_") and name != _MERGE
            else:
                # with context parallelism a layer has `write_qkv` for a device's own tokens, then `write_kv` for all
                layer += name.startswith("write_") and (shape.token_parts == 1 or name == "write_kv")
            yield one.operation, *_of_kernel(build, shape, load, name, layer)
        else:
            yield one.operation, one.read + one.written, one.flops


def _of_kernel(build: FittedBuild, shape: ForwardShape, load: Load, name: str, layer: int) -> tuple[int, int]:
    """Bytes and FLOPs of a paged kernel, on one device."""
    whole, item = build.blueprint.local_spec, build.blueprint.dtype.itemsize
    spec, keys, key_bytes = whole.of_layer(layer), _keys(build, load, layer), _token_bytes(build, layer)
    tokens = shape.tokens // shape.token_parts
    queries = tokens * spec.num_heads * spec.head_dim * item
    if name == "write_kv" and shape.token_parts > 1:
        return 2 * shape.tokens * key_bytes, 0
    if name.startswith("write_"):
        return 2 * (queries + tokens * key_bytes), 0
    if name in _DECODE:
        splits = Tiling.by_rule(spec.head_dim, item).splits(load.context, whole.windows[layer], spec.num_kv_heads)
        parts = load.rows * splits * spec.num_heads * (spec.head_dim + 1) * 4 if splits > 1 else 0
        return queries + parts + (load.rows * keys * key_bytes if name == "paged_decode" else 0), 0
    if load.drafts:
        per_row = 1 + load.drafts
        # the query heads of a KV head share a tile, and each tile reads the keys
        tile_rows = Tiling.by_rule(spec.head_dim, item).prefill_rows
        tile_tokens = max(1, tile_rows >> (spec.q_per_kv - 1).bit_length())
        reads = -(-per_row // tile_tokens) if name.startswith("paged_prefill") else 1
        products = 4 * load.rows * per_row * keys * spec.num_heads * spec.head_dim
        return 2 * queries + reads * load.rows * keys * key_bytes, products
    products = 0 if shape.is_decode else 4 * load.rows * (load.context * keys // 2) * spec.num_heads * spec.head_dim
    return 2 * queries + load.rows * keys * key_bytes, products // shape.token_parts


def _keys(build: FittedBuild, load: Load, layer: int) -> int:
    """Number of keys that a request's last query attends to in a layer."""
    window = build.blueprint.model.spec.windows[layer]
    return load.context if window is None else min(window, load.context)


def _token_bytes(build: FittedBuild, layer: int) -> int:
    """KV bytes of a token in a layer on one device. With unlike layers, a part of the page."""
    limits, parts = build.limits, build.blueprint.local_spec.page_parts
    of_page = build.blueprint.block_bytes // (limits.block_size * limits.kv_groups.num_arrays)
    return of_page // parts[layer] if parts else of_page


def experts_read(spec: DecoderSpec, shape: Shape, load: Load) -> float | None:
    """Expected number of a layer's experts that at least one token of a step chooses; None without experts.

    Assumes uniform, independent choices of k of n experts: T tokens choose n * (1 - (1 - k / n) ** T) experts.
    """
    experts = spec.experts
    if experts is None or not isinstance(shape, ForwardShape):
        return None
    per_row = 1 + load.drafts if shape.is_decode or shape.drafts else load.context
    tokens = min(shape.tokens, load.rows * per_row)
    return experts.num * (1 - (1 - experts.per_token / experts.num) ** tokens)


def _unread_bytes(build: FittedBuild, shape: Shape, load: Load, prefix: str) -> int:
    """Bytes of experts that no token chooses, in one layer's leaves whose names start with `prefix`."""
    spec = build.blueprint.model.spec
    read = experts_read(spec, shape, load)
    if read is None or spec.experts is None:
        return 0
    layers = build.blueprint.model.params["layers"]
    layer = next(layer for layer in range(spec.num_layers) if spec.is_sparse(layer))
    size = tree_bytes({name: leaf for name, leaf in layers[layer].items() if name.startswith(prefix)})
    return int(size * (1 - read / spec.experts.num))


def least_bytes(build: FittedBuild, shape: Shape, load: Load) -> int:
    """Bytes of the weights that a program reads, and of its requests' KV. Of the experts only `experts_read` count."""
    model = build.blueprint.model
    if not isinstance(shape, ForwardShape):
        return tree_bytes(lm_head_params(model.spec, model.params))
    kv = sum(_keys(build, load, layer) * _token_bytes(build, layer) for layer in range(model.spec.num_layers))
    sparse = sum(model.spec.is_sparse(layer) for layer in range(model.spec.num_layers))
    weights = tree_bytes(model.params["layers"]) - sparse * _unread_bytes(build, shape, load, "expert_")
    # matrices outside of the layers that every token is multiplied by
    weights += tree_bytes({name: leaf for name, leaf in model.params.items() if name.startswith(_EVERY_TOKEN)})
    return weights + load.rows * kv
