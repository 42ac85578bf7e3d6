"""Sampling flags of `jpaged generate`. `SamplingParams` checks their values. `jpaged chat` has its own, fewer flags."""

import dataclasses
import json
import pathlib
import typing
from typing import Annotated, Any, Literal

import tyro

from jpaged.cli.common.demo_prompts import DEMO_REPETITION_PENALTY
from jpaged.cli.flags.engine import annotated_flag, one_line_help, read_text
from jpaged.errors import RequestError
from jpaged.params.sampling import PARAMETERS, SamplingParams
from jpaged.params.structured_outputs import StructuredOutputsParams

# The flag is repeated for several texts. A flag with several values would also consume the prompts after it.
Texts = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]]


# Flags with the name, type and default of a parameter, and the help that it declares.
FLAGS = {name: declared.flag for name, declared in PARAMETERS.items() if declared.flag is not None}


def _declared_flags() -> Any:
    hints, fields = typing.get_type_hints(SamplingParams), []
    for name, text in FLAGS.items():
        default = getattr(SamplingParams, name)
        hint = annotated_flag(name, hints[name], text, default)
        fields.append((name, hint, dataclasses.field(default=default)))
    return dataclasses.make_dataclass("DeclaredFlags", fields, frozen=True, kw_only=True)


DeclaredFlags = _declared_flags()


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags(DeclaredFlags):
    """Flags for the number of answers per prompt, and for how their tokens are sampled."""

    early_stopping: Literal["false", "true", "never"] = "false"
    """End of a beam search that has enough answers. true: at once. false: when no running beam has a better
    score so far. never: when no running beam can reach a better score."""

    temperature: float = 0.0
    """Sampling temperature: the logits are divided by it. 0: always the most likely token."""

    repetition_penalty: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Above 1, tokens that are in the prompt or the answer become less likely. Default: 1. For the demo model, which
    repeats itself, 1.15 without --use-beam-search."""

    sampling_seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Sampling seed for each prompt. Default: a different seed per prompt, drawn from --seed."""

    max_tokens: int = 64
    """Maximum number of tokens of each answer."""

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

    def sampling_params(self, model: str) -> SamplingParams:
        """Return the flags as SamplingParams for a model. Raises RequestError for a bad flag."""
        penalty = self.repetition_penalty
        if penalty is None:
            penalty = DEMO_REPETITION_PENALTY if model == "demo" and not self.use_beam_search else 1.0
        params = SamplingParams(
            **{name: getattr(self, name) for name in FLAGS},
            early_stopping="never" if self.early_stopping == "never" else self.early_stopping == "true",
            temperature=self.temperature,
            repetition_penalty=penalty,
            stop=self.stop,
            bad_words=self.bad_words or None,
            structured_outputs=self._structured_outputs(),
            seed=self.sampling_seed,
            max_tokens=self.max_tokens,
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
