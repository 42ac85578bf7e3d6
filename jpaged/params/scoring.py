"""ScoringParams, the parameters of `LLM.score`: which tokens of a text are scored, and by which distribution."""

import dataclasses
from typing import Any

import numpy as np

from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams

# Parameters that change the distribution from which a token is drawn. `score` applies them.
APPLIED = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logits_processors", "min_tokens",
    "stop_token_ids", "ignore_eos", "structured_outputs", "reasoning_tags", "thinking_token_budget",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringParams:
    """How a text is scored. Raises RequestError for an invalid value."""

    sampling_params: SamplingParams | None = None
    """Score by the distribution from which a request with these parameters samples, if the engine's `logprobs_mode` is
    processed. None, and in other modes: by the model's own distribution."""

    num_prompt_tokens: int = 1
    """Number of tokens before the first scored one, at least 1."""

    def __post_init__(self) -> None:
        if self.sampling_params is not None and not isinstance(self.sampling_params, SamplingParams):
            raise RequestError("sampling_params", self.sampling_params, "must be a jpaged.SamplingParams, or None")
        count = self.num_prompt_tokens
        if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 1:
            raise RequestError("num_prompt_tokens", count, "must be an integer from 1")
        object.__setattr__(self, "num_prompt_tokens", int(count))

    def request_params(self, *, processed: bool) -> SamplingParams:
        """Parameters of the request. processed: the engine's log-probabilities are of the sampled distribution.

        Raises RequestError for a parameter that `score` cannot apply.
        """
        given = self.sampling_params
        fixed: dict[str, Any] = {
            "max_tokens": None, "detokenize": False, "return_sampling_mask": False, "return_routed_experts": False,
        }  # fmt: skip
        if given is None or not processed:
            return SamplingParams(temperature=0, **fixed)
        if given.use_beam_search:
            accepted = "is not applied by score with processed log-probabilities: leave it out"
            raise RequestError("use_beam_search", True, accepted)
        applied = {name: getattr(given, name) for name in APPLIED}
        return SamplingParams(**applied, **fixed)
