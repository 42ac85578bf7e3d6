"""Runs Hugging Face Transformers' `generate`: static batches, left padding, SDPA attention, KV cache.

A batch runs until its longest output is complete. Only requested tokens count, which is the cost of static batches.
Decode steps (`--steps`) are not measured, because there is no prefix cache.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common


class Transformers(common.Engine):
    """A causal language model and its `generate`."""

    def __init__(self, args: argparse.Namespace):
        import torch
        import transformers

        self._torch, self._batch_size = torch, args.max_num_seqs
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        torch.set_num_threads(args.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None  # never stop early
        self._model.generation_config.pad_token_id = 0

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        outputs: list[list[int]] = []
        with self._torch.inference_mode():
            for start in range(0, len(requests), self._batch_size):
                outputs += self._batch(requests[start : start + self._batch_size], start, arrivals)
        return outputs

    def _batch(self, requests: Sequence[common.Request], first: int, arrivals: common.Arrivals) -> list[list[int]]:
        width, steps = max(len(r.prompt) for r in requests), max(r.output_len for r in requests)
        ids = self._torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in requests])
        mask = self._torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])

        def token_came(sequences: Any, scores: Any, **others: Any) -> Any:
            """A stopping criterion is called after each token of the batch. This one never stops it."""
            produced = sequences.shape[1] - width
            for index, request in enumerate(requests):
                if produced <= request.output_len:
                    arrivals.add(first + index)
            return self._torch.zeros(len(requests), dtype=self._torch.bool)

        result = self._model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, stopping_criteria=[token_came]
        )
        return [result[i, width : width + request.output_len].tolist() for i, request in enumerate(requests)]


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    parsed = common.parse(arguments)
    if parsed.steps is not None:
        arguments.error("--steps needs a prefix cache, which Transformers' generate does not have")
    common.main(parsed, Transformers)
