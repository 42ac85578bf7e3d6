"""Runs llama.cpp in this process: one `llama_decode` per step over all running sequences.

llama-cpp-python's own class runs one sequence at a time, so this runner calls the C API. It batches like llama.cpp's
example `parallel`: decodes first, then prompt tokens until the batch is full. A prefix that all prompts share is
computed once and copied to all sequences, as llama.cpp allows. `--converted` is a GGUF file.
"""

import argparse
import ctypes
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import common

BATCH = 2048          # maximum tokens of one llama_decode
MICRO_BATCH = 512     # llama.cpp splits a batch into parts of this size
SHORTEST_PREFIX = 32  # a shorter common prefix is not worth a copy


@dataclasses.dataclass(slots=True)
class Running:
    """A request that owns a sequence of the KV cache."""

    request: int
    sequence: int
    computed: int  # tokens of the prompt and of the output whose KV is in the cache


class LlamaCpp(common.Engine):
    """A model and its context."""

    def __init__(self, args: argparse.Namespace):
        import llama_cpp
        import numpy as np

        self._c, self._np = llama_cpp, np
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        # the callback must stay alive as long as the library may call it
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(args.converted).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"{args.converted} cannot be loaded")
        requests = common.read_requests(args, "requests")
        longest = max(len(request.prompt) + request.output_len for request in requests)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = self._sequences = min(args.max_num_seqs, len(requests))
        params.n_ctx = -(-longest // 256) * 256 * self._sequences
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = args.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        """Run all requests, at most one per sequence at a time."""
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, False)
        prefix = self._compute_prefix(memory, requests)
        outputs: list[list[int]] = [[] for _ in requests]
        waiting, free = list(range(len(requests))), list(range(self._sequences))
        running: list[Running] = []
        while waiting or running:
            while waiting and free:
                running.append(Running(waiting.pop(0), free.pop(0), prefix))
            for each in self._step(running, requests, outputs):
                arrivals.add(each.request)
                if len(outputs[each.request]) == requests[each.request].output_len:
                    running.remove(each)
                    self._c.llama_memory_seq_rm(memory, each.sequence, -1, -1)
                    free.append(each.sequence)
        return outputs

    def _step(
        self, running: list[Running], requests: Sequence[common.Request], outputs: list[list[int]]
    ) -> list[Running]:
        """Advance sequences by one batch, and append to `outputs`. Returns the sequences that have a new token."""
        rows: list[tuple[int, int, int, bool]] = []
        sampled: list[Running] = []
        for each in sorted(running, key=lambda each: each.computed < len(requests[each.request].prompt)):
            tokens = requests[each.request].prompt + outputs[each.request]
            count = min(len(tokens) - each.computed, BATCH - len(rows))
            rows += [
                (tokens[position], position, each.sequence, position == len(tokens) - 1)
                for position in range(each.computed, each.computed + count)
            ]
            each.computed += count
            if count and each.computed == len(tokens):
                sampled.append(each)
        for each, token in zip(sampled, self._decode(rows), strict=True):
            outputs[each.request].append(token)
        return sampled

    def _compute_prefix(self, memory: Any, requests: Sequence[common.Request]) -> int:
        """Compute the prefix that all prompts share and copy it to all sequences. Returns its length, or 0."""
        shared = 0
        if 1 < len(requests) <= self._sequences:
            first = requests[0].prompt
            most = min(len(request.prompt) for request in requests) - 1  # the last token of a prompt gives its logits
            while shared < most and all(request.prompt[shared] == first[shared] for request in requests):
                shared += 1
        if shared < SHORTEST_PREFIX:
            return 0
        for start in range(0, shared, BATCH):
            end = min(start + BATCH, shared)
            self._decode([(requests[0].prompt[position], position, 0, False) for position in range(start, end)])
        for sequence in range(1, len(requests)):
            self._c.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        return shared

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wanted) rows. Returns the greedy token of each wanted row, in order."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._c.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        count = sum(wanted for *_, wanted in rows)
        if not count:
            return []
        logits = self._np.ctypeslib.as_array(self._c.llama_get_logits(self._context), shape=(count, self._vocab))
        return logits.argmax(axis=1).tolist()


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    parsed = common.parse(arguments)
    if parsed.converted is None:
        arguments.error("needs --converted")
    if parsed.steps is not None:
        arguments.error("--steps needs a prefix cache across calls, which this runner does not keep")
    common.main(parsed, LlamaCpp)
