"""Memory of each of two processes that load a checkpoint together, and of one that loads it alone.

    python benchmarks/process_memory.py MODEL [--dtype bfloat16] [--output FILE]

Starts `jpaged serve MODEL` as one process and as two, with one CPU device each, and reads /proc when it is ready.
`anonymous` has the weights, the KV pool and the interpreter. `peak` is the largest resident size so far. It counts
pages of the mapped file, which the kernel may drop. Linux only.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.process_chaos import Pair, free_port

MIB = 1024  # KiB


def memory(pid: int) -> dict[str, int]:
    """MiB of a process: anonymous memory, resident size, and its peak."""
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:] + status if line.endswith(" kB")}
    return {name: values[key] // MIB for name, key in
            (("anonymous", "Anonymous"), ("resident", "Rss"), ("peak", "VmHWM"))}  # fmt: skip


def alone(folder: pathlib.Path, model: str, dtype: str) -> dict[str, int]:
    """Memory of one process."""
    log, port = folder / "alone.log", free_port()
    command = [sys.executable, "-m", "jpaged", "serve", model, "--dtype", dtype, "--max-model-len", "256"]
    command += ["--max-num-seqs", "8", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        while "ready: http" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        return memory(process.pid)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows = {"alone": alone(folder, args.model, args.dtype), "demo alone": alone(folder, "demo", args.dtype)}
        pair = Pair(folder, args.model, dtype=args.dtype)
        try:
            pair.wait_until_ready()
            rows |= {f"node {rank} of 2": memory(process.pid) for rank, process in enumerate(pair.processes)}
        finally:
            pair.end()
    print(f"{'process':14}" + "".join(f"{column:>12}" for column in ("anonymous", "resident", "peak")) + "  MiB")
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{row[column]:12}" for column in ("anonymous", "resident", "peak")))
    if args.output:
        args.output.write_text(json.dumps({"command": " ".join(sys.argv), "mib": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
