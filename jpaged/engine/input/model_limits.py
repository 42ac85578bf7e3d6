"""Properties of the model and the engine that decide whether a request is valid."""

import dataclasses
from typing import Any

import numpy as np

from jpaged.engine.engine_options import EngineOptions
from jpaged.engine.step_plan import Runner
from jpaged.engine.strategies.pooled_outputs import Pooling
from jpaged.params.logits_processors import LogitsProcessor


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    processed_logprobs: bool = False     # log-probabilities are of the distribution that was sampled from
    returns_sampling_mask: bool = False  # requests may have the ids from which their tokens were drawn
    returns_routed_experts: bool = False # requests may have the experts of their tokens
    eos_token_ids: tuple[int, ...] = ()  # ids that end an answer; generation_config.json may add to the tokenizer's
    eos_token_id: int | None = None      # the main end token, not reported as a stop_reason
    pooling: Pooling | None = None       # the engine pools; None: it generates
    processors: tuple[LogitsProcessor, ...] = ()
    known_ids: np.ndarray | None = None  # bool[vocab_size]: ids that may be sampled; None: all
    priorities: bool = False             # the scheduling policy uses the priority of requests
    speculates: bool = False             # the engine checks drafts, so an expected answer has a use

    @property
    def end_token_ids(self) -> frozenset[int]:
        """All ids that end an answer."""
        main = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset((*self.eos_token_ids, *main))

    @classmethod
    def of(cls, runner: Runner[Any], options: EngineOptions) -> "ModelLimits":
        """The limits of an engine."""
        return cls(
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            max_logprobs=runner.max_logprobs,
            returns_sampling_mask=runner.returns_sampling_mask,
            returns_routed_experts=runner.returns_routed_experts,
            processed_logprobs=runner.logprobs_mode.startswith("processed"),
            eos_token_ids=options.eos_token_ids,
            eos_token_id=options.eos_token_id,
            pooling=options.pooling,
            processors=options.processors,
            known_ids=options.known_ids,
            priorities=options.scheduling.scheduling_policy == "priority",
            speculates=options.speculation is not None,
        )
