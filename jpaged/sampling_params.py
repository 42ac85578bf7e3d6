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
from jpaged.structured_outputs import StructuredOutputsParams

MAX_N = 64
GREEDY_BELOW = 1e-5  # a temperature below this is greedy, as in vLLM: logits divided by less overflow float32
FLOAT32_MAX = float(np.finfo(np.float32).max)


class RequestOutputKind(enum.Enum):
    """What a streaming request yields each time: everything so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Fields that are not built yet, each with the values besides its default that mean "off" as well.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (),
    "frequency_penalty": (),
    "repetition_penalty": (),
    "min_tokens": (),
    "stop": ([], ()),
    "include_stop_str_in_output": (),
    "bad_words": ([], ()),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "logprob_token_ids": (),
    "flat_logprobs": (),
    "spaces_between_special_tokens": (),
    "output_kind": (),
    "stream_interval": (1,),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "skip_reading_prefix_cache": (False,),
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

    seed: int | None = None
    """Makes the request's draws its own: the same tokens whoever runs beside it. Reduced to 64 bits."""

    max_tokens: int | None = 16
    """Most tokens to generate; None, and whatever does not fit, means as many as `max_model_len` leaves room for."""

    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the answer, besides the model's own end-of-sequence ids. Stored as a tuple."""

    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence ids."""

    logprobs: int | None = None
    """For each generated token, the log-probabilities of so many most likely tokens, and of the token itself."""

    detokenize: bool = True
    """Turn the tokens into text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the text must match: a JSON schema, a regular expression, a grammar. Stored as StructuredOutputsParams."""

    # Known by name, not built yet: only the default, or what means the same (NOT_BUILT), is accepted.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    repetition_detection: Any = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    skip_reading_prefix_cache: bool | None = None
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
        top_k = integer("top_k", low=-1, accepted="an integer from -1; 0 and -1 mean all")
        object.__setattr__(self, "top_k", max(top_k, 0))
        if self.seed is not None:
            seed = integer("seed", low=-(2**63), high=2**64 - 1, accepted="an integer in [-2**63, 2**64), or None")
            object.__setattr__(self, "seed", seed % 2**64)
        if self.max_tokens is not None:
            integer("max_tokens", low=1, accepted="an integer from 1, or None for as many as fit")
        if self.logprobs is not None:
            integer("logprobs", low=0, accepted="an integer from 0 to the engine's max_logprobs, or None")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            self._boolean(name)
        self._token_ids("stop_token_ids")
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
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

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
            return
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise RequestError(name, getattr(self, name), "goes with use_beam_search=True: leave it out")

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
