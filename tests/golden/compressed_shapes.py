"""Names and shapes of the tensors of DeepSeek V4, as Transformers saves them, or as in the release."""

from typing import Any


def deepseek_v4(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Without a prefix in the config's spelling of the release, which has `compress_ratios`."""
    hidden, n, vocab = c["hidden_size"], c["hc_mult"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    kinds = c.get("layer_types") or [_OF_RATIO[ratio] for ratio in c["compress_ratios"]]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= _attention(c, f"{at}attn.", kinds[i])
        shapes |= _experts(c, f"{at}ffn.", hashed=i < c["num_hash_layers"])
        shapes |= {f"{at}attn_norm.weight": (hidden,), f"{at}ffn_norm.weight": (hidden,)}
        for block in ("attn", "ffn"):
            sizes = {"fn": ((2 + n) * n, n * hidden), "base": ((2 + n) * n,), "scale": (3,)}
            shapes |= {f"{at}hc_{block}_{name}": size for name, size in sizes.items()}
    shapes |= {"model.hc_head.hc_fn": (n, n * hidden), "model.hc_head.hc_base": (n,), "model.hc_head.hc_scale": (1,)}
    shapes |= {"model.norm.weight": (hidden,), "head.weight": (vocab, hidden)}
    if "compress_ratios" not in c:
        return shapes
    renamed = {"embed_tokens": "embed", "hc_head.hc_": "hc_head_", "attn.norm": "attn.kv_norm", "model.": ""}
    released = {}
    for name, shape in shapes.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        released[name] = shape
    return released


_OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _attention(c: dict[str, Any], at: str, kind: str) -> dict[str, tuple[int, ...]]:
    hidden, dim, heads, q_rank = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["q_lora_rank"]
    group, outs = heads * dim // c["o_groups"], c["o_groups"] * c["o_lora_rank"]
    shapes = {
        f"{at}wq_a.weight": (q_rank, hidden), f"{at}q_norm.weight": (q_rank,),
        f"{at}wq_b.weight": (heads * dim, q_rank), f"{at}wkv.weight": (dim, hidden),
        f"{at}norm.weight": (dim,), f"{at}wo_a.weight": (outs, group),
        f"{at}wo_b.weight": (hidden, outs), f"{at}attn_sink": (heads,),
    }  # fmt: skip
    rates = c.get("compress_rates", {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128})
    if kind == "heavily_compressed_attention":
        shapes |= _entries(f"{at}compressor.", rates[kind], dim, dim, hidden)
    elif kind == "compressed_sparse_attention":
        shapes |= _entries(f"{at}compressor.", rates[kind], 2 * dim, dim, hidden)
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        shapes |= _entries(f"{at}indexer.compressor.", rates[kind], 2 * index_dim, index_dim, hidden)
        shapes[f"{at}indexer.wq_b.weight"] = (index_heads * index_dim, q_rank)
        shapes[f"{at}indexer.weights_proj.weight"] = (index_heads, hidden)
    return shapes


def _entries(at: str, ratio: int, width: int, norm: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}wkv.weight": (width, hidden), f"{at}wgate.weight": (width, hidden), f"{at}ape": (ratio, width),
        f"{at}norm.weight": (norm,),
    }  # fmt: skip


def _experts(c: dict[str, Any], at: str, *, hashed: bool) -> dict[str, tuple[int, ...]]:
    hidden, inter, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{at}gate.weight": (count, hidden)}
    if hashed:
        shapes[f"{at}gate.tid2eid"] = (c["vocab_size"], c["num_experts_per_tok"])
    else:
        shapes[f"{at}gate.bias"] = (count,)
    for expert in (*(f"experts.{i}" for i in range(count)), "shared_experts"):
        shapes |= {f"{at}{expert}.w1.weight": (inter, hidden), f"{at}{expert}.w3.weight": (inter, hidden)}
        shapes[f"{at}{expert}.w2.weight"] = (hidden, inter)
    return shapes
