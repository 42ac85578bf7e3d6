"""Records how far Transformers' log-probabilities in bfloat16 are from those in float32.

    python tools/record_bfloat16.py [NAME …]      # needs the extra `reference` (torch); default: all families

For the first variant of every family in tests/golden, one forward pass in float32 and one in bfloat16 score each
recorded answer. tests/golden/bfloat16.json gets the mean absolute difference of the tokens' log-probabilities.
tests/models/test_bfloat16.py compares jpaged's difference with this number.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.checkpoints import GOLDEN, NUM_TOKENS, Variant, first_of_each_family, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="first variants of families; default: all. The other figures stay")
    names, variants = parser.parse_args().names, first_of_each_family()
    if unknown := set(names) - {variant.name for variant in variants}:
        parser.error(f"{', '.join(sorted(unknown))}: no first variant of a family in tests/golden/checkpoints.py")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = GOLDEN / "bfloat16.json"
    found: dict[str, float] = json.loads(file.read_text()) if names else {}
    for variant in variants:
        if names and variant.name not in names:
            continue
        found[variant.name] = difference(variant)
        print(f"{variant.name:24} {found[variant.name]:.5f}", flush=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


def difference(variant: Variant) -> float:
    """Return the mean absolute difference of natural log-probabilities over all tokens of all answers."""
    golden = json.loads(variant.answers.read_text())
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(variant, golden["seed"], Path(folder))
        # eager is Transformers' reference, but wrong for Falcon's ALiBi (see record_golden.py)
        config = transformers.AutoConfig.from_pretrained(folder)
        alibi, kind = getattr(config, "alibi", False), getattr(transformers, config.architectures[0])
        models = [
            kind.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa" if alibi else "eager").eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        total = 0.0
        for answer in golden["answers"]:
            ids = torch.tensor([answer["prompt"] + answer["tokens"]])
            chosen = torch.tensor(answer["tokens"])[:, None]
            with torch.no_grad():
                wide, half = (
                    model(ids).logits[0, -NUM_TOKENS - 1 : -1].double().log_softmax(-1).gather(1, chosen)
                    for model in models
                )
            total += float((wide - half).abs().mean())
    return round(total / len(golden["answers"]), 6)


if __name__ == "__main__":
    main()
