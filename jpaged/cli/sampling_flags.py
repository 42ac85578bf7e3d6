"""The flags of `generate` that say how tokens are chosen; `SamplingParams` checks them.

`chat` has fewer, of its own: one answer, read as it is written, leaves no place for several or for a beam search.
"""

import dataclasses
import json
import pathlib
from typing import Annotated, Any, Literal

import tyro

from jpaged.cli.flags import read_text
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.params.structured_outputs import StructuredOutputsParams

# One text for each time the flag is given: a list behind it would take the prompts as well.
Texts = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]]


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

    typical_p: float = 1.0
    """Only the tokens whose surprise is nearest to the expected one and that together have this probability."""

    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer has."""

    frequency_penalty: float = 0.0
    """Taken from the logit of every token as often as the answer has it."""

    repetition_penalty: float = 1.0
    """Makes every token that the prompt or the answer has less likely, above 1."""

    sampling_seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Seed of each request's own draws. Default: drawn from --seed."""

    max_tokens: int = 64
    """Most tokens of each answer."""

    min_tokens: int = 0
    """Fewest tokens of each answer."""

    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""

    stop: Texts = ()
    """A text that ends an answer; it is cut before it. Once for each."""

    bad_words: Texts = ()
    """A text that no answer may have. Once for each."""

    json_schema: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Answers are JSON that this schema takes."""

    grammar: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Answers follow this grammar, Lark or GBNF."""

    regex: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Answers match this regular expression, each as a whole."""

    choice: Texts = ()
    """Answers are this text or another that is given so. Once for each."""

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
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            stop=self.stop,
            bad_words=self.bad_words or None,
            structured_outputs=self._structured_outputs(),
            seed=self.sampling_seed,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )
        if params.greedy and params.num_sequences > 1 and not params.use_beam_search:
            accepted = "every answer would be the same: use a higher one for several, or --use-beam-search"
            raise RequestError("temperature", self.temperature, accepted)
        return params

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        schema = read_text("json_schema", self.json_schema)
        if schema is not None:
            try:
                json.loads(schema)
            except ValueError as error:
                raise RequestError("json_schema", str(self.json_schema), f"must be a file of JSON: {error}") from None
        flags = {
            "json": schema,
            "grammar": read_text("grammar", self.grammar),
            "regex": self.regex,
            "choice": self.choice or None,
        }
        given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
        if len(given) > 1:
            accepted = "give one of json_schema, grammar, regex and choice"
            raise RequestError("structured_outputs", list(given), accepted)
        return StructuredOutputsParams(**given) if given else None
