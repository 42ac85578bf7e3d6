"""Records Transformers' pooled vectors on the tiny checkpoints of tests/golden/pooling.py.

    python tools/record_pooling.py      # needs the extra `reference` (torch)

Every prompt is computed alone, in float32 on one CPU thread. For classifiers it records the scores, for other models
the last token's hidden state after the final norm, scaled to length 1.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.checkpoints import Variant, prompts, write_checkpoint
from tests.golden.pooling import ANSWERS, BARE_QWEN3, CLASSIFIERS, EMBEDDERS, NUM_KEPT, SEED


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    models = []
    for variant in (*CLASSIFIERS, *EMBEDDERS):
        with tempfile.TemporaryDirectory() as folder:
            sha256 = write_checkpoint(variant, SEED, Path(folder))
            values = [pooled(variant, folder, prompt) for prompt in prompts(variant.config["vocab_size"])]
        body = json.dumps({"sha256": sha256, "values": values}, separators=(",", ":"))
        models.append(f"{json.dumps(variant.name)}: {body}")
        print(f"{variant.name:28} {values[-1][:3]}", flush=True)
    lines = ",\n".join(models)
    ANSWERS.write_text(f'{{"versions": {json.dumps(versions)}, "models": {{\n{lines}\n}}}}\n')


def pooled(variant: Variant, folder: str, prompt: list[int]) -> list[float]:
    """Return the pooled vector of a prompt. Loads the model each time, because longrope and dynamic rope keep state."""
    classifies = variant in CLASSIFIERS
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    model, loading = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: names for kind, names in loading.items() if names and set(names) != {"lm_head.weight"}}
    if wrong:
        raise SystemExit(f"Transformers does not load the checkpoint completely: {wrong}")
    with torch.no_grad():
        out = model.eval()(torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64))
    if classifies:
        return [round(v, 6) for v in out.logits[0].tolist()]
    state = torch.nn.functional.normalize(out.last_hidden_state[0, -1], dim=0).tolist()
    return [round(v, 6) for v in (state if variant is BARE_QWEN3 else state[:NUM_KEPT])]


if __name__ == "__main__":
    main()
