"""MTP layers in float64, from the tensors of a checkpoint and the formulas of the models' reports.

A pass at index p reads the model's state at p and the token at p + 1. `tests/support/mtp_checkpoints.py` has the names.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.support.mtp_checkpoints import PUBLISHED

Weights = Mapping[str, np.ndarray]  # of a layer, by the end of their names


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def rotated(x: np.ndarray, count: int, theta: float, *, pairs: bool) -> np.ndarray:
    """Turn the first `count` dimensions of [tokens, heads, dim] by their positions, which are the row numbers.

    pairs: dimensions 2i and 2i + 1 turn together, not i and i + count / 2.
    """
    half, out = count // 2, x.copy()
    first, second = (slice(0, count, 2), slice(1, count, 2)) if pairs else (slice(half), slice(half, count))
    turn = np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half))[:, None]
    turned = (x[..., first] + 1j * x[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, sees: np.ndarray | None = None) -> np.ndarray:
    """Causal attention of [tokens, heads, dim], flattened over heads. sees: keys that each query may see."""
    tokens, heads = q.shape[:2]
    sees = np.tril(np.ones((tokens, tokens), bool)) if sees is None else sees
    out = np.zeros((tokens, heads, v.shape[2]))
    for head in range(heads):
        kv = head // (heads // k.shape[1])
        scores = np.where(sees, np.exp(q[:, head] @ k[:, kv].T * scale), 0)
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(tokens, -1)


class Oracle:
    """The MTP layer of a family of `PUBLISHED`."""

    def __init__(self, name: str, config: Mapping[str, Any], tensors: Weights):
        self.published, self.config = PUBLISHED[name], config
        self.tensors = {key: np.float64(value) for key, value in tensors.items()}
        self.kind, self.hidden = config["model_type"], config["hidden_size"]
        self.offset = 1 if self.kind.startswith("qwen3") else 0
        self.theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0
        self.eps = config.get("layer_norm_epsilon") or config["rms_norm_eps"]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (self.offset + weight)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self.tensors.get("model.embed_tokens.weight", self.tensors.get("backbone.embeddings.weight"))[ids]

    def model_state(self, states: np.ndarray) -> np.ndarray:
        """The model's states after its final norm."""
        return self.norm(states, self.tensors.get("model.norm.weight", self.tensors.get("backbone.norm_f.weight")))

    def run(self, ids: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits, and the states that the next pass reads. ids: tokens at p + 1. states: from `model_state`, at p."""
        t, published = self.tensors, self.published
        joined = np.concatenate([
            self.norm(self.embed(ids), t[published.embedding_norm]), self.norm(states, t[published.hidden_norm])
        ], -1)  # fmt: skip
        x = joined @ t[published.fc].T
        parts = [{k.removeprefix(at): v for k, v in t.items() if k.startswith(at)} for _, at in published.layers]
        if self.kind == "nemotron_h":  # one block each
            first, second = parts
            x = x + self.attention(first, self.norm(x, first["norm.weight"]), "mixer.")
            x = x + self.experts(second, self.norm(x, second["norm.weight"]), "mixer.")
        else:
            (w,) = parts
            mix = self.latent_attention if "self_attn.kv_b_proj.weight" in w else self.attention
            x = x + mix(w, self.norm(x, w["input_layernorm.weight"]), "self_attn.")
            normed = self.norm(x, w["post_attention_layernorm.weight"])
            dense = "mlp.gate_proj.weight" in w
            at = "block_sparse_moe." if self.kind == "minimax_m2" else "mlp."
            x = x + (self.network(w, normed, at) if dense else self.experts(w, normed, at))
        normed = self.norm(x, t[published.norm])
        head = t.get("lm_head.weight", t.get("model.embed_tokens.weight"))
        return normed @ head.T, normed if published.reads_normed else x

    def attention(self, w: Weights, x: np.ndarray, at: str) -> np.ndarray:
        c, tokens = self.config, len(x)
        heads = c["num_attention_heads"]
        dim, rope = c.get("head_dim") or self.hidden // heads, c.get("rope_parameters") or {}
        share = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1
        share = c["rotary_dim"] / dim if "rotary_dim" in c else share

        def projected(name: str) -> np.ndarray:
            return x @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", 0)

        q, k, v = projected("q"), projected("k"), projected("v")
        gate = np.ones(1)
        if self.offset:  # each head of q_proj is a query and its gate
            both = q.reshape(tokens, heads, 2, dim)
            q, gate = both[:, :, 0].reshape(tokens, -1), sigmoid(both[:, :, 1].reshape(tokens, -1))
        if self.kind == "minimax_m2":  # the norm is over all heads together
            q, k = self.norm(q, w[f"{at}q_norm.weight"]), self.norm(k, w[f"{at}k_norm.weight"])
        q, k, v = (each.reshape(tokens, -1, dim) for each in (q, k, v))
        if self.kind != "minimax_m2" and f"{at}q_norm.weight" in w:
            q, k = self.norm(q, w[f"{at}q_norm.weight"]), self.norm(k, w[f"{at}k_norm.weight"])
        if self.kind != "nemotron_h":
            pairs = self.kind == "ernie4_5_moe"
            q, k = (rotated(each, int(dim * share), self.theta, pairs=pairs) for each in (q, k))
        return (attend(q, k, v, dim**-0.5) * gate) @ w[f"{at}o_proj.weight"].T

    def latent_attention(self, w: Weights, x: np.ndarray, at: str) -> np.ndarray:
        c, tokens, heads = self.config, len(x), self.config["num_attention_heads"]
        nope, turned, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        compressed = self.norm(x @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"])
        q = (compressed @ w[f"{at}q_b_proj.weight"].T).reshape(tokens, heads, nope + turned)
        both = x @ w[f"{at}kv_a_proj_with_mqa.weight"].T
        latent = self.norm(both[:, :rank], w[f"{at}kv_a_layernorm.weight"])
        kv = (latent @ w[f"{at}kv_b_proj.weight"].T).reshape(tokens, heads, -1)
        of_q = rotated(q[..., nope:], turned, self.theta, pairs=True)
        of_k = np.repeat(rotated(both[:, None, rank:], turned, self.theta, pairs=True), heads, 1)
        q, k = np.concatenate([q[..., :nope], of_q], -1), np.concatenate([kv[..., :nope], of_k], -1)
        sees = self.chosen(w, x, compressed, f"{at}indexer.") if "index_topk" in c else None
        return attend(q, k, kv[..., nope:], (nope + turned) ** -0.5, sees) @ w[f"{at}o_proj.weight"].T

    def chosen(self, w: Weights, x: np.ndarray, compressed: np.ndarray, at: str) -> np.ndarray:
        """Keys that the indexer chooses for each query: those with the best scores."""
        c, tokens = self.config, len(x)
        dim, turned, count = c["index_head_dim"], c["qk_rope_head_dim"], c["index_topk"]
        q = (compressed @ w[f"{at}wq_b.weight"].T).reshape(tokens, -1, dim)
        k = x @ w[f"{at}wk.weight"].T
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * w[f"{at}k_norm.weight"] + w[f"{at}k_norm.bias"]
        q, k = (rotated(each, turned, self.theta, pairs=True) for each in (q, k[:, None]))
        weights = x @ w[f"{at}weights_proj.weight"].T * q.shape[1] ** -0.5
        scores = np.einsum("th,ths->ts", weights, np.maximum(np.einsum("thd,sd->ths", q, k[:, 0]) * dim**-0.5, 0))
        sees = np.zeros((tokens, tokens), bool)
        for t in range(tokens):
            sees[t, np.argsort(-scores[t, : t + 1], kind="stable")[:count]] = True
        return sees

    def network(self, w: Weights, x: np.ndarray, at: str) -> np.ndarray:
        """A dense feed-forward network."""
        up = x @ w[f"{at}up_proj.weight"].T
        if f"{at}gate_proj.weight" not in w:
            return np.maximum(up, 0) ** 2 @ w[f"{at}down_proj.weight"].T
        return silu(x @ w[f"{at}gate_proj.weight"].T) * up @ w[f"{at}down_proj.weight"].T

    def experts(self, w: Weights, x: np.ndarray, at: str) -> np.ndarray:
        """The chosen experts' networks times their weights, and the shared expert."""
        c = self.config
        router = "router.gate" if self.kind == "hy_v3" else "gate"
        logits = x @ w[f"{at}{router}.weight"].T
        is_softmax = self.kind.startswith("qwen3")
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if is_softmax else sigmoid(logits)
        names = ("gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias")
        choice = scores + next((w[at + name] for name in names if at + name in w), 0)
        groups, kept = c.get("n_group", 1), c.get("topk_group", 1)
        if groups > 1:  # only experts of the groups whose two best scores have the largest sum
            grouped = choice.reshape(len(x), groups, -1)
            best = np.argsort(-np.sort(grouped, -1)[..., -2:].sum(-1), -1)[:, :kept]
            allowed = np.zeros((len(x), groups), bool)
            np.put_along_axis(allowed, best, True, -1)
            choice = np.where(allowed[..., None], grouped, -np.inf).reshape(choice.shape)
        scale = c.get("routed_scaling_factor") or c.get("router_scaling_factor") or 1.0
        compressed = x @ w[f"{at}fc1_latent_proj.weight"].T if f"{at}fc1_latent_proj.weight" in w else x
        out = np.zeros_like(compressed)
        for t, row in enumerate(compressed):
            best = np.argsort(-choice[t])[: c["num_experts_per_tok"]]
            weights = scores[t, best]
            weights = weights / weights.sum() if c.get("norm_topk_prob", True) else weights
            out[t] = scale * sum(weight * self.expert(w, row, at, e) for weight, e in zip(weights, best, strict=True))
        if f"{at}fc2_latent_proj.weight" in w:
            out = out @ w[f"{at}fc2_latent_proj.weight"].T
        return out + self.shared(w, x, at)

    def expert(self, w: Weights, row: np.ndarray, at: str, number: int) -> np.ndarray:
        if f"{at}experts.gate_up_proj" in w:
            gate, up = np.split(w[f"{at}experts.gate_up_proj"][number] @ row, 2)
            return w[f"{at}experts.down_proj"][number] @ (silu(gate) * up)
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # MiniMax's, as Mixtral's
        start = f"{at}experts.{number}."
        own = {f"{names.get(k.removeprefix(start).split('.')[0], k.removeprefix(start).split('.')[0])}.weight": v
               for k, v in w.items() if k.startswith(start)}  # fmt: skip
        return self.network(own, row, "")

    def shared(self, w: Weights, x: np.ndarray, at: str) -> np.ndarray:
        """The shared expert's output; 0 if there is none."""
        shared: Callable[[str], bool] = lambda name: f"{at}{name}.up_proj.weight" in w  # noqa: E731
        name = next((n for n in ("shared_experts", "shared_expert", "shared_mlp") if shared(n)), None)
        if name is None:
            return np.zeros_like(x)
        out = self.network(w, x, f"{at}{name}.")
        gate = w.get(f"{at}shared_expert_gate.weight")
        return out if gate is None else out * sigmoid(x @ gate.T)
