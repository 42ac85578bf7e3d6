"""Records Transformers' answers on the tiny checkpoints of tests/golden.

    python tools/record_golden.py [NAME …]      # needs the extra `reference` (torch)

For every variant and prompt it records greedy tokens (mostly 40), in float32 on one CPU thread, one prompt at a time.
Each token has its log-probability and the five most likely tokens. A seed is accepted only if a wrong implementation
would give other answers: each answer has at least 8 different tokens, and rounding never decides between the best two.
With sparse attention, rounding never decides either which tokens a query attends to.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.checkpoints import FULL_SIZE, VARIANTS, Variant, prompts, write_checkpoint

MIN_DISTINCT = 8   # different tokens in an answer
MIN_GAP = 1e-3     # smallest gap between the two best log-probabilities; rounding is about 1e-5
MIN_MARGIN = 2e-5  # smallest difference between the last score that an indexer chooses and the next; rounding is 1e-6
MAX_SEEDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="record the variants NAME and NAME-…; default: all small variants")
    names = parser.parse_args().names
    chosen = [v for v in VARIANTS if not names or any(v.name == n or v.name.startswith(f"{n}-") for n in names)]
    chosen += [FULL_SIZE] * (FULL_SIZE.name in names)
    if not chosen:
        parser.error(f"no variant of this name; tests/golden/checkpoints.py has {', '.join(v.name for v in VARIANTS)}")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for variant in chosen:
        record(variant)


def record(variant: Variant) -> None:
    """Find an acceptable seed and write the variant's answers."""
    best = 0.0
    for seed in range(MAX_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            sha256 = write_checkpoint(variant, seed, Path(folder))
            if variant.config.get("quantization_config", {}).get("quant_method") == "fp8":
                dequantise(Path(folder))
            answers, gap = [], float("inf")
            for prompt in prompts(variant.config["vocab_size"], variant.prompt_lengths):
                answer, answer_gap = ask(folder, prompt, variant.num_tokens)
                gap = min(gap, answer_gap)
                if gap < MIN_GAP or len(set(answer["tokens"])) < MIN_DISTINCT:
                    break
                answers.append(answer)
            else:
                write(variant, seed, sha256, answers)
                distinct = min(len(set(a["tokens"])) for a in answers)
                print(f"{variant.name:24} seed {seed:3}  smallest gap {gap:.4f}  fewest tokens {distinct}", flush=True)
                return
            best = max(best, gap)
    raise SystemExit(f"{variant.name}: none of {MAX_SEEDS} seeds gives acceptable answers (best gap {best})")


def dequantise(folder: Path) -> None:
    """Replace fp8 matrices with float32. Transformers 5.24 refuses a matrix with an incomplete last block.

    DeepSeek's own `inference/fp8_cast_bf16.py` computes the same: code * scale of the block.
    """
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    rows, columns = config.pop("quantization_config")["weight_block_size"]
    tensors = load_file(file)
    for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
        scales = tensors.pop(f"{name}_scale_inv").repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        codes = tensors[name].float()
        tensors[name] = codes.mul_(scales[: codes.shape[0], : codes.shape[1]])
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def ask(folder: str, prompt: list[int], num_tokens: int) -> tuple[dict[str, Any], float]:
    """Return the greedy answer to a prompt, and its smallest gap between the two best log-probabilities.

    The model is loaded again for each prompt, because dynamic rope keeps state.
    """
    # eager is the reference for soft caps and sinks. For Falcon's ALiBi it adds the biases twice, once in the mask.
    alibi = getattr(transformers.AutoConfig.from_pretrained(folder), "alibi", False)
    model, loading = causal_class(folder).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa" if alibi else "eager", output_loading_info=True
    )
    wrong = {kind: names for kind, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"Transformers does not load the checkpoint completely: {wrong}")
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    with torch.no_grad(), IndexMargin(model.config) as index:
        out = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, return_dict_in_generate=True,
            output_logits=True, eos_token_id=None,
        )  # fmt: skip
    tokens = out.sequences[0, len(prompt) :].tolist()
    if len(tokens) != num_tokens:
        raise SystemExit(f"{len(tokens)} tokens instead of {num_tokens}: {folder}")
    logprobs = torch.stack([logits[0] for logits in out.logits]).double().log_softmax(-1)
    top = logprobs.topk(5)
    answer = {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": rounded(logprobs[torch.arange(num_tokens), tokens]),
        "top_tokens": top.indices.tolist(),
        "top_logprobs": [rounded(row) for row in top.values],
    }
    gap = float((top.values[:, 0] - top.values[:, 1]).min())
    return answer, gap if index.margin >= MIN_MARGIN else 0.0


class IndexMargin(TorchFunctionMode):
    """Watches the `topk` of indexers. margin: the smallest difference between the last chosen score and the next."""

    def __init__(self, config: Any):
        super().__init__()
        self.top_k, self.margin = getattr(config, "index_topk", None), float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and args[0].dim() == 3 and args[1] == self.top_k < args[0].shape[-1]:
            scores = args[0].sort(-1, descending=True).values[..., self.top_k - 1 : self.top_k + 1]
            margins = (scores[..., 0] - scores[..., 1])[scores[..., 1] > -1e30]  # else fewer keys than `top_k` are seen
            self.margin = min([self.margin, *margins.tolist()])
        return func(*args, **(kwargs or {}))


def causal_class(folder: str) -> Any:
    """The model's class. AutoModelForCausalLM does not know text models that are published inside wrappers only."""
    return getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])


def rounded(values: torch.Tensor) -> list[float]:
    """Round to 1e-6, a hundredth of the tests' tolerance."""
    return [round(v, 6) for v in values.tolist()]


def write(variant: Variant, seed: int, sha256: str, answers: list[dict[str, Any]]) -> None:
    """Write a variant's file, with one line per answer."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    head = json.dumps({"variant": variant.name, "seed": seed, "sha256": sha256, "versions": versions})
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    variant.answers.write_text(f'{head[:-1]}, "answers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
