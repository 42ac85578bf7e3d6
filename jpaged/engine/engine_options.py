"""Options of an engine, apart from the sizes that the runner sets."""

import dataclasses

import numpy as np

from jpaged.engine.grammar import GrammarLimits
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.strategies.pooled_outputs import Pooling
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.speculation_config import SpeculationConfig


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine. Fields that `EngineConfig` has as well mean the same there."""

    eos_token_ids: tuple[int, ...] = ()  # ids that end an answer
    eos_token_id: int | None = None      # the main end token, not reported as a stop_reason
    known_ids: np.ndarray | None = None  # bool[vocab_size]: ids that the runner may sample; None: all
    processors: tuple[LogitsProcessor, ...] = ()  # custom processors that the runner was built with
    pooling: Pooling | None = None       # the engine pools; None: it generates
    scheduling: SchedulingOptions = SchedulingOptions()
    enable_prefix_caching: bool = True
    jump_forward: bool = True            # append tokens that a grammar forces without sampling them
    stream_interval: int = 1             # `SamplingParams.stream_interval` of requests without one
    grammar_limits: GrammarLimits | None = None
    disable_log_stats: bool = False      # collect no distributions for metrics
    seed: int = 0                        # of the generator that makes seeds for requests without one
    speculation: SpeculationConfig | None = None  # None: no drafts
