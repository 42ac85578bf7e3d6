"""Names and shapes of the tensors in a checkpoint, as Transformers saves them."""

import math
from typing import Any

from tests.golden import compressed_shapes, kimi_shapes, mamba_shapes

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    architecture, labels = config["architectures"][0], config.get("id2label", {0: "no", 1: "yes"})
    if config["model_type"] in ENCODERS:
        return _encoder_shapes(config, len(labels) if architecture.endswith("ForSequenceClassification") else None)
    shapes = _causal_shapes(config)
    if architecture.endswith("ForSequenceClassification"):
        shapes.pop("lm_head.weight", None)
        width = config.get("word_embed_proj_dim") or config.get("n_embd") or config["hidden_size"]
        shapes["score.weight"] = (len(labels), width)
    if architecture == "Qwen3Model":
        shapes.pop("lm_head.weight", None)
        shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    return shapes


def _causal_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if config["model_type"] == "deepseek_v4":
        return compressed_shapes.deepseek_v4(config)
    if config["model_type"].startswith(("deepseek", "mistral4", "glm4_moe_lite", "glm_moe_dsa")):
        return _deepseek_shapes(config)
    if config["model_type"] == "gemma3n_text":
        return _gemma3n_shapes(config)
    if config["model_type"].startswith("gemma4"):
        return _gemma4_shapes(config)
    families = {
        "gpt2": _gpt2_shapes, "opt": _opt_shapes, "gpt_neox": _gpt_neox_shapes, "falcon": _falcon_shapes,
        "bloom": _bloom_shapes, "lfm2": _lfm2_shapes, "lfm2_moe": _lfm2_shapes,
        "nemotron_h": mamba_shapes.nemotron_h, "falcon_h1": mamba_shapes.falcon_h1,
        "kimi_linear": kimi_shapes.kimi_linear,
    }  # fmt: skip
    return families.get(config["model_type"], _llama_shapes)(config)


def _llama_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inter, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    dim = c.get("head_dim") or hidden // heads
    q, kv = heads * dim, c["num_key_value_heads"] * dim
    kind = c["model_type"]
    if kind == "llama4_text":
        inter = c["intermediate_size_mlp"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        q = c.get("num_attention_heads_per_layer", [heads] * (i + 1))[i] * dim
        linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        if kind == "phi3":
            linears = {"qkv_proj": (q + 2 * kv, hidden), "o_proj": (hidden, q)}
        if "linear_num_key_heads" in c:
            linears["q_proj"] = (2 * q, hidden)
            if c["layer_types"][i] == "linear_attention":
                shapes |= _delta_shapes(c, at)
                linears = {}
        if "mamba_n_heads" in c and (mixer := mamba_shapes.granite_mixer(c, i)) is not None:
            shapes |= mixer
            linears = {}
        no_o_bias = kind in ("qwen2", "seed_oss", "glm4", "glm4_moe")
        for name, shape in linears.items():
            shapes[f"{at}self_attn.{name}.weight"] = shape
            if kind == "qwen2_moe" and name != "o_proj" and c.get("qkv_bias", True):
                shapes[f"{at}self_attn.{name}.bias"] = shape[:1]
            has_bias = c.get("attention_bias") or c.get("use_bias") or kind == "qwen2"
            if has_bias and not (no_o_bias and name == "o_proj"):
                shapes[f"{at}self_attn.{name}.bias"] = shape[:1]
        if kind == "gpt_oss":
            shapes[f"{at}self_attn.sinks"] = (heads,)
        if kind == "laguna":
            shapes[f"{at}self_attn.g_proj.weight"] = (q // dim if c["gating"] is True else q, hidden)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "hy_v3", "laguna", "apertus") or (
            (kind == "glm4_moe" and c.get("use_qk_norm")) or ("linear_num_key_heads" in c and linears)
        ):
            shapes |= {f"{at}self_attn.q_norm.weight": (dim,), f"{at}self_attn.k_norm.weight": (dim,)}
        if kind == "hunyuan_v1_dense":
            shapes |= {f"{at}self_attn.{name}_layernorm.weight": (dim,) for name in ("query", "key")}
        if kind in ("olmo2", "olmo3", "olmoe", "minimax_m2"):
            shapes |= {f"{at}self_attn.q_norm.weight": (q,), f"{at}self_attn.k_norm.weight": (kv,)}
        linears = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        if kind in ("phi3", "glm4"):
            linears = {"gate_up_proj": (2 * inter, hidden), "down_proj": (hidden, inter)}
        if kind == "starcoder2":
            linears = {"c_fc": (inter, hidden), "c_proj": (hidden, inter)}
        if kind in ("apertus", "arcee"):
            linears = {"up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        if kind == "apertus":
            shapes |= {f"{at}mlp.act_fn.{name}": (1,) for name in ("alpha_p", "alpha_n")}
            shapes |= {f"{at}mlp.act_fn.{name}": () for name in ("beta", "eps")}
        if (sparse := _expert_shapes(c, i, at)) is not None:
            shapes |= sparse
            linears = {}
        for name, shape in linears.items():
            part = "feed_forward" if kind == "llama4_text" else "mlp"
            shapes[f"{at}{part}.{name}.weight"] = shape
            if c.get("mlp_bias") or c.get("use_bias"):
                shapes[f"{at}mlp.{name}.bias"] = shape[:1]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind.startswith("cohere"):
            norms = norms[:1]
        if kind == "glm4":
            norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
        if kind in ("olmo2", "olmo3", "exaone4"):
            norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
        if kind == "apertus":
            norms = ["attention_layernorm", "feedforward_layernorm"]
        if kind in ("gemma2", "gemma3_text"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        parts = ("weight", "bias") if kind in ("starcoder2", "phimoe") else ("weight",)
        shapes |= {f"{at}{name}.{part}": (hidden,) for name in norms for part in parts}
    shapes |= {f"model.norm.{part}": (hidden,) for part in parts}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    if c.get("lm_head_bias"):
        shapes["lm_head.bias"] = (c["vocab_size"],)
    return shapes


def _gemma4_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    size, kinds = c.get("hidden_size_per_layer_input", 0), c["layer_types"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if size:
        shapes |= {
            "model.embed_tokens_per_layer.weight": (c["vocab_size_per_layer_input"], layers * size),
            "model.per_layer_model_projection.weight": (layers * size, hidden),
            "model.per_layer_projection_norm.weight": (size,),
        }
    for i, kind in enumerate(kinds):
        at, is_full, shares = f"model.layers.{i}.", kind == "full_attention", i >= layers - c["num_kv_shared_layers"]
        dim = c["global_head_dim"] if is_full else c["head_dim"]
        kv = c["num_global_key_value_heads"] if is_full and c["attention_k_eq_v"] else c["num_key_value_heads"]
        inter = c["intermediate_size"] if isinstance(c["intermediate_size"], int) else c["intermediate_size"][i]
        inter *= 2 if shares and c["use_double_wide_mlp"] else 1
        projections = {"q_proj": heads * dim}
        if not shares:
            projections |= {"k_proj": kv * dim} | ({} if is_full and c["attention_k_eq_v"] else {"v_proj": kv * dim})
            shapes[f"{at}self_attn.k_norm.weight"] = (dim,)
        shapes |= {f"{at}self_attn.{name}.weight": (rows, hidden) for name, rows in projections.items()}
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, heads * dim), f"{at}self_attn.q_norm.weight": (dim,)}
        shapes |= {f"{at}mlp.{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inter), f"{at}layer_scalar": (1,)}
        norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"]
        norms += ["post_feedforward_layernorm"]
        if size:
            shapes |= {f"{at}per_layer_input_gate.weight": (size, hidden)}
            shapes |= {f"{at}per_layer_projection.weight": (hidden, size)}
            norms.append("post_per_layer_input_norm")
        if c.get("enable_moe_block"):
            experts, width = c["num_experts"], c["moe_intermediate_size"]
            shapes |= {f"{at}router.proj.weight": (experts, hidden), f"{at}router.scale": (hidden,)}
            shapes |= {f"{at}router.per_expert_scale": (experts,)}
            shapes |= {f"{at}experts.gate_up_proj": (experts, 2 * width, hidden)}
            shapes |= {f"{at}experts.down_proj": (experts, hidden, width)}
            norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
        shapes |= {f"{at}{name}.weight": (hidden,) for name in norms}
    return shapes if c["tie_word_embeddings"] else shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _gemma3n_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Those of a Gemma 4 with heads of one size, and those of AltUp and LAuReL."""
    hidden, rank, streams = c["hidden_size"], c["laurel_rank"], c["altup_num_inputs"]
    alike = {"global_head_dim": c["head_dim"], "attention_k_eq_v": False, "use_double_wide_mlp": False}
    shapes = {name: shape for name, shape in _gemma4_shapes(c | alike).items() if "layer_scalar" not in name}
    for i, inter in enumerate(c["intermediate_size"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}mlp.{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inter), f"{at}altup.correct_output_scale": (hidden,)}
        shapes |= {f"{at}altup.correction_coefs.weight": (streams, streams)}
        shapes |= {f"{at}altup.prediction_coefs.weight": (streams**2, streams)}
        shapes |= {f"{at}altup.modality_router.weight": (streams, hidden), f"{at}altup.router_norm.weight": (hidden,)}
        shapes |= {f"{at}laurel.linear_left.weight": (rank, hidden), f"{at}laurel.linear_right.weight": (hidden, rank)}
        shapes |= {f"{at}laurel.post_laurel_norm.weight": (hidden,)}
    sides = ("altup_projections", "altup_unembed_projections")
    return shapes | {f"model.{side}.{i}.weight": (hidden, hidden) for side in sides for i in range(streams - 1)}


def _delta_shapes(c: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated DeltaNet of Qwen3-Next or Qwen3.5."""
    hidden, at = c["hidden_size"], f"{at}linear_attn."
    v_heads, dim = c["linear_num_value_heads"], c["linear_key_head_dim"]
    keys, values = 2 * c["linear_num_key_heads"] * dim, v_heads * dim
    rows = {"in_proj_qkv": keys + values, "in_proj_z": values, "in_proj_b": v_heads, "in_proj_a": v_heads}
    if c["model_type"] == "qwen3_next":
        rows = {"in_proj_qkvz": keys + 2 * values, "in_proj_ba": 2 * v_heads}
    return {f"{at}{name}.weight": (size, hidden) for name, size in rows.items()} | {
        f"{at}conv1d.weight": (keys + values, 1, c["linear_conv_kernel_dim"]),
        f"{at}A_log": (v_heads,),
        f"{at}dt_bias": (v_heads,),
        f"{at}norm.weight": (dim,),
        f"{at}out_proj.weight": (hidden, values),
    }


def _lfm2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, layers, dim = c["hidden_size"], c["num_hidden_layers"], c["hidden_size"] // c["num_attention_heads"]
    kv, inter, bias = c["num_key_value_heads"] * dim, c["intermediate_size"], c.get("conv_bias", False)
    if "block_ff_dim" in c:
        inter = math.ceil(int(c["block_ffn_dim_multiplier"] * (c["block_ff_dim"] * 2 // 3)) / c["block_multiple_of"])
        inter *= c["block_multiple_of"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        if i in c["full_attn_idxs"] if "full_attn_idxs" in c else c["layer_types"][i] == "full_attention":
            rows = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "out_proj": hidden}
            shapes |= {f"{at}self_attn.{name}.weight": (size, hidden) for name, size in rows.items()}
            shapes |= {f"{at}self_attn.{name}_layernorm.weight": (dim,) for name in "qk"}
        else:
            shapes |= _linear(f"{at}conv.in_proj", 3 * hidden, hidden, bias=bias)
            shapes[f"{at}conv.conv.weight"] = (hidden, 1, c.get("conv_L_cache", 3))
            shapes |= {f"{at}conv.conv.bias": (hidden,)} if bias else {}
            shapes |= _linear(f"{at}conv.out_proj", hidden, hidden, bias=bias)
        shapes |= {f"{at}{name}_norm.weight": (hidden,) for name in ("operator", "ffn")}
        at, num, width = f"{at}feed_forward.", c.get("num_experts", 0), inter
        if num and i >= c["num_dense_layers"]:
            width = c["moe_intermediate_size"]
            shapes[f"{at}gate.weight"] = (num, hidden)
            shapes |= {f"{at}expert_bias": (num,)} if c.get("use_expert_bias", True) else {}
        else:
            num = 0
        for part in [f"{at}experts.{e}." for e in range(num)] or [at]:
            shapes |= {f"{part}{name}.weight": (width, hidden) for name in ("w1", "w3")}
            shapes[f"{part}w2.weight"] = (hidden, width)
    shapes["model.embedding_norm.weight"] = (hidden,)
    tied = c.get("tie_embedding", c.get("tie_word_embeddings", True))
    return shapes if tied else shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _gpt2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = c["n_embd"]
    inter = c.get("n_inner") or 4 * hidden
    shapes = {"transformer.wte.weight": (c["vocab_size"], hidden), "transformer.wpe.weight": (c["n_positions"], hidden)}
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}."
        for name, (rows, columns) in {
            "attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inter), "mlp.c_proj": (inter, hidden),
        }.items():  # fmt: skip
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (columns,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}{name}.weight": (hidden,), f"{at}{name}.bias": (hidden,)}
    return shapes | {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}


def _opt_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inter, embed = c["hidden_size"], c["ffn_dim"], c["word_embed_proj_dim"]
    bias, affine = c.get("enable_bias", True), c.get("layer_norm_elementwise_affine", True)
    at = "model.decoder."
    shapes = {f"{at}embed_tokens.weight": (c["vocab_size"], embed)}
    shapes[f"{at}embed_positions.weight"] = (c["max_position_embeddings"] + 2, hidden)
    if embed != hidden:
        shapes |= {f"{at}project_in.weight": (hidden, embed), f"{at}project_out.weight": (embed, hidden)}
    norms = [f"{at}final_layer_norm"] if c["do_layer_norm_before"] else []
    for i in range(c["num_hidden_layers"]):
        layer = f"{at}layers.{i}."
        linears = {f"self_attn.{n}_proj": (hidden, hidden) for n in ("q", "k", "v", "out")}
        for name, shape in (linears | {"fc1": (inter, hidden), "fc2": (hidden, inter)}).items():
            shapes[f"{layer}{name}.weight"] = shape
            if bias:
                shapes[f"{layer}{name}.bias"] = shape[:1]
        norms += [f"{layer}self_attn_layer_norm", f"{layer}final_layer_norm"]
    if affine:
        shapes |= {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], embed)
    return shapes


def _gpt_neox_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inter = c["hidden_size"], c["intermediate_size"]
    shapes = {"gpt_neox.embed_in.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"gpt_neox.layers.{i}."
        bias = c.get("attention_bias", True)
        shapes |= _linear(f"{at}attention.query_key_value", 3 * hidden, hidden, bias=bias)
        shapes |= _linear(f"{at}attention.dense", hidden, hidden, bias=bias)
        shapes |= _plain_feed_forward(at, hidden, inter, bias=True)
        shapes |= _layer_norms(hidden, f"{at}input_layernorm", f"{at}post_attention_layernorm")
    shapes |= _layer_norms(hidden, "gpt_neox.final_layer_norm")
    return shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _falcon_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, new, bias = c["hidden_size"], c["num_attention_heads"], c["new_decoder_architecture"], c["bias"]
    inter = c.get("ffn_hidden_size") or 4 * hidden
    kv_heads = c["num_kv_heads"] if new else 1 if c["multi_query"] else heads
    norms = ["input_layernorm"]
    if not c["parallel_attn"]:
        norms += ["post_attention_layernorm"]
    elif new and c.get("num_ln_in_parallel_attn", 2) == 2:
        norms = ["ln_attn", "ln_mlp"]
    shapes = {"transformer.word_embeddings.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"transformer.h.{i}."
        fused = (heads + 2 * kv_heads) * (hidden // heads)
        shapes |= _linear(f"{at}self_attention.query_key_value", fused, hidden, bias=bias)
        shapes |= _linear(f"{at}self_attention.dense", hidden, hidden, bias=bias)
        shapes |= _plain_feed_forward(at, hidden, inter, bias=bias)
        shapes |= _layer_norms(hidden, *(at + norm for norm in norms))
    shapes |= _layer_norms(hidden, "transformer.ln_f")
    return shapes if c.get("tie_word_embeddings", True) else shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _bloom_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = c["hidden_size"]
    shapes = {"transformer.word_embeddings.weight": (c["vocab_size"], hidden)}
    shapes |= _layer_norms(hidden, "transformer.word_embeddings_layernorm", "transformer.ln_f")
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}."
        shapes |= _linear(f"{at}self_attention.query_key_value", 3 * hidden, hidden, bias=True)
        shapes |= _linear(f"{at}self_attention.dense", hidden, hidden, bias=True)
        shapes |= _plain_feed_forward(at, hidden, 4 * hidden, bias=True)
        shapes |= _layer_norms(hidden, f"{at}input_layernorm", f"{at}post_attention_layernorm")
    return shapes if c.get("tie_word_embeddings", True) else shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _plain_feed_forward(at: str, hidden: int, inter: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    up = _linear(f"{at}mlp.dense_h_to_4h", inter, hidden, bias=bias)
    return up | _linear(f"{at}mlp.dense_4h_to_h", hidden, inter, bias=bias)


def _layer_norms(hidden: int, *names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (hidden,) for name in names for part in ("weight", "bias")}


def _expert_shapes(c: dict[str, Any], layer: int, at: str) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a layer's experts; None if the layer has none."""
    kind, hidden = c["model_type"], c["hidden_size"]
    if kind == "granitemoehybrid":
        inter, shared, num = c["intermediate_size"], c["shared_intermediate_size"], c["num_local_experts"]
        shapes = {f"{at}shared_mlp.input_linear.weight": (2 * shared, hidden)}
        shapes[f"{at}shared_mlp.output_linear.weight"] = (hidden, shared)
        if num:
            moe = f"{at}block_sparse_moe."
            shapes[f"{moe}router.layer.weight"] = (num, hidden)
            shapes[f"{moe}input_linear.weight"] = (num, 2 * inter, hidden)
            shapes[f"{moe}output_linear.weight"] = (num, hidden, inter)
        return shapes
    if kind == "llama4_text":
        return _llama4_expert_shapes(c, layer, f"{at}feed_forward.")
    if kind == "laguna":
        return _laguna_expert_shapes(c, layer, f"{at}mlp.")
    if kind in ("mixtral", "minimax_m2", "phimoe"):
        inter, moe = c["intermediate_size"], f"{at}block_sparse_moe."
        shapes = {f"{moe}gate.weight": (c["num_local_experts"], hidden)}
        for e in range(c["num_local_experts"]):
            shapes |= {f"{moe}experts.{e}.{name}.weight": (inter, hidden) for name in ("w1", "w3")}
            shapes[f"{moe}experts.{e}.w2.weight"] = (hidden, inter)
        if kind == "minimax_m2":
            shapes[f"{moe}e_score_correction_bias"] = (c["num_local_experts"],)
        return shapes
    if kind == "gpt_oss":
        num, inter, moe = c["num_local_experts"], c["intermediate_size"], f"{at}mlp."
        shapes = {f"{moe}router.weight": (num, hidden), f"{moe}router.bias": (num,)}
        for name, columns, rows in (("gate_up_proj", hidden, 2 * inter), ("down_proj", inter, hidden)):
            shapes[f"{moe}experts.{name}_bias"] = (num, rows)
            if "quantization_config" in c:
                shapes[f"{moe}experts.{name}_blocks"] = (num, rows, columns // 32, 16)
                shapes[f"{moe}experts.{name}_scales"] = (num, rows, columns // 32)
            else:
                shapes[f"{moe}experts.{name}"] = (num, columns, rows)
        return shapes
    if kind == "ernie4_5_moe":
        return _ernie_expert_shapes(c, layer, f"{at}mlp.")
    if kind == "hy_v3":
        return _hunyuan_expert_shapes(c, layer, f"{at}mlp.")
    if kind == "qwen3_5_moe_text":
        num, inter = c["num_experts"], c["moe_intermediate_size"]
        shapes = {f"{at}mlp.gate.weight": (num, hidden), f"{at}mlp.shared_expert_gate.weight": (1, hidden)}
        shapes[f"{at}mlp.experts.gate_up_proj"] = (num, 2 * inter, hidden)
        shapes[f"{at}mlp.experts.down_proj"] = (num, hidden, inter)
        return shapes | _gated_feed_forward(f"{at}mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
    if kind not in ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", *_LIKE_DEEPSEEK):
        return None
    if kind in _LIKE_DEEPSEEK:
        num, dense = c["n_routed_experts"], layer < c["first_k_dense_replace"]
        if "mlp_layer_types" in c:
            dense = c["mlp_layer_types"][layer] == "dense"
    else:
        num = c["num_experts"]
        dense = layer in c.get("mlp_only_layers", []) or (layer + 1) % c.get("decoder_sparse_step", 1) != 0
    if dense:
        return None
    shapes, inter = {f"{at}mlp.gate.weight": (num, hidden)}, c.get("moe_intermediate_size", c["intermediate_size"])
    if kind == "mistral4":
        shapes[f"{at}mlp.experts.gate_up_proj"] = (num, 2 * inter, hidden)
        shapes[f"{at}mlp.experts.down_proj"] = (num, hidden, inter)
        num = 0
    for e in range(num):
        shapes |= _gated_feed_forward(f"{at}mlp.experts.{e}", hidden, inter)
    if kind in ("qwen2_moe", "qwen3_next"):
        shapes |= _gated_feed_forward(f"{at}mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
        shapes[f"{at}mlp.shared_expert_gate.weight"] = (1, hidden)
    if kind in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"):
        shapes[f"{at}mlp.gate.e_score_correction_bias"] = (num,)
    if kind in _LIKE_DEEPSEEK:
        shapes |= _gated_feed_forward(f"{at}mlp.shared_experts", hidden, inter * c["n_shared_experts"])
    return shapes


_LIKE_DEEPSEEK = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "mistral4",
)  # fmt: skip


def _ernie_expert_shapes(c: dict[str, Any], layer: int, at: str) -> dict[str, tuple[int, ...]] | None:
    if not c["moe_layer_start_index"] <= layer <= c["moe_layer_end_index"]:
        return None
    num, hidden, inter = c["moe_num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    shapes = {f"{at}gate.weight": (num, hidden), f"{at}moe_statics.e_score_correction_bias": (1, num)}
    for e in range(num):
        shapes |= _gated_feed_forward(f"{at}experts.{e}", hidden, inter)
    return shapes | _gated_feed_forward(f"{at}shared_experts", hidden, inter * c["moe_num_shared_experts"])


def _llama4_expert_shapes(c: dict[str, Any], layer: int, at: str) -> dict[str, tuple[int, ...]] | None:
    if (layer + 1) % c["interleave_moe_layer_step"]:
        return None
    num, hidden, inter = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    shapes = {f"{at}router.weight": (num, hidden), f"{at}experts.gate_up_proj": (num, hidden, 2 * inter)}
    shapes[f"{at}experts.down_proj"] = (num, inter, hidden)
    return shapes | _gated_feed_forward(f"{at}shared_expert", hidden, inter)


def _laguna_expert_shapes(c: dict[str, Any], layer: int, at: str) -> dict[str, tuple[int, ...]] | None:
    if c["mlp_layer_types"][layer] == "dense":
        return None
    num, hidden, inter = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    shapes = {f"{at}gate.weight": (num, hidden), f"{at}experts.e_score_correction_bias": (num,)}
    for e in range(num):
        shapes |= _gated_feed_forward(f"{at}experts.{e}", hidden, inter)
    return shapes | _gated_feed_forward(f"{at}shared_expert", hidden, c["shared_expert_intermediate_size"])


def _hunyuan_expert_shapes(c: dict[str, Any], layer: int, at: str) -> dict[str, tuple[int, ...]] | None:
    if c["mlp_layer_types"][layer] == "dense":
        return None
    num, hidden, inter = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    shapes = {f"{at}router.gate.weight": (num, hidden), f"{at}expert_bias": (num,)}
    for e in range(num):
        shapes |= _gated_feed_forward(f"{at}experts.{e}", hidden, inter)
    return shapes | _gated_feed_forward(f"{at}shared_mlp", hidden, inter * c["num_shared_experts"])


def _gated_feed_forward(at: str, hidden: int, inter: int) -> dict[str, tuple[int, ...]]:
    up = {f"{at}.{name}.weight": (inter, hidden) for name in ("gate_proj", "up_proj")}
    return up | {f"{at}.down_proj.weight": (hidden, inter)}


def _deepseek_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, q_rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c.get("q_lora_rank")
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    bias = c.get("attention_bias", False)
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        attention = f"{at}self_attn."
        if q_rank is None:
            shapes[f"{attention}q_proj.weight"] = (heads * (nope + rope), hidden)
        else:
            shapes |= _linear(f"{attention}q_a_proj", q_rank, hidden, bias=bias)
            shapes |= {f"{attention}q_a_layernorm.weight": (q_rank,)}
            shapes[f"{attention}q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        shapes |= _linear(f"{attention}kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
        shapes[f"{attention}kv_a_layernorm.weight"] = (rank,)
        shapes[f"{attention}kv_b_proj.weight"] = (heads * (nope + value), rank)
        shapes |= _linear(f"{attention}o_proj", hidden, heads * value, bias=bias)
        if "index_n_heads" in c and c.get("indexer_types", ["full"] * (i + 1))[i] == "full":
            shapes |= _indexer_shapes(c, f"{attention}indexer.")
        sparse = _expert_shapes(c, i, at)
        shapes |= _gated_feed_forward(f"{at}mlp", hidden, c["intermediate_size"]) if sparse is None else sparse
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if c.get("num_nextn_predict_layers"):
        shapes |= _next_token_shapes(c, attention.replace(f".{i}.", f".{NEXT_TOKEN_LAYER}."))
    shapes["model.norm.weight"] = (hidden,)
    return shapes | {"lm_head.weight": (c["vocab_size"], hidden)}


def _indexer_shapes(c: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    heads, dim, hidden = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    return {
        f"{at}wq_b.weight": (heads * dim, c["q_lora_rank"]), f"{at}wk.weight": (dim, hidden),
        f"{at}k_norm.weight": (dim,), f"{at}k_norm.bias": (dim,), f"{at}weights_proj.weight": (heads, hidden),
    }  # fmt: skip


NEXT_TOKEN_LAYER = 61  # DeepSeek-V3's, which predicts a second token


def _next_token_shapes(c: dict[str, Any], attention: str) -> dict[str, tuple[int, ...]]:
    """Some tensors of the layer that predicts a second token, with the names of the release."""
    hidden, vocab, at = c["hidden_size"], c["vocab_size"], f"model.layers.{NEXT_TOKEN_LAYER}."
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    return {f"{at}{norm}.weight": (hidden,) for norm in norms} | {
        f"{at}embed_tokens.weight": (vocab, hidden),
        f"{at}shared_head.head.weight": (vocab, hidden),
        f"{at}eh_proj.weight": (hidden, 2 * hidden),
        f"{attention}q_a_proj.weight": (c["q_lora_rank"], hidden),
        f"{at}mlp.experts.0.up_proj.weight": (c["moe_intermediate_size"], hidden),
        f"{at}mlp.gate.e_score_correction_bias": (c["n_routed_experts"],),
    }


def _encoder_shapes(c: dict[str, Any], num_labels: int | None) -> dict[str, tuple[int, ...]]:
    """num_labels: None: the base model, whose names have no prefix."""
    if c["model_type"] == "modernbert":
        return _modernbert_shapes(c, num_labels)
    hidden, inter = c["hidden_size"], c["intermediate_size"]
    prefix = "" if num_labels is None else "bert." if c["model_type"] == "bert" else "roberta."
    linears: dict[str, tuple[int, int]] = {}
    norms = [f"{prefix}embeddings.LayerNorm"]
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{i}."
        linears |= {f"{at}attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
        linears |= {
            f"{at}attention.output.dense": (hidden, hidden), f"{at}intermediate.dense": (inter, hidden),
            f"{at}output.dense": (hidden, inter),
        }  # fmt: skip
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    if c["model_type"] == "bert":
        linears[f"{prefix}pooler.dense"] = (hidden, hidden)
        if num_labels is not None:
            linears["classifier"] = (num_labels, hidden)
    elif num_labels is not None:
        linears |= {"classifier.dense": (hidden, hidden), "classifier.out_proj": (num_labels, hidden)}
    shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (c["vocab_size"], hidden),
        f"{prefix}embeddings.position_embeddings.weight": (c["max_position_embeddings"], hidden),
        f"{prefix}embeddings.token_type_embeddings.weight": (c["type_vocab_size"], hidden),
    }
    shapes |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _modernbert_shapes(c: dict[str, Any], num_labels: int | None) -> dict[str, tuple[int, ...]]:
    hidden, inter, prefix = c["hidden_size"], c["intermediate_size"], "" if num_labels is None else "model."
    linears: dict[str, tuple[tuple[int, int], bool]] = {}  # shape, and whether it has a bias
    norms = [f"{prefix}embeddings.norm", f"{prefix}final_norm"]
    attention, mlp = bool(c.get("attention_bias")), bool(c.get("mlp_bias"))
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}layers.{i}."
        linears |= {
            f"{at}attn.Wqkv": ((3 * hidden, hidden), attention), f"{at}attn.Wo": ((hidden, hidden), attention),
            f"{at}mlp.Wi": ((2 * inter, hidden), mlp), f"{at}mlp.Wo": ((hidden, inter), mlp),
        }  # fmt: skip
        norms += [f"{at}mlp_norm"] if i == 0 else [f"{at}attn_norm", f"{at}mlp_norm"]
    if num_labels is not None:
        linears |= {
            "head.dense": ((hidden, hidden), bool(c.get("classifier_bias"))),
            "classifier": ((num_labels, hidden), True),
        }
        norms.append("head.norm")
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embeddings.tok_embeddings.weight": (c["vocab_size"], hidden)}
    for name in norms:
        shapes |= {f"{name}.{part}": (hidden,) for part in (("weight", "bias") if c.get("norm_bias") else ("weight",))}
    for name, (shape, has_bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes
