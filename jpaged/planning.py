"""Plan an engine's memory without a device: `jpaged plan`, and `plan` for Python.

1. The model's config, and the headers of its files if present, give the spec. No weight is read.
2. The device is JAX's default device, or a `Target`: a kind of device that JAX can compile for without having one.
3. `runtime.compile.blueprint`, with which engines also start, compiles the largest program, reads its temporaries and
   sizes the pool. Without an installed compiler the temporaries are estimated, and the plan says so.

Imported late: JAX and the runtime, when the options are checked.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError, first_line
from jpaged.frontend.engine_config import engine_config

if TYPE_CHECKING:
    import jax

    from jpaged.loading.model_description import DescribedModel
    from jpaged.models.spec import Stage
    from jpaged.runtime.compile.blueprint import Blueprint
    from jpaged.runtime.memory.plan import MemoryPlan
    from jpaged.runtime.placement import Placement
    from jpaged.runtime.prediction.roofline import Roofline
    from jpaged.runtime.targets import Target

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
ASSUMED = "h200"  # kind of device if only its memory is given
ROOFLINE_ROWS = (1, 64, 256)  # batch sizes for which step times are predicted


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table of bytes."""

    name: str
    num_bytes: int
    note: str = ""
    parts: tuple["Row", ...] = ()


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Device memory that the largest program allocates while it runs."""

    num_bytes: int
    measured: bool  # True: read from the compiled program. False: estimated from the shapes
    program: str    # the program with the most temporaries
    how: str        # kind of device that it was compiled for, or the reason for the estimate


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Memory use of an engine on one device, and the number of requests that fit."""

    model: str
    dtype: str
    kv_dtype: str  # of the KV pages
    device: str
    device_bytes: int | None  # None: CPU, or a back end that does not report it
    taken_bytes: int          # in use by other programs
    usable_bytes: int | None  # limit of bytes in use that the options set, including taken_bytes
    weight_kinds: dict[str, dict[str, int]]  # part -> kind of stored numbers -> bytes: `memory.weight_kinds`
    temporaries: Temporaries
    memory: "MemoryPlan | None"            # None: the engine does not fit
    problem: str | None                    # the engine's error message if it does not fit
    largest_max_model_len: int | None      # largest that fits, whatever the option says; None: not one block fits
    requests: tuple[tuple[int, int], ...]  # (tokens of a request, number of such requests that run at once)
    memory_is_capped: bool                 # kv_cache_memory_bytes is set
    host_blocks: int                       # blocks that fit into swap_space
    roofline: "Roofline | None" = None     # predicted times of the programs, if asked for
    format: str | None = None              # quant_method of the checkpoint; None: it is not quantised
    num_devices: int = 1                   # devices of one pipeline stage; all bytes are for one device
    num_parts: int = 1                     # shards of the weights and of the pages
    whole_bytes: int = 0                   # bytes of weights that are replicated on every device
    stage: tuple[int, int] = (0, 1)        # (index, number of stages): the fullest stage, which this plan describes
    num_layers: int = 0                    # layers of this stage

    @property
    def weight_parts(self) -> dict[str, int]:
        """Bytes of the weights by part."""
        return {part: sum(kinds.values()) for part, kinds in self.weight_kinds.items()}

    @property
    def least_devices(self) -> int:
        """Smallest tensor_parallel_size with which devices of this kind can hold the weights alone. 1 on CPU."""
        if self.usable_bytes is None:
            return 1
        room = max(1, self.usable_bytes - self.taken_bytes - self.whole_bytes)
        return max(1, -(-(self.weight_bytes - self.whole_bytes) * self.num_parts // room))

    @property
    def is_dequantised(self) -> bool:
        """True if the checkpoint is quantised, but this device stores all weights dequantised."""
        return self.format is not None and not any("scales" in kinds for kinds in self.weight_kinds.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.weight_parts.values())

    @property
    def rows(self) -> list[Row]:
        """The table of bytes. On an accelerator the rows add up to its memory, if the engine fits."""
        parts = tuple(Row(part, sum(kinds.values()), self._note(kinds)) for part, kinds in self.weight_kinds.items())
        note = self.dtype
        if self.num_parts > 1:
            share = f"{self.whole_bytes / 2**20:,.1f} MiB on every device, the rest split over {self.num_parts}"
            note = f"{self.dtype}; {share}"
        rows = [Row("weights", self.weight_bytes, note, parts)]
        how = "measured" if self.temporaries.measured else "ESTIMATED"
        of = f"of the largest program ({self.temporaries.program}), {how}"
        rows.append(Row("temporaries", self.temporaries.num_bytes, of))
        plan = self.memory
        if plan is not None:
            limits = plan.limits
            tables = len(limits.kv_groups.windows)
            each = f"{limits.max_num_seqs} rows, {tables} block table{'s'[: tables - 1]} of {limits.width:,} each"
            rows.append(Row("request table", plan.table_bytes, each))
            blocks = f"{plan.num_blocks:,} blocks of {limits.block_size} tokens, {plan.block_bytes:,} bytes each"
            blocks += "" if self.kv_dtype == self.dtype else f", {self.kv_dtype}"
            rows.append(Row("KV pool", plan.kv_bytes, blocks))
        if self.device_bytes is None or self.usable_bytes is None:
            return rows
        if self.taken_bytes:
            rows.append(Row("taken by others", self.taken_bytes, "before the engine"))
        if plan is not None:
            left = self.usable_bytes - sum(row.num_bytes for row in rows)
            capped = self.memory_is_capped
            why = "kv_cache_memory_bytes caps the pool" if capped else "the number of blocks is rounded down"
            if not capped and self.kv_dtype != self.dtype and left > plan.kv_bytes // 8:
                why = "the kernels address at most 2 GiB of 8-bit keys and values a layer"
            rows.append(Row("left over", left, why))
        kept = self.device_bytes - self.usable_bytes
        rows.append(Row("kept free", kept, "what gpu_memory_utilization leaves"))
        return rows


    def _note(self, kinds: Mapping[str, int]) -> str:
        """List a part's kinds of numbers with their sizes. Empty if all have the model's dtype."""
        from jpaged.runtime.memory.plan import size_text

        if kinds.keys() == {self.dtype}:
            return ""
        return ", ".join(f"{kind} {size_text(size)}" for kind, size in kinds.items())


def parse_size(parameter: str, text: str) -> int:
    """Return the bytes that "24GiB", "80GB", "512 MiB" or a plain number means. Raises RequestError."""
    found = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if found is None or found[2].lower() not in units or float(found[1]) <= 0:
        raise RequestError(
            parameter, text, "must be a size above 0: 24GiB (24 x 2^30 bytes), 80GB (80 x 10^9), MiB, MB, TiB, TB, "
            "or a number of bytes"
        )  # fmt: skip
    return int(float(found[1]) * units[found[2].lower()])


def plan(
    model: str,
    options: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
    device_memory: int | None = None,
    request_lens: Sequence[int] = (),
    roofline_context: int | None = None,
    link_bandwidth: float | None = None,
    link_latency: float | None = None,
    progress: bool = False,
) -> EnginePlan:
    """Plan an engine's memory. Reads no weights, and allocates no device memory.

    model:         a folder, a config.json, a .gguf file, a hub id (only its config is downloaded), or demo.
    options:       engine options by name (`EngineConfig`).
    target:        a name in `runtime.targets.TARGETS`. None: H200 if device_memory is given, else JAX's device.
    device_memory: bytes; None: the target's own.
    request_lens:  lengths in tokens for which to count concurrent requests; (): powers of two, and max_model_len.
    roofline_context: also predict the times of steps whose requests have this many tokens. None: do not predict.
    link_bandwidth, link_latency: link between devices, for the prediction: bytes per second and seconds
                   (`collectives.Link`). None: the target's own link.
    progress:      show a bar while the prediction compiles programs.
    Raises RequestError for a bad argument, and ModelLoadError for a model or an option that the engine would refuse.
    """
    config = engine_config(model, options or {})
    if config.data_parallel_size > 1:
        accepted = "a plan describes one engine, and all engines have the same plan: leave it out"
        raise RequestError("data_parallel_size", config.data_parallel_size, accepted)
    if device_memory is not None and target == "cpu":
        raise RequestError(
            "device_memory",
            device_memory,
            "has no meaning on CPU, where kv_cache_memory_bytes sets the pool: leave it out",
        )
    for length in request_lens:
        if length < 1:
            raise RequestError("request_len", length, "must be at least 1 token")
    if roofline_context is not None and roofline_context < 1:
        raise RequestError("roofline_context", roofline_context, "must be at least 1 token")
    if roofline_context is not None and (target is None or target == "cpu") and device_memory is None:
        raise RequestError("target", target, "must be a GPU or TPU for --roofline: h200, a100, l4, v5e and so on")
    link = {"bandwidth": link_bandwidth, "latency": link_latency}
    for name, value in link.items():
        if value is not None and (roofline_context is None or config.devices_per_engine == 1):
            reason = "needs --roofline and several devices (--tensor-parallel-size): add them, or leave it out"
            raise RequestError(f"link_{name}", value, reason)
    from jpaged.loading.model_description import describe
    from jpaged.models.sharding import find_devices, shards_of
    from jpaged.models.stages import stages_of
    from jpaged.runtime.memory.plan import start_backend
    from jpaged.runtime.placement import Placement
    from jpaged.runtime.targets import TARGETS, with_memory

    if target is not None and target not in TARGETS:
        raise RequestError("target", target, f"must be one of {', '.join(TARGETS)}")
    name = target or (ASSUMED if device_memory is not None else None)
    kind = None if name is None else TARGETS[name]
    if kind is not None and device_memory is not None:
        kind = with_memory(kind, device_memory)
    if kind is not None and kind.link is not None:
        given = {name: value for name, value in link.items() if value is not None}
        kind = dataclasses.replace(kind, link=dataclasses.replace(kind.link, **given))
    device = "an NVIDIA GPU" if target is None and kind is not None else None
    platform = None if kind is None else kind.platform
    if kind is None:
        start_backend(config)
    shards, count = shards_of(config), config.pipeline_parallel_size
    if roofline_context is not None and count > 1:
        raise RequestError("pipeline_parallel_size", count, "times are predicted for one stage: leave --roofline out")
    if kind is None:
        placements = [Placement.over(devices, shards) for devices in find_devices(shards, count)]
    else:
        placements = [Placement.for_target(kind, shards)] * count
    described = describe(config, platform, [placement.mesh for placement in placements])
    trees = described.params if isinstance(described.params, tuple) else (described.params,)
    plans = []
    for stage, tree, placement in zip(stages_of(described.spec, count), trees, placements, strict=True):
        of_stage = dataclasses.replace(described, params=tree)
        plan = _plan(
            config, of_stage, placement, stage, kind, device, tuple(request_lens), roofline_context, progress=progress
        )
        plans.append(plan)
    return _fullest(plans, config)


def _fullest(plans: Sequence[EnginePlan], config: EngineConfig) -> EnginePlan:
    """Return the plan of the stage with the fewest blocks: all stages use this number. On a tie, the fullest stage."""

    def room(plan: EnginePlan) -> tuple[int, int]:
        if plan.memory is None:
            return -1, -plan.weight_bytes
        return plan.memory.num_blocks, -plan.weight_bytes - plan.temporaries.num_bytes - plan.memory.table_bytes

    fullest = min(plans, key=room)
    block_bytes = sum(plan.memory.block_bytes for plan in plans if plan.memory is not None)
    if fullest.memory is None:
        return fullest
    return dataclasses.replace(fullest, host_blocks=int(config.swap_space * 2**30) // block_bytes)


def _plan(
    config: EngineConfig,
    described: "DescribedModel",
    placement: "Placement",
    stage: "Stage",
    target: "Target | None",
    device_name: str | None,
    lengths: tuple[int, ...],
    roofline_context: int | None,
    *,
    progress: bool,
) -> EnginePlan:
    from jpaged.models.sharding import whole_bytes
    from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
    from jpaged.runtime.memory import plan as memory

    device = placement.first_device if target is None else None
    shards = placement.shards
    params = described.params
    model = ServedModel(described.spec, params, masked=described.masked, stage=stage)
    blueprint = Blueprint.draw(model, config, placement)
    device_bytes, taken = _memory_of(device, target)
    usable = None
    if device_bytes is not None:
        left = None if device is None else memory.free_device_bytes(device, config)
        usable = memory.usable_bytes(device_bytes, config) if left is None else taken + left
    weights = memory.tree_bytes(params)
    free = None if usable is None else max(0, usable - taken - weights)
    temporaries = _temporaries(blueprint, target, config, free)
    fitted, problem, roofline = None, None, None
    try:
        build = blueprint.fit(temp_bytes=temporaries.num_bytes, free_bytes=free)
        fitted = build.memory_plan
    except ModelLoadError as error:
        problem = str(error)
    else:
        if roofline_context is not None and target is not None:
            from jpaged.runtime.prediction.roofline import Load, predict

            context = min(roofline_context, fitted.limits.max_model_len)
            roofline = predict(build, target, [Load(rows, context) for rows in ROOFLINE_ROWS], progress=progress)
    name = device_name or placement.device.device_kind
    return EnginePlan(
        model=described.name,
        dtype=described.dtype.name,
        kv_dtype=blueprint.kv_format.dtype.name,
        device=name if device_bytes is None else f"{name} with {device_bytes / 2**30:.1f} GiB",
        device_bytes=device_bytes,
        taken_bytes=taken,
        usable_bytes=usable,
        weight_kinds=memory.weight_kinds(params),
        temporaries=temporaries,
        memory=fitted,
        problem=problem,
        largest_max_model_len=_largest(blueprint, temporaries, free),
        requests=() if fitted is None else tuple((n, fitted.requests_of(n)) for n in _lengths(lengths, fitted)),
        memory_is_capped=config.kv_cache_memory_bytes is not None,
        host_blocks=0,
        roofline=roofline,
        format=described.format,
        num_devices=shards.num_devices,
        num_parts=shards.count,
        whole_bytes=whole_bytes(params) if shards.count > 1 else 0,
        stage=(stage.index, stage.count),
        num_layers=len(params["layers"]),
    )


def _memory_of(device: "jax.Device | None", target: "Target | None") -> tuple[int | None, int]:
    """Bytes of the device (None on CPU, and if the back end does not report them), and bytes in use."""
    if target is not None:
        return target.memory_bytes, 0
    from jpaged.runtime.memory.plan import device_bytes

    found = None if device is None else device_bytes(device)
    return found or (None, 0)


def _temporaries(
    blueprint: "Blueprint", target: "Target | None", config: EngineConfig, free: int | None
) -> Temporaries:
    """Temporaries of the compiled program; an estimate without a compiler, or if weights or program do not fit."""
    from jpaged.runtime.compile.estimate import estimate_temporaries
    from jpaged.runtime.store.cache import persistent_cache

    kind = blueprint.placement.device.device_kind
    if target is not None and target.missing is not None:
        why = f"{target.missing}, whose compiler needs no device, is not installed"
    elif free == 0:
        why = "the weights alone do not fit, so nothing was compiled"
    else:
        # The cache can store programs for an absent device, but cannot load them.
        cached = contextlib.nullcontext() if target is not None else persistent_cache(config.compilation_cache_dir)
        tracing = contextlib.nullcontext() if target is None else target.tracing()
        try:
            with cached, tracing:
                shape, num_bytes = blueprint.largest_temporaries(free)
        except Exception as error:  # XLA's own types: mostly, the program does not fit into the target's memory
            why = f"its compiler refused the program: {first_line(error)}"
            logger.warning("%s: %s", kind, why)
        else:
            how = f"the program was compiled for {kind}"
            return Temporaries(num_bytes, measured=True, how=how, program=str(shape))
    shape, num_bytes = estimate_temporaries(blueprint)
    return Temporaries(num_bytes, measured=False, how=why, program=str(shape))


def _largest(blueprint: "Blueprint", temporaries: Temporaries, free: int | None) -> int | None:
    """Largest max_model_len that fits, computed as in an engine; None if not one block fits."""
    from jpaged.runtime.compile.blueprint import Blueprint

    config = dataclasses.replace(blueprint.config, max_model_len=None)
    open_ended = Blueprint.draw(blueprint.model, config, blueprint.placement)
    with _quietly(), contextlib.suppress(ModelLoadError):
        return open_ended.fit(temp_bytes=temporaries.num_bytes, free_bytes=free).limits.max_model_len
    return None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the warning that max_model_len was reduced: here the reduced value is the result."""
    log = logging.getLogger("jpaged.runtime.memory.plan")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _lengths(asked: tuple[int, ...], fitted: "MemoryPlan") -> list[int]:
    """Lengths for which to count requests: the given ones, else powers of two and max_model_len."""
    longest = fitted.limits.max_model_len
    for length in asked:
        if length > longest:
            raise RequestError("request_len", length, f"is longer than max_model_len={longest}: shorten it")
    if asked:
        return list(asked)
    powers = [4**n for n in range(5, 16) if 4**n < longest] or [2**n for n in range(16) if 2 * 2**n == longest]
    return [*powers[-4:], longest]
