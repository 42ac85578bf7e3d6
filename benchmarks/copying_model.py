"""Writes a Llama of 29M parameters that continues a text by copying it: for measurements of drafts.

    python benchmarks/copying_model.py FOLDER            # copies what followed the last two tokens
    python benchmarks/copying_model.py FOLDER --random   # random weights of the same shape: its text does not repeat

Random weights hardly repeat a text, and training takes hours on a CPU. So the heads are built by hand, as the induction
heads of Olsson et al. 2022 (arXiv:2209.11895). The hidden state has a part for the token, for each of the two tokens
before it, and for the prediction:

1. Layer 0 has heads that look one and two tokens back. A constant query and key have their highest product at one
   distance, by the phases of the rotary embedding. The heads copy the embeddings of those tokens.
2. Each of the other layers compares the last two tokens with the two tokens before every position, and adds the token
   at the best position to the prediction. The products use rotary pairs that hardly turn within 1,024 tokens. Each
   head compares other projections, so errors of one head are outvoted.
3. The last feed-forward layer replaces the token by the prediction, because the output matrix is the embedding.

The other feed-forward layers are random and small. The shape is that of tiny-llama-60m in benchmarks/peers, and the
tokenizer is the demo model's. The same seed gives the same bytes.
"""

import argparse
import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DEMO = pathlib.Path(__file__).parents[1] / "jpaged" / "demo_model"
SEED = 20261128
VOCAB, HIDDEN, INTERMEDIATE, LAYERS = 8192, 512, 1536, 8
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
THETA = 1e7
PAIRS = HEAD_DIM // 2
FIRST_SLOW = 14     # rotary pairs from this one on turn by less than 0.9 radians within 1,024 tokens
WIDTH = 124         # of each part of the hidden state
TOKEN, BEFORE, BEFORE_THAT, PREDICTION = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(4))
CONSTANT = HIDDEN - 1
DISTANCE = 19.0     # score of the right distance, per rotary pair. The distances next to it have 14 less
MATCH = 16.0        # score of one token that matches
COPIED = 0.2        # share of a token that a layer adds to the prediction
REPLACED = 6.0      # of the prediction, when it replaces the token
GATE = 10.0         # of the neurons that replace it
SMALL = 4e-4        # deviation of the down projections: a feed-forward layer adds 1% of the hidden state

Layer = dict[str, np.ndarray]


def copying_layers(draws: np.random.Generator) -> list[Layer]:
    """Attention of all layers."""
    return [_look_back(), *(_match(draws) for _ in range(LAYERS - 1))]


def random_layers(draws: np.random.Generator) -> list[Layer]:
    """Attention with random weights."""
    shapes = {name: matrix.shape for name, matrix in _zeros().items()}
    return [
        {name: 0.02 * draws.standard_normal(shape) for name, shape in shapes.items()} for _ in range(LAYERS)
    ]


def _zeros() -> Layer:
    return {
        "q": np.zeros((HEADS, HEAD_DIM, HIDDEN)), "k": np.zeros((KV_HEADS, HEAD_DIM, HIDDEN)),
        "v": np.zeros((KV_HEADS, HEAD_DIM, HIDDEN)), "o": np.zeros((HIDDEN, HEADS, HEAD_DIM)),
    }  # fmt: skip


def _look_back() -> Layer:
    """Query head 0 of each KV head copies a quarter of the token before, query head 1 of the one before that."""
    layer = _zeros()
    inputs = 2**-0.5  # norms of the token and of the constant
    scale = (DISTANCE * HEAD_DIM**0.5) ** 0.5 / (inputs * HIDDEN**0.5)
    angles = THETA ** (-np.arange(PAIRS) / PAIRS)
    layer["k"][:, :PAIRS, CONSTANT] = scale
    for which, distance in enumerate((1, 2)):  # the phase that a key has at this distance
        layer["q"][which::2, :PAIRS, CONSTANT] = scale * np.cos(angles * distance)
        layer["q"][which::2, PAIRS:, CONSTANT] = -scale * np.sin(angles * distance)
    part = WIDTH // KV_HEADS
    for head in range(KV_HEADS):
        for i in range(part):
            layer["v"][head, i, head * part + i] = 1 / (inputs * HIDDEN**0.5)
            for which, target in enumerate((BEFORE, BEFORE_THAT)):
                layer["o"][target.start + head * part + i, 2 * head + which, i] = 1
    return layer


def _match(draws: np.random.Generator) -> Layer:
    """Every head compares the last two tokens with those before each position, and copies the token there."""
    layer = _zeros()
    slow = np.concatenate([np.arange(FIRST_SLOW, PAIRS), np.arange(FIRST_SLOW, PAIRS) + PAIRS])
    inputs = 0.5  # norms of the token, the two before it, and the constant
    scale = (MATCH * HEAD_DIM**0.5) ** 0.5 / (inputs * HIDDEN**0.5)
    half = WIDTH // 2
    for head in range(KV_HEADS):
        first, second = scale * draws.standard_normal((2, len(slow), WIDTH)) / len(slow) ** 0.5
        for query in (2 * head, 2 * head + 1):
            layer["q"][query, slow, TOKEN] = first
            layer["q"][query, slow, BEFORE] = second
        layer["k"][head, slow, BEFORE] = first
        layer["k"][head, slow, BEFORE_THAT] = second
        for i in range(half):  # two KV heads copy each half of a token
            place = head % 2 * half + i
            layer["v"][head, i, place] = 1 / (inputs * HIDDEN**0.5)
            layer["o"][PREDICTION.start + place, 2 * head : 2 * head + 2, i] = COPIED / 4
    return layer


def _replace(mlp: Layer) -> None:
    """Let the first neurons of a feed-forward layer subtract the token and add the prediction.

    The gate is a large constant, so the layer is linear in them.
    """
    inputs = 0.4  # norms of the token, the two before it, the constant, and a prediction
    neurons = np.arange(WIDTH)
    for name in ("gate", "up"):
        mlp[name][:WIDTH] = 0
    mlp["down"][:, :WIDTH] = 0
    mlp["gate"][:WIDTH, CONSTANT] = GATE / (inputs * HIDDEN**0.5)
    mlp["up"][neurons, PREDICTION.start + neurons] = REPLACED / (inputs * HIDDEN**0.5)
    mlp["up"][neurons, TOKEN.start + neurons] = -1 / (inputs * HIDDEN**0.5)
    mlp["down"][TOKEN.start + neurons, neurons] = 1 / GATE


def tensors(is_random: bool) -> dict[str, np.ndarray]:
    """All tensors by their names in Transformers, in float32."""
    draws = np.random.default_rng(SEED)
    embed = np.zeros((VOCAB, HIDDEN))
    vectors = draws.standard_normal((VOCAB, WIDTH))
    embed[:, TOKEN] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    embed[:, CONSTANT] = 1
    if is_random:
        embed = 0.02 * draws.standard_normal((VOCAB, HIDDEN))
    found = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(HIDDEN)}
    for number, layer in enumerate((random_layers if is_random else copying_layers)(draws)):
        prefix = f"model.layers.{number}"
        for name in ("q", "k", "v"):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = layer[name].reshape(-1, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.weight"] = layer["o"].reshape(HIDDEN, -1)
        shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
        mlp = {name: 0.02 * draws.standard_normal(shape) for name, shape in shapes.items()}
        if not is_random:
            mlp["down"] *= SMALL / 0.02
            if number == LAYERS - 1:
                _replace(mlp)
        for name, matrix in mlp.items():
            found[f"{prefix}.mlp.{name}_proj.weight"] = matrix
        for name in ("input_layernorm", "post_attention_layernorm"):
            # with gains of 1 and tied embeddings random weights only repeat their last token
            found[f"{prefix}.{name}.weight"] = np.full(HIDDEN, 2.0 if is_random else 1.0)
    return found


def config() -> dict[str, object]:
    """config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": THETA, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="folder of the checkpoint, made if it does not exist")
    parser.add_argument("--random", action="store_true", help="random weights")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: np.ascontiguousarray(array.astype(ml_dtypes.bfloat16)) for name, array in tensors(args.random).items()
    }
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    (args.folder / "config.json").write_text(json.dumps(config(), indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / name, args.folder / name)
    print(f"{args.folder}: {sum(each.size for each in weights.values()) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
