"""Make the benchmark models with random weights, and their tokenizer. The same bytes on every machine.

    venvs/hf/bin/python benchmarks/peers/make_models.py PEERS

- tiny-llama-60m: a Llama of 29.4M parameters. The name is older than the shape.
- qwen2-0.5b-shape: a Qwen2 with the shape of Qwen2.5-0.5B, 494M parameters.
- qwen3.5-30m: a Qwen3.5 of 29.7M parameters, with gated DeltaNet in six of eight layers.

Matrices and biases are normal with deviation 0.02, norm gains are uniform around 2. With gains of 1 and tied
embeddings a random model only repeats its last token, which hides errors of attention and of the cache. The
tokenizer is a byte-level BPE, trained on the Python standard library. Needs torch for CPU and transformers.
"""

import argparse
import json
import pathlib
import sysconfig
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20261120
DEVIATION = 0.02
TOKENS = 8192  # vocabulary of the tokenizer
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHARED: dict[str, Any] = {
    "tie_word_embeddings": True, "initializer_range": DEVIATION, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


def rotary(theta: float) -> Any:
    return {"rope_type": "default", "rope_theta": theta}


def configurations() -> dict[str, Any]:
    llama = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_parameters=rotary(1e4), **SHARED,
    )  # fmt: skip
    qwen2 = transformers.Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters=rotary(1e6), use_sliding_window=False, **SHARED,
    )  # fmt: skip
    qwen3_5 = transformers.Qwen3_5TextConfig(
        vocab_size=TOKENS, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=1, head_dim=128, linear_num_key_heads=2, linear_num_value_heads=4,
        max_position_embeddings=4096, rope_parameters=rotary(1e7) | {"partial_rotary_factor": 0.25}, **SHARED,
    )  # fmt: skip
    return {"tiny-llama-60m": llama, "qwen2-0.5b-shape": qwen2, "qwen3.5-30m": qwen3_5}


def make_tokenizer() -> Any:
    """Train the tokenizer on the standard library's modules, tests and installed packages left out."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(str(path) for path in library.rglob("*.py") if not {"site-packages", "test"} & set(path.parts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (pathlib.Path(file).read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS[0]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, padding_side="left",
        additional_special_tokens=SPECIAL_TOKENS[1:],
    )  # fmt: skip


def set_weights(model: Any) -> None:
    """Draw every parameter, in the order of the names. The library's own initialisation does not matter."""
    draws = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * DEVIATION)
                continue
            middle = 1.0 if name == "model.norm.weight" else 2.0
            parameter.copy_(middle + torch.rand(parameter.shape, generator=draws) - 0.5)
    model.tie_weights()


def update_json(path: pathlib.Path, removed: str = "", **changes: Any) -> None:
    """Change fields of a JSON file, and remove one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    content.pop(removed, None)
    path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")


def write_model(config: Any, tokenizer: Any, folder: pathlib.Path) -> None:
    """Write one model in bfloat16. Adds the key names of Transformers 4, because some peers read only these."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    set_weights(model)
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    update_json(folder / "config.json", torch_dtype="bfloat16", rope_theta=config.rope_parameters["rope_theta"])
    update_json(
        folder / "tokenizer_config.json", "extra_special_tokens", tokenizer_class="PreTrainedTokenizerFast",
        additional_special_tokens=SPECIAL_TOKENS[1:], model_max_length=config.max_position_embeddings,
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: {parameters / 1e6:.1f}M parameters, {2 * parameters / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=pathlib.Path, help="folder of the peers; the models are written to its models/")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    for name, config in configurations().items():
        write_model(config, tokenizer, args.peers / "models" / name)


if __name__ == "__main__":
    main()
