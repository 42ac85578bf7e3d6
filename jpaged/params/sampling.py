"""SamplingParams: how the tokens of one request are chosen, and when they end. Checked when made, frozen afterwards."""

import dataclasses
import difflib
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from jpaged.errors import RequestError
from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.params.repetition_detection import RepetitionDetectionParams
from jpaged.params.structured_outputs import StructuredOutputsParams

MAX_N = 64
GREEDY_BELOW = 1e-5  # a temperature below this is greedy, as in vLLM: logits divided by less overflow float32
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS, MAX_BAD_WORD = 1024, 256  # texts, characters of one
NOT_WITH_BEAMS = (
    "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "min_tokens", "logits_processors", "thinking_token_budget", "repetition_detection",
)  # fmt: skip
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 4096  # of all stop strings together: preparing to look for them takes 11 ms and 1.1 MB


class RequestOutputKind(enum.Enum):
    """What a streaming request yields each time: everything so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Fields that are not built yet, each with the values besides its default that mean "off" as well.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "logprob_token_ids": (),
    "flat_logprobs": (),
    "watermarking": (False,),
    "skip_clone": (),
    "output_text_buffer_length": (),
    "routed_experts_prompt_start": (),
    "trace_decode_token_ids": (),
    "extra_args": ({},),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Names and defaults are vLLM's. Every field is checked here and stored as a plain Python value; an unknown field, or
    one that is not built yet and is not at its neutral value, raises `RequestError` naming it. What depends on the
    model (ids against its vocabulary, `logprobs` against `max_logprobs`) is checked when the request is added.
    """

    n: int = 1
    """Answers to one prompt. They share its KV and go their own ways from there."""

    best_of: int | None = None
    """Samples to make, of which the `n` with the highest cumulative log-probability are given. Default: n."""

    use_beam_search: bool = False
    """Search for the most likely answers instead of sampling: `n` of them, the best first. temperature divides the
    logits (0 leaves them), top_p, top_k and min_p have no part in it. Nothing is streamed before the end."""

    beam_width: int | None = None
    """Beams of a beam search. Default: best_of, or n."""

    length_penalty: float = 1.0
    """A beam search compares log-probabilities divided by length ** length_penalty: above 0 long answers gain."""

    early_stopping: bool | str = False
    """When a beam search with `beam_width` finished answers ends: True at once, False when none that runs is better so
    far, "never" when none can become better."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token always."""

    top_p: float = 1.0
    """Only the most likely tokens that together have this probability, in (0, 1]."""

    top_k: int = 0
    """Only so many most likely tokens; 0 and -1 mean all."""

    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one, in [0, 1]."""

    typical_p: float = 1.0
    """Only the tokens whose surprise is nearest to the expected one and that together have this probability, in (0, 1]
    (locally typical sampling). After all other filters."""

    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer has, in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Taken from the logit of every token as often as the answer has it, in [-2, 2]."""

    repetition_penalty: float = 1.0
    """Divides the logit of every token that the prompt or the answer has where it is positive, else multiplies it.
    Above 0; 1 does nothing."""

    logit_bias: dict[int, float] | None = None
    """Added to the logits of token ids, each in [-100, 100]; before the penalties."""

    allowed_token_ids: Sequence[int] | None = None
    """Sample only these. Stored as a tuple."""

    bad_words: Sequence[str] | None = None
    """Texts that the answer must not have: the last token of one is never sampled behind its others."""

    logits_processors: dict[str, dict[str, float]] | None = None
    """Custom processors that the engine was started with (option `logits_processors`), by name, each with its
    parameters."""

    min_tokens: int = 0
    """Sample no end of the answer (the model's own, `stop_token_ids`) before so many tokens."""

    seed: int | None = None
    """Makes the request's draws its own: the same tokens whoever runs beside it. Reduced to 64 bits; -1 is None."""

    max_tokens: int | None = 16
    """Most tokens to generate; None, and whatever does not fit, means as many as `max_model_len` leaves room for."""

    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer, besides the model's own end-of-sequence ids. Stored as a tuple."""

    stop: str | Sequence[str] | None = None
    """Texts that end the answer, at most 256 of together 4,096 characters. The one that is complete first does, of
    several at once the first in the list; the text is cut before it. Needs text (`detokenize`). Stored as a tuple."""

    include_stop_str_in_output: bool = False
    """Cut the text after the stop string instead, and keep the text of a stop token (special ones are left out still,
    unless skip_special_tokens is off)."""

    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence ids."""

    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, whatever of it is in the prefix cache. Default: only with prompt_logprobs."""

    logprobs: int | None = None
    """For each generated token, the log-probabilities of so many most likely tokens, and of the token itself."""

    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first: its log-probability, those of so many most likely ones in
    its place, and ranks. Always of the model itself: nothing is done to a prompt's logits."""

    repetition_detection: RepetitionDetectionParams | Mapping[str, Any] | None = None
    """End an answer that repeats itself, with finish_reason "repetition"; not before min_tokens. Stored as
    RepetitionDetectionParams."""

    detokenize: bool = True
    """Turn the tokens into text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """False: an added token right after another one stands in the text without a space, where the tokenizer puts spaces
    between tokens (as BERT's does). Special ones are there only without skip_special_tokens."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream (`AsyncLLM.generate`) holds: all so far, what is new, or only the last one comes.
    `LLM` gives the last one, with all, in any case."""

    stream_interval: int | None = None
    """New tokens between two outputs of a stream. The first and the last one come at once. Default: 1."""

    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's tokens at most; -1: as many as leave room for max_tokens. Of a text the special
    tokens that the tokenizer puts around it are among them, and stay."""

    truncation_side: str | None = None
    """Which end of a prompt that is truncated goes: "left" (the default, the last tokens are kept) or "right"."""

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the text must match: a JSON schema, a regular expression, a grammar. Stored as StructuredOutputsParams."""

    reasoning_tags: ReasoningTags | Sequence[str] | None = None
    """The tags (start, end) between which the model may think before it answers, for the two fields that have to know:
    `structured_outputs` begins behind the end tag, `thinking_token_budget` counts up to it. `LLM.chat` and the server
    know them by their reasoning_parser. Stored as ReasoningTags."""

    thinking_token_budget: int | None = None
    """Most tokens of reasoning: when the answer has so many and goes on, the end tag is what comes next. Needs
    reasoning_tags."""

    # Known by name, not built yet: only the default, or what means the same (NOT_BUILT), is accepted.
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    watermarking: bool | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None
    extra_args: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Refuse unknown fields by name, before the generated `__init__` would with a TypeError."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                close = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "see the fields of jpaged.SamplingParams"
                if name.startswith("guided_") or name == "response_format":
                    hint = "what the answer must match is told as structured_outputs"
                raise RequestError(name, fields[name], f"unknown sampling parameter; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        number, integer = self._number, self._integer
        integer("n", low=1, high=MAX_N, accepted=f"an integer from 1 to {MAX_N}")
        self._boolean("use_beam_search")
        for name in ("best_of", "beam_width"):
            if getattr(self, name) is not None:
                integer(name, low=self.n, high=MAX_N, accepted=f"an integer from n ({self.n}) to {MAX_N}, or None")
        if self.best_of == self.n and not self.use_beam_search:
            object.__setattr__(self, "best_of", None)
        self._check_beams()
        number("temperature", "a finite number from 0", lambda x: x >= 0)
        number("top_p", "a number in (0, 1]", lambda x: 0 < x <= 1)
        number("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        number("typical_p", "a number in (0, 1]", lambda x: 0 < x <= 1)
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, "a number in [-2, 2]", lambda x: -2 <= x <= 2)
        number("repetition_penalty", "a number above 0", lambda x: x > 0)
        top_k = integer("top_k", low=-1, accepted="an integer from -1; 0 and -1 mean all")
        object.__setattr__(self, "top_k", max(top_k, 0))
        if self.seed is not None:
            seed = integer("seed", low=-(2**63), high=2**64 - 1, accepted="an integer in [-2**63, 2**64), or None")
            object.__setattr__(self, "seed", None if seed == -1 else seed % 2**64)
        if self.max_tokens is not None:
            integer("max_tokens", low=1, accepted="an integer from 1, or None for as many as fit")
        most = self.max_tokens
        integer("min_tokens", low=0, high=most, accepted=f"an integer from 0 to max_tokens ({most})")
        self._check_ids()
        self._check_processors()
        if self.logprobs is not None:
            integer("logprobs", low=0, accepted="an integer from 0 to the engine's max_logprobs, or None")
        if self.prompt_logprobs is not None:
            integer("prompt_logprobs", low=0, accepted="an integer from 0 to the engine's max_logprobs, or None")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            self._boolean(name)
        if self.skip_reading_prefix_cache is not None:
            self._boolean("skip_reading_prefix_cache")
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
                accepted = "goes with sampling only: leave use_beam_search out"
                raise RequestError("structured_outputs", structured, accepted)
        for name, also_off in NOT_BUILT.items():
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value is not default and not any(_same(value, off) for off in (default, *also_off)):
                raise RequestError(name, value, f"not supported yet: leave it out, or {default!r}")
            object.__setattr__(self, name, default)

    # cached: asked for at every token
    @functools.cached_property
    def num_sequences(self) -> int:
        """Answers that are made, of which `n` are given."""
        return (self.beam_width or self.best_of or self.n) if self.use_beam_search else (self.best_of or self.n)

    @functools.cached_property
    def chooses(self) -> bool:
        """Whether it is known at the end only which answers are given."""
        return self.use_beam_search or self.num_sequences > self.n

    @functools.cached_property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are needed, asked for or not."""
        return self.logprobs is not None or self.chooses

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the whole prompt is computed, whatever of it there is already."""
        skips = self.skip_reading_prefix_cache
        return self.prompt_logprobs is not None if skips is None else skips

    def clone(self) -> Self:
        """Itself: it is frozen, so nobody changes it. `dataclasses.replace(params, top_p=0.9)` gives a changed one."""
        return self

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens there have been."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def samples_forced_tokens(self) -> bool:
        """Whether a token must be sampled even where a grammar allows one only: something is told of it, counts it, or
        may forbid it."""
        others = (
            self.needs_logprobs, self.has_penalties, self.bad_words, self.allowed_token_ids, self.min_tokens,
            self.logits_processors,
        )  # fmt: skip
        return any(others) or self.thinking_token_budget is not None

    @property
    def needs_extras(self) -> bool:
        """Whether sampling needs more than numbers: what there has been, or what may be."""
        others = (
            self.logit_bias, self.allowed_token_ids, self.bad_words, self.min_tokens, self.logits_processors,
            self.structured_outputs,
        )  # fmt: skip
        return self.has_penalties or any(others) or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def _check_ids(self) -> None:
        """logit_bias, allowed_token_ids and bad_words, as far as no model is needed to."""
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
                raise RequestError("bad_words", self.bad_words, "must be a list of texts")
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise RequestError("bad_words", f"{len(self.bad_words):,} texts", f"at most {MAX_BAD_WORDS:,}")
            for word in self.bad_words:
                if not isinstance(word, str) or not word or len(word) > MAX_BAD_WORD:
                    raise RequestError("bad_words", word, f"must be texts of 1 to {MAX_BAD_WORD} characters")
            object.__setattr__(self, "bad_words", tuple(self.bad_words) or None)

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
        self._number("length_penalty", "a finite number")
        stopping = self.early_stopping
        if not isinstance(stopping, (bool, np.bool_)) and not (isinstance(stopping, str) and stopping == "never"):
            raise RequestError("early_stopping", stopping, "must be True, False or 'never'")
        if isinstance(stopping, np.bool_):
            object.__setattr__(self, "early_stopping", bool(stopping))
        if self.use_beam_search:
            if self.num_sequences == 1:
                raise RequestError("beam_width", self.beam_width, "a beam search needs more than one beam: at least 2")
            if self.beam_width is not None and self.best_of not in (None, self.beam_width):
                raise RequestError("best_of", self.best_of, f"of a beam search it is beam_width ({self.beam_width})")
            for name in NOT_WITH_BEAMS:
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise RequestError(name, getattr(self, name), "does not go with use_beam_search: leave it out")
            return
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise RequestError(name, getattr(self, name), "goes with use_beam_search=True: leave it out")

    def _check_stop(self) -> None:
        stop = self.stop
        if stop is not None and not isinstance(stop, (str, list, tuple)):
            raise RequestError("stop", stop, "must be a text, or a list of texts")
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError("stop", strings, f"{len(strings):,} strings, at most {MAX_STOP_STRINGS}")
        for string in strings:
            if not isinstance(string, str):
                raise RequestError("stop", string, "must be a text, or a list of texts")
            if not string:
                raise RequestError("stop", stop, "an empty text would end every answer at once: leave it out")
        characters = sum(map(len, strings))
        if characters > MAX_STOP_CHARACTERS:
            accepted = f"{characters:,} characters, all stop strings together have at most {MAX_STOP_CHARACTERS:,}"
            raise RequestError("stop", stop, accepted)
        if strings and not self.detokenize:
            raise RequestError("stop", stop, "is looked for in the text: leave it out, or detokenize on")
        if strings and self.use_beam_search:
            raise RequestError("stop", stop, "has no part in a beam search: leave it out, or use stop_token_ids")
        object.__setattr__(self, "stop", tuple(strings))

    def _check_streaming(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError("output_kind", self.output_kind, "must be a RequestOutputKind of jpaged.params.sampling")
        if self.stream_interval is not None:
            self._integer("stream_interval", low=1, accepted="an integer from 1, or None")

    def _check_reasoning(self) -> None:
        tags = self.reasoning_tags
        if tags is not None and not isinstance(tags, ReasoningTags):
            if isinstance(tags, str) or not isinstance(tags, Sequence) or len(tags) != 2:
                raise RequestError("reasoning_tags", tags, "must be two texts: where reasoning starts and ends")
            object.__setattr__(self, "reasoning_tags", ReasoningTags(tags[0], tags[1]))
        if self.thinking_token_budget is not None:
            self._integer("thinking_token_budget", low=0, accepted="an integer from 0, or None for no limit")

    def _check_truncation(self) -> None:
        side = self.truncation_side
        if side is not None and not (isinstance(side, str) and side in ("left", "right")):
            raise RequestError("truncation_side", side, "must be 'left', 'right' or None")
        if self.truncate_prompt_tokens is None:
            if side is not None:
                raise RequestError("truncation_side", side, "goes with truncate_prompt_tokens: leave it out")
            return
        accepted = "an integer from 1, -1 for as many as leave room for max_tokens, or None"
        if self._integer("truncate_prompt_tokens", low=-1, accepted=accepted) == 0:
            raise RequestError("truncate_prompt_tokens", 0, f"must be {accepted}")

    def _number(self, name: str, accepted: str, holds: Callable[[float], bool] = lambda x: True) -> None:
        value = getattr(self, name)
        if not _is_number(value) or abs(value) > FLOAT32_MAX or not math.isfinite(value) or not holds(value):
            raise RequestError(name, value, f"must be {accepted}")
        object.__setattr__(self, name, float(value))

    def _integer(self, name: str, *, low: int, high: int | None = None, accepted: str) -> int:
        value = getattr(self, name)
        if not _is_integer(value) or value < low or (high is not None and value > high):
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
        ids = [] if value is None else list(value)
        for token_id in ids:
            if not _is_integer(token_id) or token_id < 0:
                raise RequestError(name, token_id, "token ids are integers from 0 to the model's vocab_size - 1")
        object.__setattr__(self, name, tuple(int(token_id) for token_id in ids))


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, (float, np.floating))


def _same(value: object, off: object) -> bool:
    """Whether a value is this neutral one; 0 is 0.0, but True is not 1."""
    if isinstance(off, (bool, np.bool_)) or isinstance(value, (bool, np.bool_)):
        return isinstance(value, (bool, np.bool_)) and isinstance(off, bool) and bool(value) is off
    if _is_number(off):
        return _is_number(value) and value == off
    return type(value) is type(off) and value == off
