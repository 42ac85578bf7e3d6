"""Gemma 3 (text): Gemma 2 with normalised queries and keys instead of soft caps, and another rope in window layers.

And what Gemma 3n and Gemma 4 share: kinds of attention, KV of an earlier layer, and per-layer embeddings.
"""

import dataclasses
import re

from jpaged.errors import ModelLoadError
from jpaged.models.families import gemma, llama
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, NormPosition, QKNorm

_LAYER = "model.layers.{layer}."
FULL, SLIDING = "full_attention", "sliding_attention"
RULES_OF_LATER = (
    *gemma.GEMMA2_RULES,
    TensorRule(_LAYER + "self_attn.q_proj.weight", "q"),
    TensorRule("model.embed_tokens_per_layer.weight", "layer_embed"),
    TensorRule("model.per_layer_model_projection.weight", "layer_embed_in"),
    TensorRule("model.per_layer_projection_norm.weight", "layer_embed_norm"),
    TensorRule(_LAYER + "per_layer_input_gate.weight", "layer_in"),
    TensorRule(_LAYER + "per_layer_projection.weight", "layer_out"),
    TensorRule(_LAYER + "post_per_layer_input_norm.weight", "layer_out_norm"),
)
# Published checkpoints have keys and values of layers that read those of an earlier one
IGNORED_OF_LATER = re.compile(llama.IGNORED.pattern + r"|.*self_attn\.[kv]_(proj|norm)\.weight")


def _gemma3(config: CheckpointConfig) -> DecoderSpec:
    local = gemma.window_rope(config)
    config.refuse("attn_logit_softcapping")  # Transformers reads it, but does not apply it
    activation = config.get("hidden_activation", default="gelu_pytorch_tanh")
    defaults = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 4}
    config = CheckpointConfig({**config.of_layers("full_attention").values, "hidden_act": activation})
    base = gemma.spec(config.with_defaults(**defaults), theta=1e6)
    pattern = config.integer("sliding_window_pattern", default=6)
    sliding = [(layer + 1) % pattern != 0 for layer in range(base.num_layers)]
    return dataclasses.replace(
        base,
        max_position=config.integer("max_position_embeddings", default=131072),  # already includes the rope's scaling
        norm_position=NormPosition.SANDWICH,
        qk_norm=QKNorm.HEAD,
        window_rope=local,
        attention_scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        final_softcap=config.optional_positive("final_logit_softcapping"),
        sliding_window=config.layer_windows(config.with_defaults(**defaults).window(), sliding),
    )


GEMMA3 = Family(
    "gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"), _gemma3, gemma.GEMMA2_RULES, llama.PREFIX, llama.IGNORED
)


def layer_kinds(config: CheckpointConfig, layers: int, pattern: int) -> list[str]:
    """Kind of attention of every layer. pattern: by default, one layer in `pattern` has full attention."""
    kinds = config.layer_types() or [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        config.refuse("layer_types")
    return kinds


def sources(config: CheckpointConfig, kinds: list[str], *, shared: int) -> list[int | None]:
    """Layer that each of the last `shared` layers reads: the last one of its kind before them. None: itself."""
    first = len(kinds) - shared
    if not set(kinds[first:]) <= set(kinds[: max(first, 0)]):
        raise ModelLoadError(
            f"config.json: num_kv_shared_layers={shared}: no layer before the last {shared} is of their kind"
        )
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]
