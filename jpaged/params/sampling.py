"""SamplingParams: how the tokens of one request are sampled, and when it ends. Checked when created, then immutable."""

import dataclasses
import difflib
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jpaged.errors import MAX_INTEGER, RequestError
from jpaged.params.parameter import FLOAT32_MAX, Parameter, parameter
from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.params.repetition_detection import RepetitionDetectionParams
from jpaged.params.structured_outputs import StructuredOutputsParams

MAX_N = 64
GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM: dividing logits by it overflows float32
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS, MAX_BAD_WORD = 1024, 256  # number of strings, characters of one string
# Besides the numbers that are declared with beams=False.
NOT_WITH_BEAMS = (
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "logits_processors", "thinking_token_budget",
    "repetition_detection", "logprob_token_ids",
)  # fmt: skip
ACCEPTED_LOGPROBS = "an integer from 0 to the engine's max_logprobs, -1 for the whole vocabulary, or None"
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 4096  # of all stop strings together; their automaton then takes 11 ms to build, and 1.1 MB


class RequestOutputKind(enum.Enum):
    """Content of each output of a stream: the whole answer so far, the new part, or only the final answer."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Fields that are not built yet. The values, like the field's default, mean "off" and are accepted.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "watermarking": (False,),
    "skip_clone": (),
    "output_text_buffer_length": (),
    "routed_experts_prompt_start": (),
    "trace_decode_token_ids": (),
    "extra_args": ({},),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled.

    Names and defaults are vLLM's. Every field is checked here and stored as a plain Python value. An unknown field
    raises `RequestError`, as does a field that is not built yet and is not at its neutral value. Checks that need the
    model are made when the request is added: ids against its vocabulary, `logprobs` against `max_logprobs`.
    """

    n: int = parameter(1, flag="Number of answers to each prompt.")
    """Number of answers to the prompt, from 1 to 64. They share the prompt's KV."""

    best_of: int | None = parameter(
        None, http=False,
        flag="Number of answers to generate. The n answers with the highest log-probability are printed. Default: n.")
    """Answers to generate, from `n` to 64. The `n` of highest cumulative log-probability are returned. None: `n`."""

    use_beam_search: bool = parameter(
        False,
        flag="Search for the most likely answers, and print the best first. --top-p, --top-k and --min-p are ignored.")
    """Search for the `n` most likely answers, and return the best first. `temperature` divides the logits; 0 does not
    change them. `top_p`, `top_k` and `min_p` have no effect. Nothing is streamed before the end."""

    beam_width: int | None = parameter(None, flag="Number of beams of a beam search. Default: best_of, or n.")
    """Number of beams of a beam search, from 2 to 64 and at least `n`. None: `best_of`, or else `n`."""

    length_penalty: float = parameter(
        1.0,
        flag="Beam search divides log-probabilities by length ** length_penalty. Values above 0 favour long answers.")
    """Beam search ranks answers by log-probability / length ** length_penalty. Finite; above 0 favours long answers."""

    early_stopping: bool | str = False
    """End of a beam search that has `beam_width` finished answers. True: at once. False: when no running beam has a
    better score so far. "never": when no running beam can reach a better score."""

    temperature: float = parameter(1.0, least=0)
    """Divides the logits; from 0. 0 always selects the most likely token (greedy)."""

    top_p: float = parameter(
        1.0, above=0, most=1, column=4, filters=True,
        flag="Sample only from the most likely tokens whose probabilities add up to this. 1: from all tokens.")
    """Sample from the smallest set of most likely tokens with this total probability, in (0, 1]. 1 keeps all tokens."""

    top_k: int = parameter(
        0, column=5, filters=True, flag="Sample only from this number of most likely tokens. 0: from all tokens.")
    """Sample from the `top_k` most likely tokens. 0 and -1 keep all tokens."""

    min_p: float = parameter(
        0.0, least=0, most=1, column=6, filters=True,
        flag="Sample only from tokens with at least this fraction of the highest probability. 0: from all tokens.")
    """Sample from tokens with at least `min_p` times the probability of the most likely one, in [0, 1]. 0 keeps all."""

    typical_p: float = parameter(
        1.0, above=0, most=1, beams=False, column=11, filters=True, full=True,
        flag="Locally typical sampling: sample only from the tokens with an information content closest to the "
             "entropy, until their probabilities add up to this. 1: from all tokens.")
    """Locally typical sampling, after all other filters. Sample from the tokens whose surprise is nearest to the
    entropy, up to this total probability, in (0, 1]. 1 keeps all tokens."""

    top_n_sigma: float = parameter(
        0.0, least=0, beams=False, column=17, filters=True, full=True,
        flag="Sample only from tokens with a logit at most this number of standard deviations below the highest. "
             "0: from all tokens.")
    """Sample from tokens with a logit at most `top_n_sigma` standard deviations below the largest one, before `min_p`.
    From 0; 0 keeps all. The deviation is of all logits above -inf: a ban with a finite number widens it."""

    presence_penalty: float = parameter(
        0.0, least=-2, most=2, beams=False, column=12,
        flag="Subtracted from the logit of each token that is already in the answer.")
    """Subtracted from the logit of every token that is in the answer, in [-2, 2]. 0 does nothing."""

    frequency_penalty: float = parameter(
        0.0, least=-2, most=2, beams=False, column=13,
        flag="Subtracted from the logit of each token, once per occurrence in the answer.")
    """Subtracted from a token's logit once for each time it is in the answer, in [-2, 2]. 0 does nothing."""

    repetition_penalty: float = parameter(1.0, above=0, beams=False, column=14)
    """Divides positive and multiplies negative logits of tokens in the prompt or answer. Above 0; 1 does nothing."""

    logit_bias: dict[int, float] | None = None
    """Numbers in [-100, 100] added to the logits of up to 1,024 token ids, before the penalties. None adds nothing."""

    allowed_token_ids: Sequence[int] | None = None
    """Sample only these ids, at least one. None allows all. Stored as a tuple."""

    bad_words: Sequence[str] | None = None
    """Strings that must not be in the answer: the last token of a string is never sampled after its other tokens. At
    most 1,024 strings of 1 to 256 characters. None forbids nothing."""

    logits_processors: dict[str, dict[str, float]] | None = None
    """Processors of the engine (option `logits_processors`) to apply: {name: {parameter: value}}. None applies none."""

    min_tokens: int = parameter(0, flag="Minimum number of tokens of each answer.")
    """Minimum number of tokens of an answer, from 0 to `max_tokens`. Before that, no end-of-sequence id and no id of
    `stop_token_ids` is sampled, and no stop string ends the answer."""

    seed: int | None = parameter(None, http=False)
    """Seed of the request's random numbers. With a seed, other requests in the batch do not change its tokens. From
    -2**63 to 2**64 - 1, stored modulo 2**64. None and -1: a random seed."""

    max_tokens: int | None = 16
    """Maximum number of tokens to generate, at least 1. `max_model_len` limits it too. None: no other limit."""

    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer, in addition to the model's end-of-sequence ids. Stored as a tuple."""

    stop: str | Sequence[str] | None = None
    """Strings that end the answer: at most 256, with 4,096 characters together. The one that is complete first ends it;
    if several are, the first in the list. The text is cut before it. Needs `detokenize`. Stored as a tuple."""

    include_stop_str_in_output: bool = False
    """Keep stop strings and stop tokens in the text. Special stop tokens also need skip_special_tokens=False."""

    ignore_eos: bool = parameter(False, flag="Continue after the model's end-of-sequence token.")
    """Do not end at the model's end-of-sequence ids."""

    skip_reading_prefix_cache: bool | None = parameter(None, http=False)
    """Compute the whole prompt, without reading KV from the prefix index. None: True if `prompt_logprobs` is set."""

    logprobs: int | None = parameter(
        None, http=False,
        flag="Number of most likely tokens per position with log-probabilities in --output-json. Default: none.")
    """For each generated token, return log-probabilities of it and of the `logprobs` most likely tokens. From 0 to the
    engine's `max_logprobs`; -1 means the whole vocabulary. None returns none."""

    logprob_token_ids: Sequence[int] | None = None
    """For each generated token, return log-probabilities of it and of these ids, not of the most likely ids. At most
    the engine's `max_logprobs` ids. `logprobs` must be None or their number. Stored as a tuple."""

    flat_logprobs: bool = parameter(False, http=False)
    """Accepted, without effect: log-probabilities are a list of dicts. vLLM's flat container has that interface."""

    prompt_logprobs: int | None = None
    """For each prompt token except the first, return log-probabilities and ranks of it and of `prompt_logprobs` most
    likely tokens, from unchanged logits. Values as for `logprobs`."""

    return_sampling_mask: bool | None = parameter(None, http=False)
    """Return the ids from which each token was drawn, after all filters: `CompletionOutput.sampling_mask`. True needs
    an engine with the option `return_sampling_mask`, a temperature above 0, and a parameter that drops ids. None: True
    if all three are given."""

    return_routed_experts: bool | None = parameter(None, http=False)
    """Return the experts of each token of prompt and answer, as `CompletionOutput.routed_experts`. The prompt is then
    computed without the prefix cache. True needs an engine with the option `enable_return_routed_experts`, and no beam
    search. None: True if both are given."""

    repetition_detection: RepetitionDetectionParams | Mapping[str, Any] | None = None
    """End an answer that repeats itself, with finish_reason "repetition", but not before `min_tokens`. None: never.
    Stored as RepetitionDetectionParams."""

    detokenize: bool = parameter(True, http=False)
    """Turn the tokens into text. False: outputs have no text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """False: write no space between two added tokens in a row. Matters only for tokenizers that put spaces between all
    tokens (such as BERT's). Special tokens are in the text only if `skip_special_tokens` is False."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of each output of a stream (`AsyncLLM.generate`). `LLM` always returns the final answer."""

    stream_interval: int | None = None
    """New tokens per output of a stream, at least 1. The first and the last token are sent at once. None: the engine's
    `stream_interval`, which is 1."""

    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens of the prompt, at least 1. -1: as many as leave room for `max_tokens`. None: all.
    Special tokens that the tokenizer adds around a text are counted, and are kept."""

    truncation_side: str | None = None
    """End of the prompt that `truncate_prompt_tokens` removes: "left" or "right". None: "left" (keep the last)."""

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """Format that the text must match, such as a JSON schema, a regular expression or a grammar. None: any text. Stored
    as StructuredOutputsParams."""

    reasoning_tags: ReasoningTags | Sequence[str] | None = None
    """The tags (start, end) around the model's reasoning. `structured_outputs` applies after the end tag, and
    `thinking_token_budget` counts the tokens before it. `LLM.chat` and the server set the tags from `reasoning_parser`.
    None: the model has no reasoning. Stored as ReasoningTags."""

    thinking_token_budget: int | None = parameter(None, http=False)
    """Number of reasoning tokens after which the end tag is forced, from 0. None: no limit. Needs `reasoning_tags`."""

    # Not built yet: only the default, or an equivalent value (NOT_BUILT), is accepted.
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    watermarking: bool | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None
    extra_args: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Raise RequestError, not TypeError, for an unknown field. Type checkers use the signature of `__init__`."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                close = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "see the fields of jpaged.SamplingParams"
                if name.startswith("guided_") or name == "response_format":
                    hint = "set the format of the answer with structured_outputs"
                raise RequestError(name, fields[name], f"unknown sampling parameter; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        integer = self._integer
        integer("n", low=1, high=MAX_N, accepted=f"an integer from 1 to {MAX_N}")
        self._boolean("use_beam_search")
        for name in ("best_of", "beam_width"):
            if getattr(self, name) is not None:
                integer(name, low=self.n, high=MAX_N, accepted=f"an integer from n ({self.n}) to {MAX_N}, or None")
        if self.best_of == self.n and not self.use_beam_search:
            object.__setattr__(self, "best_of", None)
        self._check_beams()
        for name in NUMBERS:
            self._number(name)
        top_k = integer("top_k", low=-1, accepted="an integer from -1; 0 and -1 mean all")
        object.__setattr__(self, "top_k", max(top_k, 0))
        if self.seed is not None:
            seed = integer("seed", low=-(2**63), high=2**64 - 1, accepted="an integer in [-2**63, 2**64), or None")
            object.__setattr__(self, "seed", None if seed == -1 else seed % 2**64)
        if self.max_tokens is not None:
            integer("max_tokens", low=1, accepted="an integer from 1, or None for no limit but max_model_len")
        most = self.max_tokens
        integer("min_tokens", low=0, high=most, accepted=f"an integer from 0 to max_tokens ({most})")
        self._check_ids()
        self._check_processors()
        self._check_logprob_ids()
        if self.logprobs is not None:
            integer("logprobs", low=-1, accepted=ACCEPTED_LOGPROBS)
        if self.prompt_logprobs is not None:
            integer("prompt_logprobs", low=-1, accepted=ACCEPTED_LOGPROBS)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            self._boolean(name)
        for name in ("skip_reading_prefix_cache", "return_sampling_mask", "return_routed_experts"):
            if getattr(self, name) is not None:
                self._boolean(name)
        for name in ("include_stop_str_in_output", "spaces_between_special_tokens"):
            self._boolean(name)
        self._check_stop()
        self._check_streaming()
        self._check_truncation()
        self._token_ids("stop_token_ids")
        self._check_reasoning()
        if self.repetition_detection is not None:
            repetition = RepetitionDetectionParams.from_fields(self.repetition_detection)
            object.__setattr__(self, "repetition_detection", repetition if repetition.max_pattern_size else None)
        if self.structured_outputs is not None:
            structured = StructuredOutputsParams.from_fields(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", structured)
            if self.use_beam_search:
                accepted = "does not work with use_beam_search: leave one of them out"
                raise RequestError("structured_outputs", structured, accepted)
        for name, also_off in NOT_BUILT.items():
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value is not default and not any(_same(value, off) for off in (default, *also_off)):
                raise RequestError(name, value, f"not supported yet: leave it out, or set it to {default!r}")
            object.__setattr__(self, name, default)

    # Cached, because these are read for every token.
    @functools.cached_property
    def num_sequences(self) -> int:
        """Number of answers to generate; `n` of them are returned."""
        return (self.beam_width or self.best_of or self.n) if self.use_beam_search else (self.best_of or self.n)

    @functools.cached_property
    def chooses(self) -> bool:
        """True if the answers to return are chosen only after all have ended (`best_of`, beam search)."""
        return self.use_beam_search or self.num_sequences > self.n

    @functools.cached_property
    def needs_logprobs(self) -> bool:
        """True if log-probabilities of the sampled tokens are needed: to return them, or to rank answers."""
        return self.logprobs is not None or self.chooses

    @property
    def skips_prefix_cache(self) -> bool:
        """True if the whole prompt is computed, without reading KV from the prefix index."""
        skips = self.skip_reading_prefix_cache
        return self.prompt_logprobs is not None if skips is None else skips

    def clone(self) -> Self:
        """Return the same object: it is immutable. For a changed copy, use `dataclasses.replace(params, top_p=0.9)`."""
        return self

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on earlier tokens, through a penalty."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def samples_forced_tokens(self) -> bool:
        """True if forced tokens must be sampled: a parameter needs their log-probabilities, counts or forbids them."""
        others = (
            self.needs_logprobs, self.has_penalties, self.bad_words, self.allowed_token_ids, self.min_tokens,
            self.logits_processors, self.return_sampling_mask, self.return_routed_experts,
        )  # fmt: skip
        return any(others) or self.thinking_token_budget is not None

    @property
    def drops_ids(self) -> bool:
        """True if a filter or a mask keeps some ids from being sampled."""
        masks = (self.allowed_token_ids, self.bad_words, self.structured_outputs)
        filters = (name for name, one in PARAMETERS.items() if one.filters)
        return any(masks) or any(getattr(self, name) != NEUTRAL_COLUMNS[name] for name in filters)

    @property
    def needs_extras(self) -> bool:
        """True if sampling needs state that has no column in the request table (see `SamplingExtras`)."""
        others = (
            self.logit_bias, self.allowed_token_ids, self.bad_words, self.min_tokens, self.logits_processors,
            self.structured_outputs, self.logprob_token_ids,
        )  # fmt: skip
        return self.has_penalties or any(others) or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always selected."""
        return self.temperature < GREEDY_BELOW

    def _check_ids(self) -> None:
        """Check `logit_bias`, `allowed_token_ids` and `bad_words`, except for the size of the vocabulary."""
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError("logit_bias", self.logit_bias, "must be a dict from token ids to numbers")
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise RequestError("logit_bias", f"{len(self.logit_bias):,} entries", f"at most {MAX_LOGIT_BIAS:,}")
            for token_id, bias in self.logit_bias.items():
                if not _is_integer(token_id) or token_id < 0:
                    raise RequestError("logit_bias", token_id, "keys are token ids: integers from 0")
                if not _is_number(bias) or not -100 <= bias <= 100:
                    raise RequestError("logit_bias", bias, f"must be a number in [-100, 100], for token {token_id}")
            bias = {int(token_id): float(value) for token_id, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias or None)
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids")
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids", [], "must not be empty: leave it out to allow all")
        if self.bad_words is not None:
            if isinstance(self.bad_words, str) or not isinstance(self.bad_words, Sequence):
                raise RequestError("bad_words", self.bad_words, "must be a list of strings")
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise RequestError("bad_words", f"{len(self.bad_words):,} strings", f"at most {MAX_BAD_WORDS:,}")
            for word in self.bad_words:
                if not isinstance(word, str) or not word or len(word) > MAX_BAD_WORD:
                    raise RequestError("bad_words", word, f"must be strings of 1 to {MAX_BAD_WORD} characters")
            object.__setattr__(self, "bad_words", tuple(self.bad_words) or None)

    def _check_logprob_ids(self) -> None:
        """Check `logprob_token_ids` and `flat_logprobs`, and set `logprobs` to the number of ids."""
        self._boolean("flat_logprobs")
        object.__setattr__(self, "flat_logprobs", False)
        if self.logprob_token_ids is None:
            return
        self._token_ids("logprob_token_ids")
        ids: tuple[int, ...] = tuple(dict.fromkeys(self.logprob_token_ids))
        object.__setattr__(self, "logprob_token_ids", ids or None)
        most = MAX_LOGIT_BIAS - len(self.logit_bias or ())
        if len(ids) > most:
            raise RequestError("logprob_token_ids", f"{len(ids):,} ids", f"at most {most:,}, together with logit_bias")
        if ids and self.logprobs not in (None, len(ids)):
            accepted = f"must be {len(ids)}, the number of logprob_token_ids: leave it out"
            raise RequestError("logprobs", self.logprobs, accepted)
        if ids:
            object.__setattr__(self, "logprobs", len(ids))

    def _check_processors(self) -> None:
        given = self.logits_processors
        if given is None:
            return
        accepted = "must be a dict from names of processors to dicts of their parameters"
        if not isinstance(given, Mapping):
            raise RequestError("logits_processors", given, accepted)
        for name, parameters in given.items():
            if not isinstance(parameters, Mapping):
                raise RequestError("logits_processors", given, accepted)
            for key, value in parameters.items():
                if not _is_number(value) or not abs(value) <= FLOAT32_MAX:
                    raise RequestError(f"logits_processors.{name}.{key}", value, "must be a finite number")
        copied = {name: {key: float(value) for key, value in parameters.items()} for name, parameters in given.items()}
        object.__setattr__(self, "logits_processors", copied or None)

    def _check_beams(self) -> None:
        self._number("length_penalty")
        stopping = self.early_stopping
        if not isinstance(stopping, (bool, np.bool_)) and not (isinstance(stopping, str) and stopping == "never"):
            raise RequestError("early_stopping", stopping, "must be True, False or 'never'")
        if isinstance(stopping, np.bool_):
            object.__setattr__(self, "early_stopping", bool(stopping))
        if self.use_beam_search:
            if self.num_sequences == 1:
                raise RequestError("beam_width", self.beam_width, "a beam search needs more than one beam: at least 2")
            if self.beam_width is not None and self.best_of not in (None, self.beam_width):
                accepted = f"must be None or equal to beam_width ({self.beam_width}) in a beam search"
                raise RequestError("best_of", self.best_of, accepted)
            for name in (*NUMBERS_WITHOUT_BEAMS, *NOT_WITH_BEAMS):
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise RequestError(name, getattr(self, name), "does not work with use_beam_search: leave it out")
            return
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise RequestError(name, getattr(self, name), "needs use_beam_search=True: leave it out")

    def _check_stop(self) -> None:
        stop = self.stop
        if stop is not None and not isinstance(stop, (str, list, tuple)):
            raise RequestError("stop", stop, "must be a string, or a list of strings")
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError("stop", strings, f"{len(strings):,} strings, at most {MAX_STOP_STRINGS}")
        for string in strings:
            if not isinstance(string, str):
                raise RequestError("stop", string, "must be a string, or a list of strings")
            if not string:
                raise RequestError("stop", stop, "an empty text would end every answer at once: leave it out")
        characters = sum(map(len, strings))
        if characters > MAX_STOP_CHARACTERS:
            accepted = f"{characters:,} characters, all stop strings together have at most {MAX_STOP_CHARACTERS:,}"
            raise RequestError("stop", stop, accepted)
        if strings and not self.detokenize:
            raise RequestError("stop", stop, "needs text: leave it out, or set detokenize=True")
        if strings and self.use_beam_search:
            raise RequestError("stop", stop, "does not work with use_beam_search: leave it out, or use stop_token_ids")
        object.__setattr__(self, "stop", tuple(strings))

    def _check_streaming(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError("output_kind", self.output_kind, "must be a jpaged.RequestOutputKind")
        if self.stream_interval is not None:
            self._integer("stream_interval", low=1, accepted="an integer from 1, or None")

    def _check_reasoning(self) -> None:
        tags = self.reasoning_tags
        if tags is not None and not isinstance(tags, ReasoningTags):
            if isinstance(tags, str) or not isinstance(tags, Sequence) or len(tags) != 2:
                raise RequestError("reasoning_tags", tags, "must be two strings: the start tag and the end tag")
            object.__setattr__(self, "reasoning_tags", ReasoningTags(tags[0], tags[1]))
        if self.thinking_token_budget is not None:
            self._integer("thinking_token_budget", low=0, accepted="an integer from 0, or None for no limit")

    def _check_truncation(self) -> None:
        side = self.truncation_side
        if side is not None and not (isinstance(side, str) and side in ("left", "right")):
            raise RequestError("truncation_side", side, "must be 'left', 'right' or None")
        if self.truncate_prompt_tokens is None:
            if side is not None:
                raise RequestError("truncation_side", side, "needs truncate_prompt_tokens: leave it out")
            return
        accepted = "an integer from 1, -1 for as many as leave room for max_tokens, or None"
        if self._integer("truncate_prompt_tokens", low=-1, accepted=accepted) == 0:
            raise RequestError("truncate_prompt_tokens", 0, f"must be {accepted}")

    def _number(self, name: str) -> None:
        value, declared = getattr(self, name), PARAMETERS[name]
        is_float = type(value) is float  # most are: without this test, SamplingParams() takes 4 us more
        # numpy would round the limits to a float16's dtype, so its infinity would be in range
        if not (is_float or (_is_number(value) and abs(value) < math.inf)) or not declared.accepts(value):
            raise RequestError(name, value, f"must be {declared.accepted}")
        if not is_float:
            object.__setattr__(self, name, float(value))

    def _integer(self, name: str, *, low: int, high: int | None = None, accepted: str) -> int:
        value, high = getattr(self, name), MAX_INTEGER if high is None else high
        if _is_integer(value) and value > high >= MAX_INTEGER:
            raise RequestError(name, value, f"must be at most {high}: {accepted}")
        if not _is_integer(value) or not low <= value <= high:
            raise RequestError(name, value, f"must be {accepted}")
        object.__setattr__(self, name, int(value))
        return int(value)

    def _boolean(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (bool, np.bool_)):
            raise RequestError(name, value, "must be True or False")
        object.__setattr__(self, name, bool(value))

    def _token_ids(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray, set, frozenset, type(None))):
            raise RequestError(name, value, "must be a list of token ids")
        ids = [] if value is None else value if isinstance(value, (list, tuple)) else list(value)
        if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # 30 times as fast, and there may be 500,000
            object.__setattr__(self, name, tuple(ids))
            return
        for token_id in ids:
            if not _is_integer(token_id) or token_id < 0:
                raise RequestError(name, token_id, "token ids are integers from 0 to the model's vocab_size - 1")
        object.__setattr__(self, name, tuple(int(token_id) for token_id in ids))


PARAMETERS: dict[str, Parameter] = {
    field.name: field.metadata.get("parameter", Parameter()) for field in dataclasses.fields(SamplingParams)
}
NUMBERS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.type is float)
NUMBERS_WITHOUT_BEAMS = tuple(name for name in NUMBERS if not PARAMETERS[name].beams)
# Column in the request table of each parameter that has one.
COLUMNS = {name: one.column for name, one in PARAMETERS.items() if one.column is not None}
FULL_FILTERS = tuple(name for name, one in PARAMETERS.items() if one.full)
NEUTRAL_COLUMNS: dict[str, float] = {name: getattr(SamplingParams, name) for name in COLUMNS}


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, (float, np.floating))


def _same(value: object, off: object) -> bool:
    """True if a value equals a neutral value. 0 equals 0.0, but True does not equal 1."""
    if isinstance(off, (bool, np.bool_)) or isinstance(value, (bool, np.bool_)):
        return isinstance(value, (bool, np.bool_)) and isinstance(off, bool) and bool(value) is off
    if _is_number(off):
        return _is_number(value) and value == off
    return type(value) is type(off) and value == off
