"""Sampling flags of `jpaged generate`. `SamplingParams` checks their values. `jpaged chat` has its own, fewer flags."""

import dataclasses
import json
import pathlib
from typing import Annotated, Any, Literal

import tyro

from jpaged.cli.common.demo_prompts import DEMO_REPETITION_PENALTY
from jpaged.cli.flags.engine import one_line_help, read_text
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.params.structured_outputs import StructuredOutputsParams

# The flag is repeated for several texts. A flag with several values would also consume the prompts after it.
Texts = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]]


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags for the number of answers per prompt, and for how their tokens are sampled."""

    n: int = 1
    """Number of answers to each prompt."""

    best_of: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Number of answers to generate. The n answers with the highest log-probability are printed. Default: n."""

    use_beam_search: bool = False
    """Search for the most likely answers, and print the best first. --top-p, --top-k and --min-p are ignored."""

    beam_width: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Number of beams of a beam search. Default: best_of, or n."""

    length_penalty: float = 1.0
    """Beam search divides log-probabilities by length ** length_penalty. Values above 0 favour long answers."""

    early_stopping: Literal["false", "true", "never"] = "false"
    """End of a beam search that has enough answers. true: at once. false: when no running beam has a better
    score so far. never: when no running beam can reach a better score."""

    temperature: float = 0.0
    """Sampling temperature: the logits are divided by it. 0: always the most likely token."""

    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this. 1: from all tokens."""

    top_k: int = 0
    """Sample only from this number of most likely tokens. 0: from all tokens."""

    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the highest probability. 0: from all tokens."""

    typical_p: float = 1.0
    """Locally typical sampling: sample only from the tokens with an information content closest to the entropy, until
    their probabilities add up to this. 1: from all tokens."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is already in the answer."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token, once per occurrence in the answer."""

    repetition_penalty: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Above 1, tokens that are in the prompt or the answer become less likely. Default: 1. For the demo model, which
    repeats itself, 1.15 without --use-beam-search."""

    sampling_seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Sampling seed for each prompt. Default: a different seed per prompt, drawn from --seed."""

    max_tokens: int = 64
    """Maximum number of tokens of each answer."""

    min_tokens: int = 0
    """Minimum number of tokens of each answer."""

    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""

    stop: Texts = ()
    """Text that ends an answer. The answer excludes it. Repeat the flag for several texts."""

    bad_words: Texts = ()
    """Text that no answer may contain. Repeat the flag for several texts."""

    json_schema: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a JSON schema. Answers are JSON that matches it."""

    grammar: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a grammar in Lark or GBNF syntax. Answers match it."""

    regex: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Regular expression. Each whole answer matches it."""

    choice: Texts = ()
    """Allowed answer: each answer is one of the choices. Repeat the flag for each choice."""

    logprobs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Number of most likely tokens per position with log-probabilities in --output-json. Default: none."""

    def sampling_params(self, model: str) -> SamplingParams:
        """Return the flags as SamplingParams for a model. Raises RequestError for a bad flag."""
        penalty = self.repetition_penalty
        if penalty is None:
            penalty = DEMO_REPETITION_PENALTY if model == "demo" and not self.use_beam_search else 1.0
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
            repetition_penalty=penalty,
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
            accepted = "every answer would be the same: use a higher temperature, or --use-beam-search"
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
