"""Runs OpenVINO GenAI's ContinuousBatchingPipeline: continuous batching, paged KV, prefix cache.

`--converted` is a folder made by `optimum-cli export openvino`. OpenVINO chooses the precision of its matmuls: bfloat16
if the CPU supports it.
"""

import argparse
import itertools
from collections.abc import Sequence

import common


class OpenVINO(common.Engine):
    """A pipeline, stepped by hand."""

    def __init__(self, args: argparse.Namespace):
        import openvino_genai

        self._genai = openvino_genai
        self.version = f"openvino-genai {openvino_genai.__version__.partition('-')[0]}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = args.kv_gib or 1
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = args.max_num_seqs
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(args.converted), scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads}
        )
        self._numbers = itertools.count()

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        """Add all requests, and step until they have ended."""
        import numpy as np
        import openvino

        handles = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.output_len
            config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
            prompt = openvino.Tensor(np.array([request.prompt], np.int64))
            handles.append(self._pipeline.add_request(next(self._numbers), prompt, config))
        outputs: list[list[int]] = [[] for _ in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        outputs[index] += output.generated_ids
                        arrivals.add(index, len(output.generated_ids))
        return outputs


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    parsed = common.parse(arguments)
    if parsed.converted is None:
        arguments.error("needs --converted")
    common.main(parsed, OpenVINO)
