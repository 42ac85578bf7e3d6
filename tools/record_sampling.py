"""Records Transformers' logits processors on random logits.

    python tools/record_sampling.py      # needs the extra `reference` (torch)

The processors run in vLLM's order (tests/sampling/sampling_oracle.py), in float64. There are three differences:
- Transformers' NoBadWords also searches the prompt. Here it gets only the output, as in vLLM.
- Transformers' top_p may keep only some of several equal logits, in sort order. It is recorded only without ties.
- Transformers has no frequency and presence penalties, so they are not recorded.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation import logits_process as processors

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.sampling import ANSWERS, VOCAB, logits

PROMPT = [3, 7, 7, 11, 30, 41]
OUTPUT = [12, 7, 3, 19, 12]
BAD_WORDS = [[8], [3, 19, 12, 21], [19, 12, 22], [12, 23], [41, 12, 24], [19, 25], [41, 12, 7, 3, 19, 12, 26]]
STOP = [5, 12]
BIAS = {2: 4.5, 7: -3.25, 19: 8.0, 33: -100.0}
ALLOWED = list(range(0, VOCAB, 3))

SINGLE = (
    {"temperature": 0.25}, {"temperature": 0.7}, {"temperature": 1.7},
    {"min_p": 0.01}, {"min_p": 0.2}, {"min_p": 1.0},
    {"top_k": 1}, {"top_k": 7}, {"top_k": VOCAB - 1},
    {"top_p": 0.001}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.999},
    {"typical_p": 0.1}, {"typical_p": 0.5}, {"typical_p": 0.9}, {"typical_p": 0.999},
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.6},
    {"bad_words": True}, {"min_tokens": len(OUTPUT)}, {"min_tokens": len(OUTPUT) + 1},
    {"logit_bias": BIAS}, {"allowed_token_ids": ALLOWED},
)  # fmt: skip
TIED = (
    {"top_k": 1}, {"top_k": 9}, {"top_k": 20}, {"min_p": 0.375}, {"min_p": 1.0},
    {"typical_p": 0.3}, {"typical_p": 0.95},
    {"temperature": 2.0, "min_p": 0.125, "top_k": 12, "typical_p": 0.75},
)  # fmt: skip
JOINT = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 10, "top_p": 0.8, "typical_p": 0.7},
    {"temperature": 2.0, "min_p": 0.1, "top_p": 0.5},
    {"temperature": 1.5, "top_p": 0.95, "typical_p": 0.4},
    {"logit_bias": BIAS, "repetition_penalty": 1.5, "temperature": 1.25},
    {"logit_bias": {3: 9.0, 19: -9.0}, "repetition_penalty": 0.5, "top_k": 5},
    {"allowed_token_ids": ALLOWED, "bad_words": True, "min_tokens": 9, "logit_bias": BIAS, "top_p": 0.9},
    {"bad_words": True, "repetition_penalty": 2.0, "min_p": 0.02},
    {
        "allowed_token_ids": ALLOWED, "bad_words": True, "min_tokens": 9, "logit_bias": BIAS, "repetition_penalty": 1.2,
        "temperature": 3.0, "min_p": 0.01, "top_k": 12, "top_p": 0.97, "typical_p": 0.9,
    },
)  # fmt: skip

Step = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Write tests/golden/sampling.json, one case per line."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    asked = [(params, False) for params in SINGLE + JOINT] + [(params, True) for params in TIED]
    lines = [json.dumps(record(seed, params, ties), separators=(",", ":")) for seed, (params, ties) in enumerate(asked)]
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    ANSWERS.write_text(f'{{"versions": {versions},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")
    print(f"{len(lines)} cases in {ANSWERS}")


def record(seed: int, params: dict[str, Any], ties: bool) -> dict[str, Any]:
    """Return one case, with the fields of `tests.golden.sampling.SamplingCase`."""
    scores = torch.tensor(logits(seed, ties))[None]
    for step in steps(params):
        scores = step(scores)
    if scores.dtype != torch.float64:
        raise SystemExit(f"{params}: a processor returned {scores.dtype} instead of float64")
    return {
        "seed": seed, "ties": ties, "params": {name: value for name, value in params.items() if name != "bad_words"},
        "prompt_ids": PROMPT, "output_ids": OUTPUT, "stop_ids": STOP,
        "bad_word_ids": BAD_WORDS if "bad_words" in params else [],
        "scores": [None if math.isinf(score) else round(score, 12) for score in scores[0].tolist()],
    }  # fmt: skip


def steps(params: dict[str, Any]) -> list[Step]:
    """Return the processors in vLLM's order."""
    whole, output = torch.tensor([PROMPT + OUTPUT]), torch.tensor([OUTPUT])
    made: list[Step] = []

    def add(ids: torch.Tensor, processor: transformers.LogitsProcessor) -> None:
        made.append(lambda scores: processor(ids, scores))

    if "allowed_token_ids" in params:
        add(whole, processors.PrefixConstrainedLogitsProcessor(lambda *_: params["allowed_token_ids"], 1))
    if "bad_words" in params:
        add(output, processors.NoBadWordsLogitsProcessor(BAD_WORDS))
    if "min_tokens" in params:
        add(whole, processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), params["min_tokens"], STOP))
    if "logit_bias" in params:
        add(whole, processors.SequenceBiasLogitsProcessor([[[token], b] for token, b in params["logit_bias"].items()]))
    if "repetition_penalty" in params:
        add(whole, processors.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "temperature" in params:
        add(whole, processors.TemperatureLogitsWarper(params["temperature"]))
    if "min_p" in params:
        add(whole, processors.MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        add(whole, processors.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        add(whole, processors.TopPLogitsWarper(params["top_p"]))
    if "typical_p" in params:
        add(whole, processors.TypicalLogitsWarper(params["typical_p"]))
    return made


if __name__ == "__main__":
    main()
