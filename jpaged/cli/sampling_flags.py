"""The flags of `generate` that say how tokens are chosen; `SamplingParams` checks them.

`chat` has fewer, of its own: one answer, read as it is written, leaves no place for several or for a beam search.
"""

import dataclasses
from typing import Annotated, Literal

import tyro

from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """One answer to a prompt or several, and how its tokens are chosen."""

    n: int = 1
    """Answers to each prompt."""

    best_of: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Samples to make, of which the n with the highest log-probability are printed. Default: n."""

    use_beam_search: bool = False
    """Search for the most likely answers, the best first; --top-p, --top-k and --min-p have no part in it."""

    beam_width: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Beams of a beam search. Default: best_of, or n."""

    length_penalty: float = 1.0
    """A beam search compares log-probabilities divided by length ** length_penalty: above 0 long answers gain."""

    early_stopping: Literal["false", "true", "never"] = "false"
    """A search with its answers found ends: true at once, false if no beam is better, never if none can become so."""

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
        params = SamplingParams(
            n=self.n,
            best_of=self.best_of,
            use_beam_search=self.use_beam_search,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping="never" if self.early_stopping == "never" else self.early_stopping == "true",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.sampling_seed,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )
        if params.greedy and params.num_sequences > 1 and not params.use_beam_search:
            accepted = "every answer would be the same: use a higher one for several, or --use-beam-search"
            raise RequestError("temperature", self.temperature, accepted)
        return params
