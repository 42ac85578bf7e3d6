"""Records PEFT's answers with the tiny LoRA adapters of tests/golden/adapters.py.

    python tools/record_lora.py [NAME …]      # needs the extra `reference` (torch, peft)

For every variant, PEFT makes the adapter. Its tensors get values from hashes of their names, and PEFT saves it. The
record has PEFT's adapter_config.json, the names and shapes of the saved tensors, and a greedy answer in float32 on one
CPU thread. An adapter is accepted only if its answer differs from the base model's in most tokens.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.adapters import (
    FOLDER,
    NUM_TOKENS,
    PROMPT_LENGTH,
    VARIANTS,
    AdapterVariant,
    values_of,
    write_adapter,
)
from tests.golden.checkpoints import BY_NAME, prompts, write_checkpoint

MIN_DISTINCT = 6   # different tokens in an answer
MIN_GAP = 1e-3     # smallest gap between the two best log-probabilities
MAX_SEEDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="record these variants; default: all")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    for variant in VARIANTS:
        if not names or variant.name in names:
            record(variant)


def record(variant: AdapterVariant) -> None:
    """Find an acceptable seed, and write the variant's record."""
    base = BY_NAME[variant.base]
    base_seed = json.loads(base.answers.read_text())["seed"]
    prompt = prompts(base.config["vocab_size"], (PROMPT_LENGTH,))[0]
    with tempfile.TemporaryDirectory() as place:
        folder, adapter = Path(place, "base"), Path(place, "adapter")
        write_checkpoint(base, base_seed, folder)
        plain = ask(load(folder), prompt)
        for seed in range(MAX_SEEDS):
            shutil.rmtree(adapter, ignore_errors=True)
            config, shapes = make(variant, folder, adapter, seed)
            model = peft.PeftModel.from_pretrained(load(folder), str(adapter))
            answer = ask(model, prompt)
            differing = sum(a != b for a, b in zip(answer["tokens"], plain["tokens"], strict=True))
            distinct = len(set(answer["tokens"]))
            if answer["gap"] >= MIN_GAP and distinct >= MIN_DISTINCT and differing > NUM_TOKENS // 2:
                break
        else:
            raise SystemExit(f"{variant.name}: none of {MAX_SEEDS} seeds gives an acceptable answer")
        if variant.as_file:
            shutil.rmtree(variant.files, ignore_errors=True)
            variant.files.mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copyfile(adapter / name, variant.files / name)
    gap = f"smallest gap {answer['gap']:.4f}"
    print(f"{variant.name:22} seed {seed:3}  {gap}  tokens that differ {differing}", flush=True)
    versions = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    head = {
        "variant": variant.name, "base": base.name, "base_seed": base_seed, "seed": seed, "versions": versions,
        "prompt": prompt, "tokens": answer["tokens"], "logprobs": answer["logprobs"], "base_tokens": plain["tokens"],
        "config": config, "tensors": shapes,
    }  # fmt: skip
    lines = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=key == 'config')}" for key, value in head.items())
    variant.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make(variant: AdapterVariant, folder: Path, adapter: Path, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the adapter. Returns adapter_config.json, and the shape of each tensor."""
    if variant.per_expert:
        return old_experts(variant, folder, adapter, seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **variant.options)
    model = peft.get_peft_model(load(folder), config)
    state = peft.get_peft_model_state_dict(model)
    values = {n: torch.from_numpy(values_of(n, tuple(t.shape), seed)) for n, t in state.items() if "lora_" in n}
    if config.ensure_weight_tying:  # PEFT ties the lm_head's A and B to the embedding's
        values = {n: t for n, t in values.items() if "lm_head" not in n}
    peft.set_peft_model_state_dict(model, values)
    model.save_pretrained(str(adapter))
    saved = load_file(adapter / "adapter_model.safetensors")
    for name, value in values.items():
        if name not in saved or not np.array_equal(saved[name], value.numpy()):
            raise SystemExit(f"{variant.name}: PEFT did not save {name} as it was set")
    path = adapter / "adapter_config.json"
    written = json.loads(path.read_text()) | {"base_model_name_or_path": variant.base}
    for key in ("target_modules", "target_parameters"):  # PEFT writes sets in any order
        if isinstance(written[key], list):
            written[key].sort()
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return written, {name: list(tensor.shape) for name, tensor in saved.items()}


def old_experts(variant: AdapterVariant, folder: Path, adapter: Path, seed: int) -> tuple[dict[str, Any], dict]:
    """An adapter with modules of single experts, as PEFT wrote it with Transformers 4. PEFT still loads it."""
    model = BY_NAME[variant.base].config
    config = json.loads(json.dumps(peft.LoraConfig(task_type="CAUSAL_LM", **variant.options).to_dict(), default=list))
    config |= {"peft_type": "LORA", "target_modules": sorted(variant.options["target_modules"])}
    hidden, inter, r = model["hidden_size"], model["intermediate_size"], variant.options["r"]
    head_dim = model.get("head_dim") or hidden // model["num_attention_heads"]
    shapes: dict[str, list[int]] = {}
    for layer in range(model["num_hidden_layers"]):
        path = f"base_model.model.model.layers.{layer}."
        modules = {path + "self_attn.k_proj": (hidden, model["num_key_value_heads"] * head_dim)}
        for expert in range(model["num_local_experts"]):
            place = f"{path}block_sparse_moe.experts.{expert}."
            modules |= {place + "w1": (hidden, inter), place + "w2": (inter, hidden), place + "w3": (hidden, inter)}
        for module, (inputs, outputs) in modules.items():
            shapes |= {f"{module}.lora_A.weight": [r, inputs], f"{module}.lora_B.weight": [outputs, r]}
    write_adapter(adapter, config, shapes, seed)
    return config, shapes


def load(folder: Path) -> Any:
    """The base model, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def ask(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The greedy answer, with its log-probabilities and the smallest gap between the two best."""
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        out = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config,
            return_dict_in_generate=True, output_logits=True, eos_token_id=None,
        )  # fmt: skip
    tokens = out.sequences[0, len(prompt) :].tolist()
    logprobs = torch.stack([logits[0] for logits in out.logits]).double().log_softmax(-1)
    top = logprobs.topk(2).values
    chosen = logprobs[torch.arange(len(tokens)), tokens].tolist()
    return {
        "tokens": tokens, "logprobs": [round(value, 6) for value in chosen],
        "gap": float((top[:, 0] - top[:, 1]).min()),
    }


if __name__ == "__main__":
    main()
