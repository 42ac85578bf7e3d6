"""Reads a Hugging Face config.json: typed look-ups with errors that name the key, and old and new rope keys."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.rope import SCALINGS
from jpaged.models.spec import Activation, Rope

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}

# Quantised checkpoints that jpaged/loading/packed_checkpoint.py reads. mxfp4 is for gpt-oss only.
QUANT_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "modelopt")
CLASSIFIER = "ForSequenceClassification"  # suffix of the architectures of sequence classifiers

_LARGEST = 2**31 - 1  # positions and ids are int32
# Maximum numbers of layers and of experts. Each one costs time before any weight is read.
_MOST = dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000)
_MOST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 10_000)

# Known keys of a rope dictionary, and those of each scaling. `finetuned` has no effect.
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "finetuned", "partial_rotary_factor"}
_SCALING_KEYS = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


class CheckpointConfig:
    """A parsed config.json. Look-ups treat null as absent, and raise ModelLoadError for bad values."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of these keys that is not null, or the default."""
        return next((self.values[n] for n in names if self.values.get(n) is not None), default)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer from `minimum`, required if there is no default. The names are aliases."""
        value = self.get(*names, default=default)
        if value is None:
            raise ModelLoadError(f"config.json: {names[0]} is missing: the checkpoint's config is incomplete")
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        if type(value) is int and value > _MOST.get(name, value):
            raise ModelLoadError(f"config.json: {name}={value} is more than {_MOST[name]:,}: the config is damaged")
        return _integer(f"config.json: {names[0]}", value, minimum)

    def with_defaults(self, **defaults: Any) -> "CheckpointConfig":
        """The config with defaults for absent keys. Keys that are present keep their values, also null."""
        return CheckpointConfig({**defaults, **self.values})

    def number(self, *names: str, default: float) -> float:
        return _number("config.json: " + names[0], self.get(*names, default=default))

    def positive(self, name: str, default: float) -> float:
        return _positive("config.json: " + name, self.get(name, default=default))

    def optional_positive(self, name: str) -> float | None:
        """A finite number above 0; None if the key is absent or null."""
        return None if self.get(name) is None else _positive("config.json: " + name, self.get(name))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {name}={value!r} must be true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        """Activation function of the feed-forward network, by its name in Transformers."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: {name}={value!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[value]

    def without_rope_keys(self, *names: str) -> tuple["CheckpointConfig", dict[str, Any]]:
        """The config without these keys of its rope dictionaries, and their values. For options that no rope has."""
        found: dict[str, Any] = {}
        changed = dict(self.values)
        for place in ("rope_scaling", "rope_parameters"):
            values = self._rope_dict(place)
            found |= {name: values.pop(name) for name in names if name in values}
            if self.get(place) is not None:
                changed[place] = values
        return CheckpointConfig(changed), found

    def sparse_layers(self, layers: int, *, dense: int) -> tuple[bool, ...]:
        """Per layer: True if `mlp_layer_types` says that it has experts. dense: number of first layers without them."""
        kinds = self.get("mlp_layer_types", default=["dense"] * min(dense, layers) + ["sparse"] * (layers - dense))
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise ModelLoadError(
                f"config.json: mlp_layer_types={kinds!r} must be a list of {layers} names, each dense or sparse"
            )
        return tuple(kind == "sparse" for kind in kinds)

    def layer_types(self) -> list[str]:
        """Kind of attention of every layer, by its name in Transformers; [] if the config has none."""
        types = self.get("layer_types", default=[])
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ModelLoadError(f"config.json: layer_types={types!r} must be a list of names, one per layer")
        return types

    def refuse_layers_but(self, kind: str) -> None:
        """Raise ModelLoadError if `layer_types` lists another kind of attention."""
        if set(self.layer_types()) - {kind}:
            self.refuse("layer_types")

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise ModelLoadError if this option is neither null nor a harmless value."""
        value = self.get(name)
        if value is not None and value not in harmless:
            usual = f" (only {', '.join(map(repr, harmless))})" if harmless else ""
            raise ModelLoadError(
                f"config.json: {name}={value!r} is not supported by jpaged{usual}: use another checkpoint"
            )

    def refuse_common(self) -> None:
        """Raise ModelLoadError for options that no family supports."""
        for name in ("quantization_config", "compression_config"):
            if (value := self.get(name)) is not None:
                method = value.get("quant_method") if isinstance(value, Mapping) else value
                if name == "quantization_config" and method in QUANT_METHODS:
                    continue  # checked when the checkpoint is read
                raise ModelLoadError(
                    f"config.json: {name} of quant_method={method!r} is not supported by jpaged: use a checkpoint in "
                    f"bfloat16, float16 or float32, or one of {', '.join(QUANT_METHODS)} (gpt-oss: in mxfp4 as well)"
                )
        self.refuse("attention_chunk_size")
        self.refuse("is_encoder_decoder", False)
        self.refuse("add_cross_attention", False)

    def num_labels(self) -> int | None:
        """Number of labels of a sequence classifier, by default 2 as in Transformers; None for other models."""
        architectures = self.get("architectures", default=[])
        if not any(name.endswith(CLASSIFIER) for name in architectures):
            return None
        if self.get("classifier_from_token") is not None:
            return 1
        names = self.get("id2label")
        if names is None:
            return self.integer("num_labels", default=2)
        if not isinstance(names, Mapping) or not names:
            raise ModelLoadError(f"config.json: id2label={names!r} must be an object with one entry per label")
        return len(names)

    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of KV heads."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        return heads, kv_heads

    def experts(self, *names: str, num: int, per_token: int) -> tuple[int, int]:
        """(experts per layer, experts per token). names: aliases of the first key. num, per_token: defaults."""
        num = self.integer(*names, default=num)
        per_token = self.integer("num_experts_per_tok", "experts_per_token", default=per_token)
        if per_token > num:
            raise ModelLoadError(f"config.json: num_experts_per_tok={per_token} is more than {names[0]}={num}")
        return num, per_token

    def without_mxfp4(self) -> "CheckpointConfig":
        """The config without an mxfp4 quantization_config, because loading unpacks mxfp4."""
        quantization = self.get("quantization_config", default={})
        if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
            return self
        return CheckpointConfig({**self.values, "quantization_config": None})

    def rope(self, *, partial: bool = False, theta: float = 10000.0, share: float = 1.0) -> Rope:
        """Rotary embedding, from `rope_parameters` (new) or from `rope_theta` and `rope_scaling` (old).

        partial: accept `partial_rotary_factor`. theta, share: defaults of the base and of the rotated share of a head.
        """
        rope = self._rope(theta)
        sources = (self._rope_dict("rope_scaling"), self._rope_dict("rope_parameters"), self.values)
        shares = [values.get("partial_rotary_factor") for values in sources]
        given = [_positive("config.json: partial_rotary_factor", share) for share in shares if share is not None]
        if len(set(given)) > 1 or any(share > 1 for share in given):
            raise ModelLoadError(f"config.json: partial_rotary_factor={given} must be one number, at most 1")
        rotated = given[0] if given else share
        if rotated != 1 and not partial:
            raise ModelLoadError(f"config.json: partial_rotary_factor={rotated!r} is not supported (only 1)")
        return dataclasses.replace(rope, partial=rotated)

    def of_layers(self, kind: str) -> "CheckpointConfig":
        """The config with the rope of one kind of layers; the config itself if rope_parameters is not per kind."""
        ropes = self.get("rope_parameters", default={})
        if not isinstance(ropes, Mapping) or not any(isinstance(value, Mapping) for value in ropes.values()):
            return self
        if not isinstance(ropes.get(kind), Mapping):
            raise ModelLoadError(f"config.json: rope_parameters has no entry for {kind}")
        return CheckpointConfig({**self.values, "rope_parameters": ropes[kind]})

    def _rope(self, default_theta: float) -> Rope:
        """The rope for whole heads, with its scaling."""
        old, new = self._rope_dict("rope_scaling"), self._rope_dict("rope_parameters")
        values = old or new
        given = (d.get("rope_theta") for d in (old, new, self.values))
        thetas = [_positive("config.json: rope_theta", theta) for theta in given if theta is not None]
        if len(set(thetas)) > 1:
            raise ModelLoadError(
                f"config.json: rope_theta is given more than once, with the values {thetas}: keep one"
            )
        theta = thetas[0] if thetas else default_theta

        kind = values.get("rope_type") or values.get("type") or "default"
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise ModelLoadError(
                f"config.json: rope scaling {kind!r} is not supported by jpaged; supported: {', '.join(SCALINGS)}"
            )
        unknown = sorted(k for k in values.keys() - _ROPE_KEYS - _SCALING_KEYS[kind] if values[k] is not None)
        if unknown:
            raise ModelLoadError(
                f"config.json: {unknown[0]}={values[unknown[0]]!r} is not an option of {kind} rope scaling"
            )
        return Rope(theta=theta) if kind == "default" else self._scaled_rope(kind, values, theta)

    def _scaled_rope(self, kind: str, values: Mapping[str, Any], theta: float) -> Rope:
        """A rope with this kind of scaling. values: the rope dictionary."""

        def number(name: str, default: float | None = None) -> float:
            value = values.get(name)
            if value is None and default is None:
                raise ModelLoadError(f"config.json: {name} is missing: {kind} rope scaling needs it")
            return _positive(f"config.json: {name}", default if value is None else value)

        def optional(name: str) -> float | None:
            return None if values.get(name) is None else _number(f"config.json: {name}", values[name])

        def rotations(name: str, default: float) -> float:
            value = number(name, default)
            if not 1e-6 <= value <= 1e6:
                raise ModelLoadError(f"config.json: {name}={value!r} must be a number of rotations from 1e-6 to 1e6")
            return value

        max_position = self.integer("max_position_embeddings")
        # Dynamic scaling uses max_position_embeddings, also if the config has the trained length.
        trained = self.get("original_max_position_embeddings", default=values.get("original_max_position_embeddings"))
        original = max_position
        if kind != "dynamic" and trained is not None:
            original = _integer("config.json: original_max_position_embeddings", trained)
        if kind == "linear":
            return Rope(theta=theta, scaling=kind, factor=number("factor"))
        if kind == "dynamic":
            return Rope(theta=theta, scaling=kind, factor=number("factor"), original_max_position=original)
        if kind == "llama3":
            return Rope(
                theta=theta, scaling=kind, factor=number("factor"), original_max_position=original,
                low_freq_factor=number("low_freq_factor"), high_freq_factor=number("high_freq_factor"),
            )  # fmt: skip
        if kind == "longrope":
            if original < 2:
                raise ModelLoadError(f"config.json: original_max_position_embeddings={original} must be at least 2")
            return Rope(
                theta=theta, scaling=kind, factor=number("factor", max_position / original),
                original_max_position=original, attention_factor=optional("attention_factor"),
                short_factor=_factors("short_factor", values.get("short_factor")),
                long_factor=_factors("long_factor", values.get("long_factor")),
            )  # fmt: skip
        if theta <= 1:
            raise ModelLoadError(f"config.json: rope_theta={theta!r} must be above 1 for yarn rope scaling")
        return Rope(
            theta=theta, scaling=kind, factor=number("factor", max_position / original), original_max_position=original,
            beta_fast=rotations("beta_fast", 32.0), beta_slow=rotations("beta_slow", 1.0),
            attention_factor=optional("attention_factor"), mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"), truncate=values.get("truncate") is not False,
        )  # fmt: skip

    def _rope_dict(self, name: str) -> dict[str, Any]:
        """A rope dictionary. If it has a rope per kind of layers, all must be equal."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"config.json: {name}={value!r} must be an object")
        nested = [v for v in value.values() if isinstance(v, Mapping)]
        if not nested:
            return dict(value)
        if len(nested) < len(value) or any(v != nested[0] for v in nested):
            raise ModelLoadError(
                f"config.json: {name} differs between kinds of layers: jpaged does not support that for this model"
            )
        return dict(nested[0])

    def max_position(self, rope: Rope) -> int:
        """Longest sequence that the model supports, in tokens. Linear, dynamic and yarn scaling extend it."""
        given = self.integer("max_position_embeddings")
        if rope.scaling in ("linear", "dynamic"):
            return int(min(given * rope.factor, _LARGEST))
        if rope.scaling == "yarn":
            return max(given, int(min(rope.original_max_position * rope.factor, _LARGEST)))
        return given

    def window(self) -> int | None:
        return None if self.get("sliding_window") is None else self.integer("sliding_window")

    def window_everywhere(self, layers: int) -> tuple[int | None, ...]:
        """sliding_window for every layer; () if there is none. Raises ModelLoadError if `layer_types` disagrees."""
        window = self.window()
        self.refuse_layers_but("full_attention" if window is None else "sliding_attention")
        return () if window is None else (window,) * layers

    def layer_windows(self, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
        """Sliding window of every layer; () if no layer has one. `layer_types` takes precedence over `sliding`."""
        if self.get("layer_types") is not None:
            types = self.layer_types()
            if len(types) != len(sliding):
                raise ModelLoadError(
                    f"config.json: layer_types has {len(types)} entries, it must have one for each of "
                    f"{len(sliding)} layers"
                )
            for kind in types:
                if kind not in ("full_attention", "sliding_attention"):
                    raise ModelLoadError(
                        f"config.json: layer_types has {kind!r}, which jpaged does not support "
                        "(only full_attention and sliding_attention)"
                    )
            sliding = [kind == "sliding_attention" for kind in types]
        windows = [window if slides else None for slides in sliding]
        if window is None and any(sliding):
            raise ModelLoadError("config.json: layer_types has sliding_attention, but sliding_window is not set")
        return tuple(windows) if any(w is not None for w in windows) else ()


def head_share(hidden: int, heads: int) -> int:
    """Width of a head: the hidden size, divided among the heads."""
    if hidden % heads:
        raise ModelLoadError(f"config.json: hidden size {hidden} is not a multiple of the number of heads, {heads}")
    return hidden // heads


def _integer(name: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST:
        raise ModelLoadError(f"{name}={value!r} must be a whole number from {minimum} to {_LARGEST:,}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ModelLoadError(f"{name}={value!r} must be a finite number")
    return float(value)


def _factors(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise ModelLoadError(f"config.json: {name}={values!r} must be a list of numbers")
    return tuple(_positive(f"config.json: {name}", value) for value in values)


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ModelLoadError(f"{name}={value!r} must be above 0")
    return number
