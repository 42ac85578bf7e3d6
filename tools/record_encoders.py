"""Records Transformers' vectors and scores on the tiny encoders of tests/golden/encoders.py.

    python tools/record_encoders.py      # needs the extra `reference` (torch)

Every prompt is computed alone, in float32 on one CPU thread.
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
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.checkpoints import Variant, prompts, write_checkpoint
from tests.golden.encoders import ANSWERS, CLASSIFIERS, EMBEDDERS, NO, RERANKERS, SEED, YES, token_types


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    models = []
    for variant in (*EMBEDDERS, *CLASSIFIERS, *RERANKERS):
        with tempfile.TemporaryDirectory() as folder:
            found = {"sha256": write_checkpoint(variant, SEED, Path(folder))}
            answers = vectors if variant in EMBEDDERS else scores if variant in CLASSIFIERS else probabilities
            found |= answers(variant, folder)
        models.append(f"{json.dumps(variant.name)}: {json.dumps(found, separators=(',', ':'))}")
        print(f"{variant.name:28} {list(found.values())[-1][-1][:3]}", flush=True)
    lines = ",\n".join(models)
    ANSWERS.write_text(f'{{"versions": {json.dumps(versions)}, "models": {{\n{lines}\n}}}}\n')


def vectors(variant: Variant, folder: str) -> dict[str, Any]:
    """Return the mean and the first hidden state of each prompt, scaled to length 1."""
    model, found = load(transformers.AutoModel, folder), {"mean": [], "cls": []}
    for prompt in prompts(variant.config["vocab_size"]):
        states = run(model, prompt).last_hidden_state[0]
        for kind, state in (("mean", states.mean(0)), ("cls", states[0])):
            found[kind].append([round(v, 7) for v in torch.nn.functional.normalize(state, dim=0).tolist()])
    return found


def scores(variant: Variant, folder: str) -> dict[str, Any]:
    """Return the scores of each prompt alone, and as a pair of texts."""
    model = load(transformers.AutoModelForSequenceClassification, folder)
    found: dict[str, Any] = {"scores": []}
    for prompt in prompts(variant.config["vocab_size"]):
        found["scores"].append([round(v, 6) for v in run(model, prompt).logits[0].tolist()])
        if variant.config.get("type_vocab_size", 1) > 1:
            pair = run(model, prompt, token_type_ids=torch.tensor([token_types(len(prompt))]))
            found.setdefault("pairs", []).append([round(v, 6) for v in pair.logits[0].tolist()])
    return found


def probabilities(variant: Variant, folder: str) -> dict[str, Any]:
    """Return the probability of YES after each prompt, among YES and NO, as Qwen3-Reranker's model card computes it."""
    model, found = load(transformers.AutoModelForCausalLM, folder), []
    for prompt in prompts(variant.config["vocab_size"]):
        both = run(model, prompt).logits[0, -1, [NO, YES]]
        found.append([round(torch.log_softmax(both, dim=0)[1].exp().item(), 6)])
    return {"scores": found}


def load(kind: Any, folder: str) -> Any:
    model, loading = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # Transformers' base models of the RoBERTa family have a pooling layer, which nothing here uses
    unused = {"pooler.dense.weight", "pooler.dense.bias"}
    if model.config.tie_word_embeddings:
        unused.add("lm_head.weight")
    wrong = {kind: set(names) - unused for kind, names in loading.items()}
    if any(wrong.values()):
        raise SystemExit(f"Transformers does not load the checkpoint completely: {wrong}")
    return model.eval()


def run(model: Any, prompt: list[int], **more: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64), **more)


if __name__ == "__main__":
    main()
