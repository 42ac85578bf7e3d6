"""Reading a Hugging Face config.json: typed look-ups whose errors name the key, and the rope keys in both spellings."""

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
}

CLASSIFIER = "ForSequenceClassification"  # how the architectures of sequence classifiers end

_LARGEST = 2**31 - 1  # positions and ids are int32

# Keys of a rope dictionary that each scaling reads; `finetuned` says how a model was made and changes nothing.
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
    """A config.json as read. Look-ups take a key that is null for one that is absent."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that is there."""
        return next((self.values[n] for n in names if self.values.get(n) is not None), default)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number; required unless there is a default. The names are aliases."""
        value = self.get(*names, default=default)
        if value is None:
            raise ModelLoadError(f"config.json: {names[0]} is missing: the checkpoint's config is incomplete")
        return _integer(f"config.json: {names[0]}", value, minimum)

    def with_defaults(self, **defaults: Any) -> "CheckpointConfig":
        """The same config with values for keys that are absent; a key that is there keeps its value, null too."""
        return CheckpointConfig({**defaults, **self.values})

    def number(self, *names: str, default: float) -> float:
        """A finite number."""
        return _number("config.json: " + names[0], self.get(*names, default=default))

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0."""
        return _positive("config.json: " + name, self.get(name, default=default))

    def optional_positive(self, name: str) -> float | None:
        """A finite number above 0, None where the key is absent or null."""
        return None if self.get(name) is None else _positive("config.json: " + name, self.get(name))

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {name}={value!r} must be true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        """The feed-forward layer's non-linearity, by Transformers' name."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: {name}={value!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[value]

    def layer_types(self) -> list[str]:
        """The attention of every layer, by Transformers' names; [] where the config does not say."""
        types = self.get("layer_types", default=[])
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ModelLoadError(f"config.json: layer_types={types!r} must be a list of names, one a layer")
        return types

    def refuse_layers_but(self, kind: str) -> None:
        """Refuse a checkpoint that names any other attention than this for a layer."""
        if set(self.layer_types()) - {kind}:
            self.refuse("layer_types")

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse a checkpoint that sets this option to anything but null or a harmless value."""
        value = self.get(name)
        if value is not None and value not in harmless:
            usual = f" (only {', '.join(map(repr, harmless))})" if harmless else ""
            raise ModelLoadError(
                f"config.json: {name}={value!r} is not supported by jpaged{usual}: use another checkpoint"
            )

    def refuse_common(self) -> None:
        """Refuse what no family here can honour."""
        for name in ("quantization_config", "compression_config"):
            if (value := self.get(name)) is not None:
                method = value.get("quant_method") if isinstance(value, Mapping) else value
                raise ModelLoadError(
                    f"config.json: {name} of quant_method={method!r} is not supported by jpaged: use a checkpoint in "
                    "bfloat16, float16 or float32 (gpt-oss: in mxfp4 as well)"
                )
        self.refuse("attention_chunk_size")
        self.refuse("is_encoder_decoder", False)
        self.refuse("add_cross_attention", False)

    def num_labels(self) -> int | None:
        """Labels of a sequence classifier, 2 where the config does not say (as Transformers); None: it is none."""
        architectures = self.get("architectures", default=[])
        if not any(name.endswith(CLASSIFIER) for name in architectures):
            return None
        names = self.get("id2label")
        if names is None:
            return self.integer("num_labels", default=2)
        if not isinstance(names, Mapping) or not names:
            raise ModelLoadError(f"config.json: id2label={names!r} must be an object with one entry a label")
        return len(names)

    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        return heads, kv_heads

    def experts(self, *names: str, num: int, per_token: int) -> tuple[int, int]:
        """How many experts a layer has, under one of these keys, and how many of them a token uses; with defaults."""
        num = self.integer(*names, default=num)
        per_token = self.integer("num_experts_per_tok", "experts_per_token", default=per_token)
        if per_token > num:
            raise ModelLoadError(f"config.json: num_experts_per_tok={per_token} of {names[0]}={num} experts")
        return num, per_token

    def without_mxfp4(self) -> "CheckpointConfig":
        """The config without quantization_config where that says mxfp4, which is undone when weights are loaded."""
        quantization = self.get("quantization_config", default={})
        if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
            return self
        return CheckpointConfig({**self.values, "quantization_config": None})

    def rope(self, *, partial: bool = False, theta: float = 10000.0, share: float = 1.0) -> Rope:
        """Rotary embedding, from `rope_parameters` (new) or from `rope_theta` and `rope_scaling` (old).

        partial: whether the family can turn a part of each head only (partial_rotary_factor). theta, share: base and
        part where the config has none.
        """
        rope = self._rope(theta)
        places = (self._rope_dict("rope_scaling"), self._rope_dict("rope_parameters"), self.values)
        shares = [values.get("partial_rotary_factor") for values in places]
        given = [_positive("config.json: partial_rotary_factor", share) for share in shares if share is not None]
        if len(set(given)) > 1 or any(share > 1 for share in given):
            raise ModelLoadError(f"config.json: partial_rotary_factor={given} must be one number of at most 1")
        turned = given[0] if given else share
        if turned != 1 and not partial:
            raise ModelLoadError(f"config.json: partial_rotary_factor={turned!r} is not supported (only 1)")
        return dataclasses.replace(rope, partial=turned)

    def of_layers(self, kind: str) -> "CheckpointConfig":
        """The config with the rope of one kind of layers, where rope_parameters has one a kind."""
        ropes = self.get("rope_parameters", default={})
        if not isinstance(ropes, Mapping) or not any(isinstance(value, Mapping) for value in ropes.values()):
            return self
        if not isinstance(ropes.get(kind), Mapping):
            raise ModelLoadError(f"config.json: rope_parameters has nothing for {kind}")
        return CheckpointConfig({**self.values, "rope_parameters": ropes[kind]})

    def _rope(self, default_theta: float) -> Rope:
        old, new = self._rope_dict("rope_scaling"), self._rope_dict("rope_parameters")
        values = old or new
        given = (d.get("rope_theta") for d in (old, new, self.values))
        thetas = [_positive("config.json: rope_theta", theta) for theta in given if theta is not None]
        if len(set(thetas)) > 1:
            raise ModelLoadError(
                f"config.json: rope_theta is given with different values, {thetas}: keep the right one"
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
                f"config.json: {unknown[0]}={values[unknown[0]]!r} has no meaning for {kind} rope scaling"
            )
        if kind == "default":
            return Rope(theta=theta)

        def number(name: str, default: float | None = None) -> float:
            value = values.get(name)
            if value is None and default is None:
                raise ModelLoadError(f"config.json: {name} is missing, {kind} rope scaling needs it")
            return _positive(f"config.json: {name}", default if value is None else value)

        max_position = self.integer("max_position_embeddings")
        # Dynamic scaling goes by max_position_embeddings even where the trained length is given as well.
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

        def optional(name: str) -> float | None:
            return None if values.get(name) is None else _number(f"config.json: {name}", values[name])

        def turns(name: str, default: float) -> float:
            value = number(name, default)
            if not 1e-6 <= value <= 1e6:
                raise ModelLoadError(f"config.json: {name}={value!r} must be a number of turns from 1e-6 to 1e6")
            return value

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
            beta_fast=turns("beta_fast", 32.0), beta_slow=turns("beta_slow", 1.0),
            attention_factor=optional("attention_factor"), mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"), truncate=values.get("truncate") is not False,
        )  # fmt: skip

    def _rope_dict(self, name: str) -> dict[str, Any]:
        """A rope dictionary; one that is nested by layer type counts as flat if all types say the same."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"config.json: {name}={value!r} must be an object")
        nested = [v for v in value.values() if isinstance(v, Mapping)]
        if not nested:
            return dict(value)
        if len(nested) < len(value) or any(v != nested[0] for v in nested):
            raise ModelLoadError(f"config.json: {name} differs from layer to layer, which is not supported by jpaged")
        return dict(nested[0])

    def max_position(self, rope: Rope) -> int:
        """The longest sequence: scaling that stretches positions stretches the length the model takes."""
        given = self.integer("max_position_embeddings")
        if rope.scaling in ("linear", "dynamic"):
            return int(min(given * rope.factor, _LARGEST))
        if rope.scaling == "yarn":
            return max(given, int(min(rope.original_max_position * rope.factor, _LARGEST)))
        return given

    def window(self) -> int | None:
        """sliding_window, None where the key is absent or null."""
        return None if self.get("sliding_window") is None else self.integer("sliding_window")

    def window_everywhere(self, layers: int) -> tuple[int | None, ...]:
        """sliding_window on every layer, () without one. Refuses a checkpoint that names other attention."""
        window = self.window()
        self.refuse_layers_but("full_attention" if window is None else "sliding_attention")
        return () if window is None else (window,) * layers

    def layer_windows(self, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
        """Sliding window of every layer, `layer_types` overriding `sliding`; () where no layer has a window."""
        if self.get("layer_types") is not None:
            types = self.layer_types()
            if len(types) != len(sliding):
                raise ModelLoadError(f"config.json: layer_types must name a type for each of the {len(sliding)} layers")
            for kind in types:
                if kind not in ("full_attention", "sliding_attention"):
                    raise ModelLoadError(
                        f"config.json: layer_types has {kind!r}, which is not supported by jpaged "
                        "(only full_attention and sliding_attention)"
                    )
            sliding = [kind == "sliding_attention" for kind in types]
        windows = [window if slides else None for slides in sliding]
        if window is None and any(sliding):
            raise ModelLoadError("config.json: layer_types has sliding_attention, but sliding_window is not set")
        return tuple(windows) if any(w is not None for w in windows) else ()


def head_share(hidden: int, heads: int) -> int:
    """Width of a head where the heads share the hidden size."""
    if hidden % heads:
        raise ModelLoadError(f"config.json: hidden size {hidden} is no multiple of the number of heads, {heads}")
    return hidden // heads


def _integer(name: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST:
        raise ModelLoadError(f"{name}={value!r} must be a whole number of at least {minimum}, at most {_LARGEST:,}")
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
