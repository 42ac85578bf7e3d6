"""`BeamSearchParams`, and the result of `LLM.beam_search`: vLLM's names for a beam search."""

import dataclasses
from collections.abc import Mapping

from jpaged.outputs import Logprob
from jpaged.params.sampling import RequestOutputKind, SamplingParams


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. `LLM.beam_search` checks them."""

    beam_width: int
    """Number of beams, and of answers, from 2 to 64."""

    max_tokens: int
    """Maximum number of tokens to generate, at least 1."""

    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence ids."""

    temperature: float = 0.0
    """Divides the logits. 0 leaves them unchanged."""

    length_penalty: float = 1.0
    """Answers are ranked by log-probability / length ** length_penalty."""

    include_stop_str_in_output: bool = False
    """Keep the text of the end-of-sequence token."""

    def sampling_params(self) -> SamplingParams:
        """Return the same search as sampling parameters. Raises RequestError for a value out of range."""
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """One answer that a search found. As in vLLM, tokens and text begin with the prompt."""

    tokens: list[int]                            # of the prompt and of the answer
    logprobs: list[Mapping[int, Logprob]]        # of the answer's tokens
    cum_logprob: float
    text: str | None = None                      # None if the model has no tokenizer
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """The answers that a search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
