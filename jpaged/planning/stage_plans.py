"""Plans the pipeline stages of an engine: compiles their largest programs, and sizes their pools.

Called by: `jpaged.planning.plan`, with checked arguments.
Owns: the choice of the devices, and the measurement or estimate of the temporaries.
Never: reads weights, or allocates device memory.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from jpaged.config import DTYPES, EngineConfig
from jpaged.errors import ModelLoadError, RequestError, first_line
from jpaged.loading.drafters import LoadedDrafter, describe_drafter
from jpaged.loading.model_description import DescribedModel, describe
from jpaged.models.sharding import find_devices, shards_of, whole_bytes
from jpaged.models.spec import Stage
from jpaged.models.stages import stages_of
from jpaged.planning import PlanArguments
from jpaged.planning.engine_plan import AdapterMemory, EnginePlan, Temporaries
from jpaged.runtime.adapter_pool import AdapterOptions
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.compile.estimate import estimate_temporaries
from jpaged.runtime.drafting.drafter_model import DrafterModel
from jpaged.runtime.memory import device_memory
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.memory.weight_bytes import tree_bytes, weight_kinds
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.roofline import Load, predict
from jpaged.runtime.store.cache import persistent_cache
from jpaged.runtime.targets import TARGETS, Target, with_memory

logger = logging.getLogger(__name__)

ASSUMED = "h200"  # kind of device if only its memory is given
ROOFLINE_ROWS = (1, 64, 256)  # batch sizes for which step times are predicted
VERIFY_ROWS = 8               # batch size for which a verify step and a decode step are predicted


def plan_stages(config: EngineConfig, asked: PlanArguments) -> EnginePlan:
    """Plan all stages, and return the plan of the fullest. Raises as `jpaged.planning.plan`."""
    target = _target(asked)
    if target is None:
        device_memory.start_backend(config)
    shards, count = shards_of(config), config.pipeline_parallel_size
    if asked.roofline_context is not None and count > 1:
        raise RequestError("pipeline_parallel_size", count, "times are predicted for one stage: leave --roofline out")
    if target is None:
        placements = [Placement.over(devices, shards) for devices in find_devices(shards, count)]
    else:
        placements = [Placement.for_target(target, shards)] * count
    platform = None if target is None else target.platform
    described = describe(config, platform, [placement.mesh for placement in placements])
    trees = described.params if isinstance(described.params, tuple) else (described.params,)
    plans = [
        _plan_stage(config, asked, dataclasses.replace(described, params=tree), stage, placement, target)
        for stage, tree, placement in zip(stages_of(described.spec, count), trees, placements, strict=True)
    ]
    return _fullest(plans, config)


def _target(asked: PlanArguments) -> Target | None:
    """Return the kind of device to plan for, with the given memory and link. None: JAX's device."""
    if asked.target is not None and asked.target not in TARGETS:
        raise RequestError("target", asked.target, f"must be one of {', '.join(TARGETS)}")
    name = asked.target or (None if asked.device_memory is None else ASSUMED)
    if name is None:
        return None
    target = TARGETS[name] if asked.device_memory is None else with_memory(TARGETS[name], asked.device_memory)
    if target.link is None:
        return target
    return dataclasses.replace(target, link=dataclasses.replace(target.link, **asked.link))


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


def _plan_stage(
    config: EngineConfig, asked: PlanArguments, described: DescribedModel, stage: Stage, placement: Placement,
    target: Target | None,
) -> EnginePlan:  # fmt: skip
    params, shards = described.params, placement.shards
    drafter = _drafter(config, described, placement)
    served = None if drafter is None else DrafterModel(drafter.head_spec or drafter.spec, drafter.params)
    stored = described.stored_dtype
    of_adapters = stored if stored is not None and stored.name in DTYPES else described.dtype
    adapters = AdapterOptions.of(described.spec, config, of_adapters)
    model = ServedModel(
        described.spec, params, masked=described.masked, stage=stage, drafter=served, adapters=adapters
    )
    blueprint = Blueprint.draw(model, config, placement)
    device_bytes, taken, usable = _device_memory(placement, target, config)
    weights = tree_bytes(params) + blueprint.drafter_bytes.weights
    free = None if usable is None else max(0, usable - taken - weights)
    temporaries = _temporaries(blueprint, target, config, free)
    fitted, problem, roofline = None, None, None
    try:
        build = blueprint.fit(temp_bytes=temporaries.num_bytes, free_bytes=free)
        fitted = build.memory_plan
    except ModelLoadError as error:
        problem = str(error)
    else:
        if asked.roofline_context is not None and target is not None:
            context = min(asked.roofline_context, fitted.limits.max_model_len)
            roofline = predict(build, target, _loads(context, blueprint.max_drafts), progress=asked.progress)
    assumed = target is not None and asked.target is None
    name = "an NVIDIA GPU" if assumed else placement.device.device_kind
    return EnginePlan(
        model=described.name,
        dtype=described.dtype.name,
        kv_dtype=blueprint.kv_format.dtype.name,
        device=name if device_bytes is None else f"{name} with {device_bytes / 2**30:.1f} GiB",
        device_bytes=device_bytes,
        taken_bytes=taken,
        usable_bytes=usable,
        weight_kinds=weight_kinds(params),
        temporaries=temporaries,
        memory=fitted,
        problem=problem,
        largest_max_model_len=_largest(blueprint, temporaries, free),
        requests=() if fitted is None else _requests(asked.request_lens, fitted),
        memory_is_capped=config.kv_cache_memory_bytes is not None,
        host_blocks=0,
        roofline=roofline,
        format=described.format,
        num_devices=shards.num_devices,
        num_parts=shards.count,
        whole_bytes=whole_bytes(params) if shards.count > 1 else 0,
        stage=(stage.index, stage.count),
        num_layers=len(params["layers"]),
        drafter=None if drafter is None else drafter.name,
        drafter_bytes=blueprint.drafter_bytes.weights if fitted is None else fitted.drafter_bytes,
        adapters=None if adapters is None else _adapters(adapters, config, blueprint.adapter_bytes),
    )


def _drafter(config: EngineConfig, described: DescribedModel, placement: Placement) -> LoadedDrafter | None:
    """The drafter that runs on the device, as shapes. None: there is none."""
    speculation = config.speculative_config
    if speculation is None or not speculation.has_model:
        return None
    return describe_drafter(speculation, described, config, placement.platform, placement.mesh)


def _adapters(options: AdapterOptions, config: EngineConfig, num_bytes: int) -> AdapterMemory:
    """Memory of the LoRA adapters. num_bytes: of the pools on one device."""
    return AdapterMemory(
        num_bytes, options.slots, options.rank, options.dtype.name, config.adapters_in_host_memory, options.slot_bytes
    )


def _loads(context: int, drafts: int) -> list[Load]:
    """Steps to predict. With speculation, also a verify step of VERIFY_ROWS rows, next to its decode step."""
    rows = ROOFLINE_ROWS if not drafts else sorted({*ROOFLINE_ROWS, VERIFY_ROWS})
    loads = [Load(count, context) for count in rows]
    if drafts:
        loads.insert(rows.index(VERIFY_ROWS) + 1, Load(VERIFY_ROWS, context, drafts))
    return loads


def _device_memory(
    placement: Placement, target: Target | None, config: EngineConfig
) -> tuple[int | None, int, int | None]:
    """Return the device's bytes, the bytes in use, and the limit of bytes in use. None: CPU, or not reported."""
    if target is not None:
        device_bytes, taken, left = target.memory_bytes, 0, None
    else:
        device = placement.first_device
        device_bytes, taken = device_memory.device_bytes(device) or (None, 0)
        left = None if device_bytes is None else device_memory.free_device_bytes(device, config)
    if device_bytes is None:
        return None, taken, None
    return device_bytes, taken, device_memory.usable_bytes(device_bytes, config) if left is None else taken + left


def _temporaries(
    blueprint: Blueprint, target: Target | None, config: EngineConfig, free: int | None
) -> Temporaries:
    """Temporaries of the compiled program; an estimate without a compiler, or if weights or program do not fit."""
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


def _largest(blueprint: Blueprint, temporaries: Temporaries, free: int | None) -> int | None:
    """Largest max_model_len that fits, computed as in an engine; None if not one block fits."""
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


def _requests(asked: tuple[int, ...], fitted: memory.MemoryPlan) -> tuple[tuple[int, int], ...]:
    """Return lengths and numbers of such requests. Lengths: the given ones, else powers of two and max_model_len."""
    longest = fitted.limits.max_model_len
    for length in asked:
        if length > longest:
            raise RequestError("request_len", length, f"is longer than max_model_len={longest}: shorten it")
    powers = [4**n for n in range(5, 16) if 4**n < longest] or [2**n for n in range(16) if 2 * 2**n == longest]
    return tuple((length, fitted.requests_of(length)) for length in asked or (*powers[-4:], longest))
