"""SpeculationConfig: the options of speculative decoding. Checked when created, then immutable.

Names are vLLM's `SpeculativeConfig`'s. `docs/speculative_decoding.md` describes the methods.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jpaged.errors import MAX_INTEGER, RequestError, first_line, unknown_field

NAME = "speculative_config"
MAX_DRAFTS = 16  # drafts per row: verify programs have at most 1 + MAX_DRAFTS tokens per row

# A function that drafts: (token ids of prompt and answer, most drafts) -> drafts.
DraftFunction = Callable[[Sequence[int], int], Sequence[int]]

# Methods, with their default number of drafts per row.
DEFAULT_DRAFTS = {"ngram": 5, "suffix": 8, "draft_model": 4, "eagle3": 3, "mtp": 1, "custom": 5}
MODEL_METHODS = ("draft_model", "eagle3", "mtp")  # methods that draft on the device, with weights
SEPARATE_MODELS = ("draft_model", "eagle3")       # methods that need a checkpoint of their own
# vLLM's other names of methods.
METHOD_ALIASES = {"[ngram]": "ngram"} | dict.fromkeys(
    (
        "deepseek_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp",
        "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
        "bailing_hybrid_mtp", "minimax_m3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "gemma4_mtp", "hy_v3_mtp",
    ),
    "mtp",
)  # fmt: skip
# Methods of vLLM that jpaged lacks, and the change to make.
OTHER_METHODS = {
    "ngram_gpu": "use ngram, which has the same drafts",
    "eagle": "use eagle3 with an EAGLE-3 head for the model, or draft_model",
    "medusa": "use eagle3 with an EAGLE-3 head for the model, or draft_model",
    "mlp_speculator": "use eagle3 with an EAGLE-3 head for the model, or draft_model",
    "dflash": "use eagle3 with an EAGLE-3 head for the model, or draft_model",
    "dspark": "use eagle3 with an EAGLE-3 head for the model, or draft_model",
    "extract_hidden_states": "it drafts nothing: leave speculative_config out",
    "custom_class": "use custom, with function='module:function'",
}
# Keys that belong to some methods. With another method, only None is accepted.
METHODS_OF = {
    "model": ("draft_model", "eagle3", "mtp"),
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "draft_tensor_parallel_size": MODEL_METHODS,
    "max_model_len": SEPARATE_MODELS,
    "quantization": SEPARATE_MODELS,
    "function": ("custom",),
}
LOOKUP_DEFAULTS = (2, 5)  # prompt_lookup_min, prompt_lookup_max
SUFFIX_DEFAULTS: dict[str, int | float] = {
    "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_cached_requests": 10_000,
    "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1,
}  # fmt: skip

_BY_TIME = "jpaged drafts only where it measures that drafts save time"
_OF_TARGET = "the draft has the value of the model"
_EXACT = "a draft is accepted if it is the token that the model samples"
# Keys of vLLM that jpaged lacks: their neutral values, and the reason. A neutral value is ignored, as is None.
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "enforce_eager": ((True, False), "jpaged has compiled programs only"),
    "disable_by_batch_size": ((), _BY_TIME),
    "num_speculative_tokens_per_batch_size": ((), _BY_TIME),
    "enable_adaptive_verification": ((False,), _BY_TIME),
    "disable_logprobs": ((False,), "requests that ask for log-probabilities get them"),
    "disable_mqa_scorer": ((False,), "drafts are checked in one step"),
    "disable_padded_drafter_batch": ((False,), "programs have fixed sizes"),
    "disable_eagle_block_drop": ((False,), "no block of the prefix cache is dropped"),
    "use_local_argmax_reduction": ((False,), "not supported yet"),
    "use_heterogeneous_vocab": ((False,), "a draft model must have the vocabulary of the model"),
    "parallel_drafting": ((False,), "not supported yet"),
    "tensor_parallel_size": ((), "write draft_tensor_parallel_size"),
    "moe_backend": ((), _OF_TARGET),
    "attention_backend": ((), _OF_TARGET),
    "kv_cache_dtype": ((), _OF_TARGET),
    "draft_load_config": ((), _OF_TARGET),
    "index_share_for_mtp_iteration": ((), _OF_TARGET),
    "revision": ((), "download that revision, and write its folder as model"),
    "code_revision": ((), "code from a checkpoint is never run"),
    "rejection_sample_method": (("standard",), _EXACT),
    "acceptance_method": (("rejection_sampler",), _EXACT),
    "synthetic_acceptance_rates": ((), _EXACT),
    "synthetic_acceptance_length": ((), _EXACT),
    "draft_sample_method": (("greedy",), "a draft model draws with the random numbers of the model's own tokens"),
    "dspark_draft_topk": ((), "the method dspark is not supported yet"),
    "target_model_config": ((), "vLLM sets it itself"),
    "target_parallel_config": ((), "vLLM sets it itself"),
    "draft_model_config": ((), "vLLM sets it itself"),
    "draft_parallel_config": ((), "vLLM sets it itself"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Options of speculative decoding. After creation, every option of the method has a value.

    A draft is a proposed token, which a step checks. Drafts never change an answer, only its speed.
    Raises RequestError that names the field as `speculative_config.FIELD`.
    """

    method: str = ""
    """Source of the drafts. ngram: an earlier occurrence of the last tokens in the prompt or the answer. suffix: a
    suffix tree of the prompt and of earlier answers. draft_model: a small model. eagle3: an EAGLE-3 head. mtp: the
    model's own layer for multi-token prediction. custom: a Python function. Default: from `model` or `function`."""

    num_speculative_tokens: int | None = None
    """Maximum number of drafts for a request in one step, from 1 to 16. A step has fewer where more would not save
    time. Default: ngram 5, suffix 8, draft_model 4, eagle3 3, mtp 1, custom 5."""

    model: str | None = None
    """Folder or hub id of the draft model, or of the EAGLE-3 head."""

    prompt_lookup_min: int | None = None
    """ngram: length of the shortest match, in tokens. Default: 2, or less if prompt_lookup_max is less."""

    prompt_lookup_max: int | None = None
    """ngram: length of the longest match, in tokens. Default: 5, or more if prompt_lookup_min is more."""

    suffix_decoding_max_tree_depth: int | None = None
    """suffix: depth of the suffix trees, in tokens: the length of a match and its drafts together. Default: 24."""

    suffix_decoding_max_cached_requests: int | None = None
    """suffix: number of earlier answers in the tree. 0: only the request's own tokens. Default: 10000."""

    suffix_decoding_max_spec_factor: float | None = None
    """suffix: most drafts per token of the match. Default: 1.0."""

    suffix_decoding_min_token_prob: float | None = None
    """suffix: least probability of a draft by the tree's counts, from 0 to 1. Default: 0.1."""

    draft_tensor_parallel_size: int | None = None
    """Devices of the draft model: 1, or tensor_parallel_size. Default: tensor_parallel_size."""

    max_model_len: int | None = None
    """Length of a request in tokens, from which on the draft model drafts no more. Default: the draft model's limit."""

    quantization: str | None = None
    """Quantisation of the draft model's weights, with the values of the engine's option. Default: as stored."""

    function: DraftFunction | None = dataclasses.field(default=None, repr=False)  # a repr differs between processes
    """custom: function (token ids of prompt and answer, most drafts) -> drafts. On the command line: module:function.
    It is called for each running request before each step, so it must be quick."""

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Create from a mapping of vLLM's keys; return an instance unchanged. None stands for a default.

        Raises RequestError for an unknown key, a key that jpaged lacks, or a bad value. Imports the module of
        `function`.
        """
        if isinstance(fields, cls):
            return fields
        if not isinstance(fields, Mapping):
            raise RequestError(NAME, fields, "must be a SpeculationConfig, or its fields as a dict")
        known = cls.__dataclass_fields__
        for key, value in fields.items():
            if key not in known and key not in NOT_YET:
                raise unknown_field(NAME, key, value, known)
            if key in NOT_YET:
                _check_neutral(key, value)
        return cls(**{key: value for key, value in fields.items() if key in known and value is not None})

    def __post_init__(self) -> None:
        self._set("function", _function(self.function))
        self._set("method", self._method())
        if self.model in (self.method, f"[{self.method}]"):  # vLLM's other way to write {"method": "ngram"}
            self._set("model", None)
        for name, methods in METHODS_OF.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                known = f"is for method {' or '.join(methods)}, and method is {self.method}: leave it out"
                raise RequestError(f"{NAME}.{name}", value, known)
        if self.method in SEPARATE_MODELS and self.model is None:
            raise RequestError(f"{NAME}.model", None, f"needs the checkpoint of method {self.method}")
        if self.method == "custom" and self.function is None:
            raise RequestError(f"{NAME}.function", None, "needs a function: method custom calls it")
        for name in ("model", "quantization"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise RequestError(f"{NAME}.{name}", getattr(self, name), "must be a string")
        self._set_default("num_speculative_tokens", DEFAULT_DRAFTS[self.method], 1, MAX_DRAFTS)
        for name in ("draft_tensor_parallel_size", "max_model_len"):
            self._set_default(name, None, 1, MAX_INTEGER)
        if self.method == "ngram":
            self._set_lookup()
        if self.method == "suffix":
            self._set_suffix()

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts for a request in one step: num_speculative_tokens."""
        assert self.num_speculative_tokens is not None, "__post_init__ has set it"
        return self.num_speculative_tokens

    @property
    def has_model(self) -> bool:
        """True for a method that drafts on the device, with weights."""
        return self.method in MODEL_METHODS

    def _method(self) -> str:
        """The method by jpaged's name. Without a method, it follows from `model` or `function`, as in vLLM."""
        given: Any = self.method or None
        if given is None and self.function is not None:
            return "custom"
        if given is None and isinstance(self.model, str) and self.model:
            name = self.model.strip("[]")
            if name in ("ngram", "suffix"):
                return name
            if "eagle-" in name.lower():
                given = "eagle"
            else:
                return "eagle3" if "eagle3" in name.lower() else "draft_model"
        method = METHOD_ALIASES.get(given, given) if isinstance(given, str) else given
        if isinstance(method, str) and method in OTHER_METHODS:
            raise RequestError(f"{NAME}.method", given, f"not supported yet: {OTHER_METHODS[method]}")
        if not isinstance(method, str) or method not in DEFAULT_DRAFTS:
            raise RequestError(f"{NAME}.method", given, f"must be one of {', '.join(DEFAULT_DRAFTS)}")
        return method

    def _set_lookup(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            self._set_default(name, None, 1, MAX_INTEGER)
        least, most = LOOKUP_DEFAULTS
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            low = least if high is None else min(least, high)
        if high is None:
            high = max(most, low)
        if low > high:
            raise RequestError(f"{NAME}.prompt_lookup_min", low, f"must be at most prompt_lookup_max={high}")
        self._set("prompt_lookup_min", low)
        self._set("prompt_lookup_max", high)

    def _set_suffix(self) -> None:
        defaults = SUFFIX_DEFAULTS
        for name, low in (("suffix_decoding_max_tree_depth", 1), ("suffix_decoding_max_cached_requests", 0)):
            self._set_default(name, defaults[name], low, MAX_INTEGER)
        for name, high in (("suffix_decoding_max_spec_factor", 1e9), ("suffix_decoding_min_token_prob", 1.0)):
            value = defaults[name] if getattr(self, name) is None else getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= high:
                accepted = f"must be a number from 0 to {high:g}"
                raise RequestError(f"{NAME}.{name}", value, accepted)
            self._set(name, float(value))

    def _set_default(self, name: str, default: int | float | None, low: int, high: int) -> None:
        """Set an integer option to its default if it has no value. Raises RequestError for a value out of range."""
        value = default if getattr(self, name) is None else getattr(self, name)
        if value is not None and not (type(value) is int and low <= value <= high):
            accepted = f"must be an integer from {low}" + (f" to {high}" if high < MAX_INTEGER else "")
            raise RequestError(f"{NAME}.{name}", value, accepted)
        self._set(name, value)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _check_neutral(key: str, value: object) -> None:
    """Raise RequestError for a key that jpaged lacks, unless its value asks for nothing."""
    neutral, why = NOT_YET[key]
    if value is None or any(type(value) is type(each) and value == each for each in neutral):
        return
    others = " or ".join(repr(each) for each in neutral)
    raise RequestError(f"{NAME}.{key}", value, f"{why}: leave it out" + (f", or {others}" if others else ""))


def _function(given: Any) -> DraftFunction | None:
    """Return a function that is given as itself or as "module:function". Raises RequestError."""
    name = f"{NAME}.function"
    if given is None:
        return None
    if callable(given):
        return given
    accepted = "must be a function, or 'module:function'"
    if not isinstance(given, str) or given.count(":") != 1 or not all(given.split(":")):
        raise RequestError(name, given, accepted)
    module, _, attribute = given.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's, and may raise anything
        raise RequestError(name, given, f"cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise RequestError(name, given, accepted)
    return found
