"""Speed of reading GGUF files: weights per second by type, and the header of a file with a large vocabulary.

    python benchmarks/gguf_reading.py
"""

import argparse
import platform
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

from jpaged.loading.gguf_file import GgufFile, numbers, supported_types

ROWS, COLUMNS = 4096, 4096
TOKENS = 150_000  # number of tokens, and of merges: about Qwen2's vocabulary


def seconds_to_dequantise(kind: str) -> float:
    """Return the minimum of two runs on a random tensor of ROWS x COLUMNS."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // block * size), np.uint8)
    times = []
    with np.errstate(all="ignore"):
        for _ in range(2):
            start = time.perf_counter()
            numbers(data, kind).astype(np.float32)  # also reads types that are views of the file
            times.append(time.perf_counter() - start)
    return min(times)


def write_vocabulary(path: Path) -> None:
    """Write a file with a large vocabulary and one small tensor."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    writer.add_token_merges([f"t{i} t{i + 1}" for i in range(TOKENS)])
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(f"{platform.machine()}, numpy {np.__version__}, one thread, {ROWS} x {COLUMNS} weights to float32")
    for kind in supported_types():
        seconds = seconds_to_dequantise(kind)
        print(f"{kind:8} {seconds:6.3f} s {ROWS * COLUMNS / seconds / 1e6:6.0f} million weights a second")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path)
        for name, read in (("jpaged", GgufFile), ("gguf.GGUFReader", gguf.GGUFReader)):
            start = time.perf_counter()
            read(path)
            print(f"header with {TOKENS} tokens and merges, {name}: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
