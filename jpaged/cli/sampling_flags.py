"""The flags that say how tokens are chosen; `SamplingParams` checks them."""

import dataclasses
from typing import Annotated

import tyro

from jpaged.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling flags of generate and chat."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token always."""

    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""

    top_k: int = 0
    """Only so many most likely tokens; 0 means all."""

    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one."""

    sampling_seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Seed of each request's own draws. Default: drawn from --seed."""

    max_tokens: int = 64
    """Most tokens of each answer."""

    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""

    logprobs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Log-probabilities of so many most likely tokens in each place; --output-json holds them."""

    def sampling_params(self) -> SamplingParams:
        """As SamplingParams. Raises RequestError that names a bad flag."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.sampling_seed,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )
