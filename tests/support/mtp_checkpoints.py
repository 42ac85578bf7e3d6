"""Tiny checkpoints with an MTP layer, under the names that the real releases use."""

import dataclasses
from pathlib import Path

import numpy as np

from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import change_config, tensors_of


@dataclasses.dataclass(frozen=True)
class Published:
    """Names of an MTP layer's tensors in the releases of a family."""

    variant: str             # of tests/golden/checkpoints.py
    # (prefix of a layer of the model, prefix of the MTP layer's tensors that have the same shapes)
    layers: tuple[tuple[str, str], ...]
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str                # after the layer; the model's own norm in Ernie 4.5
    reads_normed: bool = True  # the next pass reads the output after `norm`
    count: str | None = "num_nextn_predict_layers"  # key of config.json with the number of layers; None: no key


def _deepseek(variant: str, source: int, layer: int, norm: str = "shared_head.norm", **more: bool) -> Published:
    at = f"model.layers.{layer}."
    return Published(
        variant, ((f"model.layers.{source}.", at),), f"{at}enorm.weight", f"{at}hnorm.weight", f"{at}eh_proj.weight",
        f"{at}{norm}.weight", **more,
    )  # fmt: skip


def _qwen(variant: str, source: int, count: str | None = "mtp_num_hidden_layers") -> Published:
    return Published(
        variant, ((f"model.layers.{source}.", "mtp.layers.0."),), "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight", count=count,
    )  # fmt: skip


def _nemotron(variant: str, attention: int, experts: int) -> Published:
    return Published(
        variant,
        ((f"backbone.layers.{attention}.", "mtp.layers.0."), (f"backbone.layers.{experts}.", "mtp.layers.1.")),
        "mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.0.eh_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
    )  # fmt: skip


PUBLISHED = {
    "Qwen3-Next": _qwen("qwen3-next", 2, None),
    "Qwen3.5": _qwen("qwen3.5", 2),
    "Qwen3.5 MoE": _qwen("qwen3.5-moe", 2),
    "GLM-4.5": _deepseek("glm4-moe", 1, 2, reads_normed=False),
    "GLM-4.7 Flash": _deepseek("glm4-moe-lite", 1, 2, reads_normed=False),
    "GLM-5": _deepseek("glm-moe-dsa", 1, 2, reads_normed=False),
    "GLM-5.2": _deepseek("glm-moe-dsa-shared", 2, 4, reads_normed=False),
    "MiniMax M2": _deepseek("minimax-m2", 1, 2, reads_normed=False),
    "Hunyuan 3": _deepseek("hunyuan3", 2, 3, "final_layernorm"),
    "Ernie 4.5": Published(
        "ernie-moe", (("model.layers.0.", "model.mtp_block.0."),), "model.mtp_emb_norm.0.weight",
        "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight", "model.norm.weight",
    ),
    "Nemotron 3": _nemotron("nemotron-h-moe", 3, 4),
    "Nemotron 3 Super": _nemotron("nemotron-h-latent", 2, 4),
}  # fmt: skip


def write_with_mtp(name: str, folder: Path, seed: int = 0, likely: int | None = None) -> dict[str, np.ndarray]:
    """Write a checkpoint with an MTP layer of random numbers. Returns all its tensors.

    likely: number of ids that the model and the MTP layer nearly always choose, so that drafts are accepted.
    """
    published = PUBLISHED[name]
    variant = BY_NAME[published.variant]
    write_checkpoint(variant, seed, folder)
    tensors, hidden = tensors_of(folder), variant.config["hidden_size"]
    rng = np.random.default_rng(seed)
    offset = 1 if variant.config["model_type"].startswith("qwen3") else 0  # their norms add one to the weights
    for source, at in published.layers:
        of_layer = {key.removeprefix(source): value for key, value in tensors.items() if key.startswith(source)}
        # the numbers of a layer of the model in another order
        tensors |= {at + key: rng.permuted(value.ravel()).reshape(value.shape) for key, value in of_layer.items()}
    norms = {published.embedding_norm, published.hidden_norm, published.norm} - tensors.keys()
    tensors |= {key: rng.uniform(0.5, 1.5, hidden) - offset for key in sorted(norms)}
    tensors[published.fc] = rng.uniform(-1, 1, (hidden, 2 * hidden)) * np.sqrt(1.5 / hidden)
    if likely is not None:
        head = next(key for key in ("lm_head.weight", "model.embed_tokens.weight") if key in tensors)
        tensors[head][3 + likely :] *= 0.1
    tensors = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    if published.count is not None:
        change_config(folder, **{published.count: 1})
    return tensors
