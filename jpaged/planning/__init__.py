"""Plan an engine's memory without a device: `jpaged plan`, and `plan` for Python.

1. The model's config, and the headers of its files if present, give the spec. No weight is read.
2. The device is JAX's default device, or a `Target`: a kind of device that JAX can compile for without having one.
3. `runtime.compile.blueprint`, with which engines also start, compiles the largest program, reads its temporaries and
   sizes the pool. Without an installed compiler the temporaries are estimated, and the plan says so.

Imported late: JAX and the runtime, when the options are checked.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.frontend.engine_config import engine_config
from jpaged.planning.engine_plan import EnginePlan

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


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


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Arguments of `plan` other than the engine's options. See its docstring."""

    target: str | None
    device_memory: int | None
    request_lens: tuple[int, ...]
    roofline_context: int | None
    link: Mapping[str, float]  # the given ones of "bandwidth" and "latency"
    progress: bool

    def check(self, config: EngineConfig) -> None:
        """Raise RequestError for an argument that has no meaning for this engine. Does not look up the target."""
        if config.data_parallel_size > 1:
            accepted = "a plan describes one engine, and all engines have the same plan: leave it out"
            raise RequestError("data_parallel_size", config.data_parallel_size, accepted)
        if self.device_memory is not None and self.target == "cpu":
            accepted = "has no meaning on CPU, where kv_cache_memory_bytes sets the pool: leave it out"
            raise RequestError("device_memory", self.device_memory, accepted)
        for length in self.request_lens:
            if length < 1:
                raise RequestError("request_len", length, "must be at least 1 token")
        context = self.roofline_context
        if context is not None and context < 1:
            raise RequestError("roofline_context", context, "must be at least 1 token")
        if context is not None and self.target in (None, "cpu") and self.device_memory is None:
            accepted = "must be a GPU or TPU for --roofline: h200, a100, l4, v5e and so on"
            raise RequestError("target", self.target, accepted)
        for name, value in self.link.items():
            if context is None or config.devices_per_engine == 1:
                reason = "needs --roofline and several devices (--tensor-parallel-size): add them, or leave it out"
                raise RequestError(f"link_{name}", value, reason)


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
    link = {"bandwidth": link_bandwidth, "latency": link_latency}
    given = {name: value for name, value in link.items() if value is not None}
    arguments = PlanArguments(target, device_memory, tuple(request_lens), roofline_context, given, progress)
    arguments.check(config)
    from jpaged.planning.stage_plans import plan_stages

    return plan_stages(config, arguments)
