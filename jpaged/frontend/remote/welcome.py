"""Facts about the engine that a front end gets at the beginning, and the methods that it may call later."""

import dataclasses
from typing import Any, Self

from jpaged.config import EngineConfig
from jpaged.engine.input.model_limits import ModelLimits
from jpaged.frontend.remote.hosted import Hosted
from jpaged.params.pooling import PooledModel
from jpaged.params.sampling import SamplingParams

# Methods of `AsyncLLM` that a front end may call, and whether they are coroutines.
CALLS = {
    "check_health": True, "inspect": True, "pause_generation": True, "resume_generation": True, "is_paused": True,
    "sleep": True, "wake_up": True, "is_sleeping": True, "update_weights": True, "reset_prefix_cache": True,
    "add_lora": True, "start_profile": False, "stop_profile": False, "check_room": False,
}  # fmt: skip
# Methods and properties that answer at once, so that a front end waits for them.
QUESTIONS = frozenset({
    "stats", "metrics", "is_ready", "weight_version", "weights_problem", "known_adapters", "remove_adapter",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """The engine's first message. The fields are those of `AsyncLLM`."""

    config: EngineConfig
    limits: ModelLimits
    tokenizer: Any
    default_sampling_params: SamplingParams
    max_num_seqs: int
    num_engines: int
    pooling: PooledModel | None
    has_queue_limits: bool

    @classmethod
    def of(cls, engine: Hosted) -> Self:
        """The facts of an engine."""
        limits = dataclasses.replace(engine.engine.inputs.limits, processors=())  # a request over HTTP has none
        return cls(
            config=engine.config,
            limits=limits,
            tokenizer=engine.get_tokenizer(),
            default_sampling_params=engine.default_sampling_params,
            max_num_seqs=engine.max_num_seqs,
            num_engines=engine.num_engines,
            pooling=engine.pooling,
            has_queue_limits=engine.engine.admission.has_limits,
        )
