"""DeepSeek V4: attention to a window and to compressed entries, hyper-connections, and experts chosen by token id."""

import dataclasses
import re
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.compressed_spec import Compressed, Entries, HyperConnections
from jpaged.models.families import llama
from jpaged.models.families.base import Family, Part, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import HASHED, DecoderSpec, Experts, Rope, Scoring

_LAYER = "model.layers.{layer}."
_ATTENTION, _FFN = _LAYER + "attn.", _LAYER + "ffn."
_ENTRY, _INDEX = _ATTENTION + "compressor.", _ATTENTION + "indexer."
_HC = [f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")]

# Names of the release, which Transformers saves too, with a prefix and some exceptions
RULES = (
    TensorRule("model.embed_tokens.weight", "embed", aliases=("model.embed.weight",)),
    TensorRule(_LAYER + "attn_norm.weight", "attn_norm"),
    TensorRule(_ATTENTION + "wq_a.weight", "q_a"),
    TensorRule(_ATTENTION + "q_norm.weight", "query_norm"),
    TensorRule(_ATTENTION + "wq_b.weight", "q_b", (Part.HEADS,)),
    TensorRule(_ATTENTION + "wkv.weight", "kv"),
    TensorRule(_ATTENTION + "kv_norm.weight", "kv_norm", aliases=(_ATTENTION + "norm.weight",)),
    TensorRule(_ATTENTION + "wo_a.weight", "o_a", (Part.HEADS,)),
    TensorRule(_ATTENTION + "wo_b.weight", "o"),
    TensorRule(_ATTENTION + "attn_sink", "sinks"),
    *(
        TensorRule(f"{at}{name}", f"{leaf}_{end}")
        for at, leaf in ((_ENTRY, "entry"), (_INDEX + "compressor.", "index"))
        for name, end in (("wkv.weight", "kv"), ("wgate.weight", "gate"), ("ape", "bias"), ("norm.weight", "norm"))
    ),
    TensorRule(_INDEX + "wq_b.weight", "index_q", (Part.HEADS,)),
    TensorRule(_INDEX + "weights_proj.weight", "index_weights"),
    TensorRule(_LAYER + "ffn_norm.weight", "mlp_norm"),
    TensorRule(_FFN + "gate.weight", "router"),
    TensorRule(_FFN + "gate.bias", "router_correction"),
    TensorRule(_FFN + "gate.tid2eid", HASHED),
    TensorRule(_FFN + "experts.{expert}.w1.weight", "expert_gate_up", (Part.GATE,)),
    TensorRule(_FFN + "experts.{expert}.w3.weight", "expert_gate_up", (Part.UP,)),
    TensorRule(_FFN + "experts.{expert}.w2.weight", "expert_down"),
    TensorRule(_FFN + "shared_experts.w1.weight", "shared_gate_up", (Part.GATE,)),
    TensorRule(_FFN + "shared_experts.w3.weight", "shared_gate_up", (Part.UP,)),
    TensorRule(_FFN + "shared_experts.w2.weight", "shared_down"),
    *(TensorRule(_LAYER + name, name) for name in _HC),
    *(
        TensorRule(f"model.hc_head.hc_{part}", f"hc_head_{part}", aliases=(f"model.hc_head_{part}",))
        for part in ("fn", "base", "scale")
    ),
    TensorRule("model.norm.weight", "final_norm"),
    TensorRule("lm_head.weight", "lm_head", aliases=("head.weight",)),
)
IGNORED = re.compile(llama.IGNORED.pattern + r"|(.*\.)?mtp\..*")  # Transformers ignores the MTP layer too
_OF_RATIO = {0: Entries.NONE, 4: Entries.SPARSE, 128: Entries.HEAVY}


def _deepseek_v4(config: CheckpointConfig) -> DecoderSpec:
    # Transformers reads none of the next five, or ignores other values
    for name, only in (("n_shared_experts", 1), ("norm_topk_prob", True), ("num_key_value_heads", 1)):
        config.refuse(name, only)
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        config.refuse(name, False)
    config.refuse("hidden_act", "silu")
    config = config.with_defaults(
        vocab_size=129_280, hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=43, num_attention_heads=64,
        head_dim=512, max_position_embeddings=1_048_576,
    )  # fmt: skip
    size = config.integer("moe_intermediate_size")
    config.refuse("intermediate_size", size)  # Transformers' second name of moe_intermediate_size
    values = {**config.values, "num_key_value_heads": 1, "intermediate_size": size, "layer_types": None}
    main, compress, rope_dim = _ropes(config)
    base = llama.spec(CheckpointConfig({**values, "rope_parameters": None, "rope_scaling": None}), partial_rope=True)
    kinds = _kinds(config, base.num_layers)
    window = config.integer("sliding_window", default=128)
    attention = Compressed(
        layers=(True,) * base.num_layers, entries=kinds, ratios=_ratios(config), heads=base.num_heads,
        head_dim=base.head_dim, rope_dim=rope_dim, window=window, q_rank=config.integer("q_lora_rank", default=1024),
        out_groups=config.integer("o_groups", default=8), out_rank=config.integer("o_lora_rank", default=1024),
        index_heads=config.integer("index_n_heads", default=64),
        index_dim=config.integer("index_head_dim", default=128), top_k=config.integer("index_topk", default=512),
    )  # fmt: skip
    if base.num_heads % attention.out_groups or not rope_dim <= attention.index_dim <= base.head_dim:
        raise ModelLoadError(
            f"config.json: o_groups={attention.out_groups} must divide num_attention_heads={base.num_heads}, and "
            f"index_head_dim={attention.index_dim} must be from {rope_dim}, the rotated dimensions, to head_dim"
        )
    return dataclasses.replace(
        base,
        recurrence=attention,
        attention_layers=(True,) * base.num_layers,
        sliding_window=tuple(window if kind is Entries.NONE else None for kind in kinds),
        rope=compress,
        window_rope=main,
        sinks=True,
        swiglu_limit=config.positive("swiglu_limit", 10.0),
        swiglu_alpha=None,
        experts=_experts(config, base.num_layers, size),
        hyper=HyperConnections(
            config.integer("hc_mult", default=4), config.integer("hc_sinkhorn_iters", default=20),
            config.number("hc_eps", default=1e-6),
        ),
    )


def _experts(config: CheckpointConfig, layers: int, size: int) -> Experts:
    scoring = config.get("scoring_func", default="sqrtsoftplus")
    if scoring not in ("sqrtsoftplus", "sigmoid"):
        raise ModelLoadError(f"config.json: scoring_func={scoring!r} is not supported: sqrtsoftplus or sigmoid")
    num, per_token = config.experts("n_routed_experts", "num_local_experts", num=256, per_token=6)
    hashed = config.integer("num_hash_layers", default=3, minimum=0)
    kinds = config.get("mlp_layer_types", default=["hash_moe" if i < hashed else "moe" for i in range(layers)])
    _check_kinds("mlp_layer_types", kinds, layers, ("hash_moe", "moe"))
    return Experts(
        num, per_token, size, (True,) * layers, scoring=Scoring(scoring), renormalise=True, correction=True,
        scale=config.positive("routed_scaling_factor", 1.5), shared_size=size,
        hashed=tuple(kind == "hash_moe" for kind in kinds[:layers]),
    )  # fmt: skip


def _kinds(config: CheckpointConfig, layers: int) -> tuple[Entries, ...]:
    """Entries of each layer, from `layer_types`, or from the release's `compress_ratios`."""
    kinds = config.get("layer_types")
    if kinds is None and (ratios := config.get("compress_ratios")) is not None:
        if not isinstance(ratios, list) or set(ratios) - set(_OF_RATIO):
            raise ModelLoadError(f"config.json: compress_ratios={ratios!r} must be a list of 0, 4 and 128")
        kinds = [_OF_RATIO[ratio].value for ratio in ratios]
    if kinds is None:
        heavy, sparse = Entries.HEAVY.value, Entries.SPARSE.value
        kinds = [heavy if i < 2 or i % 2 == 0 else sparse for i in range(layers)]
    _check_kinds("layer_types", kinds, layers, tuple(kind.value for kind in Entries))
    return tuple(Entries(kind) for kind in kinds[:layers])


def _check_kinds(name: str, kinds: Any, layers: int, accepted: tuple[str, ...]) -> None:
    """Raise ModelLoadError unless `kinds` has a known name for each layer. A release adds those of its MTP layers."""
    if not isinstance(kinds, list) or len(kinds) < layers or set(kinds) - set(accepted):
        raise ModelLoadError(
            f"config.json: {name}={kinds!r} must be a list of at least {layers} names, of {', '.join(accepted)}"
        )


def _ratios(config: CheckpointConfig) -> tuple[int, int]:
    """Tokens of an entry: SPARSE, HEAVY."""
    rates = CheckpointConfig(config.get("compress_rates", default={}))
    sparse = rates.integer(Entries.SPARSE.value, default=4)
    heavy = rates.integer(Entries.HEAVY.value, default=128)
    return config.integer("compress_rate_csa", default=sparse), config.integer("compress_rate_hca", default=heavy)


def _ropes(config: CheckpointConfig) -> tuple[Rope, Rope, int]:
    """Rope of layers without entries, of layers with entries, and the number of dimensions that both rotate."""
    head_dim = config.integer("head_dim")
    share = config.get("partial_rotary_factor")
    if share is None:
        share = config.integer("qk_rope_head_dim") / head_dim if config.get("qk_rope_head_dim") else 64 / 512
    given = config.get("rope_parameters", "rope_scaling", default={})
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, compress = given["main"], given["compress"]
    else:
        main = {"rope_theta": config.positive("rope_theta", 10_000.0)}
        compress = {**given, "rope_theta": config.positive("compress_rope_theta", 160_000.0)}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    plain = {name: value for name, value in config.values.items() if not name.startswith("rope_")}
    ropes = [
        dataclasses.replace(
            CheckpointConfig({**plain, "partial_rotary_factor": None, "rope_parameters": of_kind}).rope(partial=True),
            partial=share,
        )
        for of_kind in ({"rope_type": "default", **main}, {"rope_type": "default", **compress})
    ]
    for rope in ropes:
        llama.check_rope(rope, head_dim)
        if rope.scaling not in ("default", "linear", "yarn", "llama3"):
            raise ModelLoadError(f"config.json: rope_type={rope.scaling!r} is not supported with compressed attention")
    return ropes[0], ropes[1], int(head_dim * share)


DEEPSEEK_V4 = Family(
    "deepseek_v4", ("DeepseekV4ForCausalLM", "DeepseekV4Model"), _deepseek_v4, RULES, llama.PREFIX, IGNORED,
    has_classifier=False,
)  # fmt: skip
