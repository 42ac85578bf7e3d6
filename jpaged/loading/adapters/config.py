"""Reads adapter_config.json of PEFT 0.21. Options that change the answers, but are not supported, are refused."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.errors import MAX_INTEGER, ModelLoadError, shown
from jpaged.loading.adapters.patterns import ModulePatterns
from jpaged.loading.checkpoint import read_json

CONFIG = "adapter_config.json"
_MERGE = "merge the adapter into its base model with PEFT (merge_and_unload) and serve that"
_PLAIN = "train with plain LoRA"
# Options of other methods, and what to do instead. Each is accepted if it is null, false or empty.
_UNSUPPORTED = {
    "use_dora": f"DoRA is not supported: {_PLAIN}, or {_MERGE}",
    "modules_to_save": f"weights that are trained in full are not supported: use target_modules for them, or {_MERGE}",
    "lora_bias": f"a bias of lora_B is not supported: train with lora_bias=False, or {_MERGE}",
    "trainable_token_indices": f"trained token embeddings are not supported: add embed_tokens to target_modules, or "
                               f"{_MERGE}",
    "use_qalora": f"QA-LoRA is not supported: {_PLAIN}",
    "use_bdlora": f"block-diagonal LoRA is not supported: {_PLAIN}, or {_MERGE}",
    "arrow_config": f"Arrow routes tokens between adapters, which is not supported: {_PLAIN}",
    "kasa_config": f"KaSA changes the base model's weights: {_PLAIN}, or {_MERGE}",
    "monteclora_config": f"MonteCLoRA is not supported: {_PLAIN}, or {_MERGE}",
    "layer_replication": f"repeated layers are not supported: {_MERGE}",
    "alora_invocation_tokens": f"activated LoRA (aLoRA) is not supported: {_PLAIN}",
    "megatron_config": f"Megatron's parallel layers are not supported: {_PLAIN}",
}  # fmt: skip
# Initialisations that subtract the first B A from the base model's weights. The others leave them alone
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Options without an effect on a trained adapter's answers, or that the reader uses
_KNOWN = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size",
    "target_parameters", "ensure_weight_tying", "runtime_config",
})  # fmt: skip


_NO_PATTERNS = ModulePatterns({}, "")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The options of an adapter that its reader uses."""

    label: str                    # where they come from; for error messages
    alpha: float
    use_rslora: bool = False
    rank: int | None = None       # None: not stated, as for live arrays
    ranks: ModulePatterns = _NO_PATTERNS
    alphas: ModulePatterns = _NO_PATTERNS
    target_modules: tuple[str, ...] | None = None  # ends of module paths; None: a regular expression, or not stated
    has_exclusions: bool = False
    layers: frozenset[int] | None = None           # layers_to_transform
    ties_head: bool = False       # the embedding's A and B are also those of the lm_head, transposed

    def rank_of(self, path: str) -> int | None:
        """Rank of a module; None if it is not stated."""
        return self.ranks.find(path, self.rank)

    def scale(self, path: str, rank: int) -> float:
        """Factor of B (A x) for a module. rsLoRA (arXiv:2312.03732) divides by the root of the rank."""
        return self.alphas.find(path, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises ModelLoadError with the key, its value and what to change."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder: an adapter is a folder that PEFT's save_pretrained wrote")
    path = folder / CONFIG
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: an adapter is a folder that PEFT's save_pretrained wrote")
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], label: str) -> AdapterConfig:
    """Check the values of adapter_config.json. label: where they come from."""
    config = _Values(values, label)
    if config.get("peft_type") != "LORA":
        config.refuse("peft_type", "only LORA is supported")
    for key, reason in _UNSUPPORTED.items():
        if config.get(key):
            config.refuse(key, reason)
    if config.get("bias", "none") != "none":
        config.refuse("bias", f"trained biases are not supported: train with bias='none', or {_MERGE}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        config.refuse(
            "init_lora_weights", "such training changes the base model's weights: convert the adapter with PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )  # fmt: skip
    unknown = sorted(key for key, value in values.items() if value and key not in _KNOWN | _UNSUPPORTED.keys())
    if unknown:
        config.refuse(unknown[0], "unknown option: delete it if it does not change the adapter's answers")
    layers = config.get("layers_to_transform")
    return AdapterConfig(
        label=label,
        alpha=config.number("lora_alpha", config.get("lora_alpha")),
        use_rslora=config.flag("use_rslora"),
        rank=config.rank("r", config.get("r")),
        ranks=config.patterns("rank_pattern", config.rank),
        alphas=config.patterns("alpha_pattern", config.number),
        target_modules=config.names("target_modules"),
        has_exclusions=bool(config.get("exclude_modules")),
        layers=None if layers is None else config.layers("layers_to_transform", layers),
        ties_head=config.flag("ensure_weight_tying"),
    )


class _Values:
    """Values of adapter_config.json with checks of their types."""

    def __init__(self, values: Mapping[str, Any], label: str):
        self._values, self._label = values, label

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def refuse(self, key: str, reason: str) -> None:
        raise self._error(key, self.get(key), reason)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, value, "must be true or false")
        return value

    def rank(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_INTEGER:
            raise self._error(key, value, "must be an integer of at least 1")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_INTEGER:
            raise self._error(key, value, "must be a finite number")
        return float(value)

    def patterns(self, key: str, check: Any) -> ModulePatterns:
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self._error(key, value, "must map ends of module paths to numbers")
        return ModulePatterns({k: check(f"{key}[{shown(k)}]", v) for k, v in value.items()}, f"{self._label}: {key}")

    def names(self, key: str) -> tuple[str, ...] | None:
        """A list of names; None for a regular expression, or if the key is missing."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(key, value, "must be a list of names, or a regular expression")
        return tuple(value)

    def layers(self, key: str, value: Any) -> frozenset[int]:
        numbers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int and layer >= 0 for layer in numbers):
            raise self._error(key, value, "must be a layer number or a list of them")
        return frozenset(numbers)

    def _error(self, key: str, value: Any, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._label}: {key}={shown(value)}: {reason}")
