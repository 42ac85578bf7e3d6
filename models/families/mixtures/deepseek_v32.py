"""DeepSeek V3.2, and GLM-5: a DeepSeek-V3 whose indexer chooses the tokens that a query attends to."""

import dataclasses
import re

from jpaged.errors import ModelLoadError
from jpaged.models.families import deepseek, llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Indexer

_INDEXER = "model.layers.{layer}.self_attn.indexer."

RULES = (
    *deepseek.RULES,
    TensorRule(_INDEXER + "wq_b.weight", "index_q", (Part.HEADS,)),
    TensorRule(_INDEXER + "wk.weight", "index_k"),
    TensorRule(_INDEXER + "weights_proj.weight", "index_weights"),
    TensorRule(_INDEXER + "k_norm.weight", "index_norm"),
    TensorRule(_INDEXER + "k_norm.bias", "index_norm_bias"),
)
# GLM-5's checkpoints have an extra layer 78, which predicts a second token. Transformers ignores it too.
_GLM_IGNORED = re.compile(llama.IGNORED.pattern + r"|model\.layers\.78\..*")


def _sparse_spec(config: CheckpointConfig, *, interleaved: bool, layers: tuple[bool, ...] = ()) -> DecoderSpec:
    """interleaved: rope of the indexer. layers: `Indexer.layers`."""
    config.refuse_layers_but("indexed_attention")
    config.refuse("rope_interleave", True)
    config.refuse("indexer_rope_interleave", interleaved)
    base = deepseek.latent_spec(config)
    assert base.latent is not None
    if base.latent.q_rank is None or base.rope is None:
        raise ModelLoadError("config.json: q_lora_rank=null: an indexer needs compressed queries")
    indexer = Indexer(
        config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk"), interleaved,
        layers,
    )  # fmt: skip
    if indexer.head_dim < base.latent.rope_dim:
        raise ModelLoadError(
            f"config.json: index_head_dim={indexer.head_dim} must be at least qk_rope_head_dim={base.latent.rope_dim}"
        )
    latent = dataclasses.replace(base.latent, indexer=indexer)
    experts = deepseek.sigmoid_experts(config, base.num_layers, num=256, per_token=8)
    sparse = config.sparse_layers(base.num_layers, dense=config.integer("first_k_dense_replace", minimum=0))
    return dataclasses.replace(
        base, latent=latent, head_dim=latent.width, experts=dataclasses.replace(experts, layers=sparse)
    )


def _deepseek_v32(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        n_shared_experts=1, moe_intermediate_size=2048, n_group=8, topk_group=4, first_k_dense_replace=3,
        routed_scaling_factor=2.5, q_lora_rank=1536, max_position_embeddings=163_840, index_n_heads=64,
        index_head_dim=128, index_topk=2048,
    )  # fmt: skip
    config.refuse("index_topk_freq", 1)
    return _sparse_spec(config, interleaved=False)


def _glm_moe_dsa(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, routed_scaling_factor=2.5,
        q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, max_position_embeddings=202_752, rms_norm_eps=1e-5,
        index_n_heads=32, index_head_dim=128, index_topk=2048,
    )  # fmt: skip
    return _sparse_spec(config, interleaved=True, layers=_indexer_layers(config))


def _indexer_layers(config: CheckpointConfig) -> tuple[bool, ...]:
    """Layers with an indexer of their own: a list, a pattern of F and S, or every n-th layer. (): all."""
    count = config.integer("num_hidden_layers")
    pattern = config.get("indexer_types", "index_topk_pattern")
    if pattern is None:
        every, first = config.integer("index_topk_freq", default=1), config.integer("index_skip_topk_offset", default=2)
        pattern = ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(count)]
    letters = {"F": "full", "S": "shared"}
    kinds = [letters.get(str(kind), str(kind)) for kind in pattern] if isinstance(pattern, str | list) else []
    if len(kinds) != count or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise ModelLoadError(
            f"config.json: indexer_types={pattern!r} must be a list of {count} names, full or shared, and full first"
        )
    return () if set(kinds) == {"full"} else tuple(kind == "full" for kind in kinds)


DEEPSEEK_V32 = Family(
    "deepseek_v32", ("DeepseekV32ForCausalLM", "DeepseekV32Model"), _deepseek_v32, RULES, llama.PREFIX,
    deepseek.IGNORED, has_classifier=False,
)  # fmt: skip
GLM_MOE_DSA = Family(
    "glm_moe_dsa", ("GlmMoeDsaForCausalLM", "GlmMoeDsaModel"), _glm_moe_dsa, RULES, llama.PREFIX, _GLM_IGNORED,
    has_classifier=False,
)  # fmt: skip
