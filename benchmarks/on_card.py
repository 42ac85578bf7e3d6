"""Everything to run on an NVIDIA card: first what must be right, then figures.

    python benchmarks/on_card.py --out FOLDER                      # all of it, about 25 minutes
    python benchmarks/on_card.py --out FOLDER --only kernels demo  # some of the stages
    python benchmarks/on_card.py --out FOLDER --minutes 6          # start nothing that could end later

Checks run at the same time, each in a process with a part of the card's memory. Figures run one after the other. Every
stage has a time limit and a log in the folder, and a stage that fails stops no other. The last lines are a table.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = (sys.executable, "-u")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, and how much of the card it needs. memory: part of the card; 0 leaves it to the command."""

    command: tuple[str, ...]
    limit: int            # seconds
    memory: float = 0.0
    flags: str = ""       # XLA_FLAGS

    def environment(self, out: pathlib.Path) -> dict[str, str]:
        """Variables of the process."""
        found = dict(os.environ, JAX_PLATFORMS="cuda,cpu", PYTHONUNBUFFERED="1", TQDM_MININTERVAL="10")
        found["JAX_COMPILATION_CACHE_DIR"] = str(out / "programs")
        if self.memory:
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.memory)
        return found | ({"XLA_FLAGS": self.flags} if self.flags else {})


def families(*variants: str) -> Stage:
    """Models of tests/golden in float32, against Transformers' answers. XLA's products are not tuned: it takes time."""
    rest = ("--sizes", "1", "--stages", "1", "--contexts", "1", "--variants", *variants)
    return Stage((*PYTHON, str(HERE / "parallel_matrix.py"), *rest), 200, 0.05, "--xla_gpu_autotune_level=0")


CHECKS = {
    "kernels": Stage((*PYTHON, str(HERE / "kernels.py"), "--check"), 200, 0.08),
    "quantized": Stage((*PYTHON, str(HERE / "quantized_kernels.py"), "--check"), 200, 0.08),
    "demo": Stage((*PYTHON, "-m", "jpaged", "generate", "--model", "demo"), 200, 0.06),
    "same": Stage((*PYTHON, str(HERE / "same_on_card.py")), 200, 0.06),
    "families-1": families("llama", "bloom", "olmo3"),
    "families-2": families("qwen3-moe", "gemma3"),
    "families-3": families("deepseek-v3", "falcon-7b"),
    "families-4": families("gpt-oss", "mistral-window"),
    "families-5": families("gemma2", "phi3", "opt-125m"),
}


def figures(out: pathlib.Path) -> dict[str, Stage]:
    """Stages that need the card for themselves."""
    steps = (*PYTHON, str(HERE / "steps.py"), "--out", str(out / "steps.jsonl"))
    return {
        "steps-qwen": Stage((*steps, "--only", "qwen3-0.6b"), 400),
        "steps-llama": Stage((*steps, "--only", "llama-3.1-8b"), 400),
        "attention": Stage((*PYTHON, str(HERE / "kernels.py"), "--measure", "--out", str(out)), 480),
        "products": Stage((*PYTHON, str(HERE / "quantized_kernels.py"), "--measure", "--out",
                           str(out / "quantized_kernels.json")), 240),
        "tune-gated": Stage((*PYTHON, str(HERE / "tune_kernels.py"), "--only", "gated_dot", "--minutes", "4",
                             "--gated-file", str(out / "gated_tuning.json")), 300),
        "tune-llama": Stage((*PYTHON, str(HERE / "tune_kernels.py"), "--only", "llama-3-8b", "--minutes", "4",
                             "--file", str(out / "tuning.json")), 300),
    }  # fmt: skip


def run(name: str, stage: Stage, out: pathlib.Path) -> str:
    """Run a stage. Returns a line of the table."""
    began = time.monotonic()
    log = out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            stage.command, stdout=file, stderr=subprocess.STDOUT, env=stage.environment(out), cwd=HERE.parent
        )
        try:
            ended = f"exit {process.wait(stage.limit)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = "cut off"
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    line = f"{name:14} {ended:8} {time.monotonic() - began:5.0f} s  {lines[-1][:120] if lines else ''}"
    print(line, flush=True)
    return line


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of logs and results")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="some stages; default: all")
    parser.add_argument("--minutes", type=float, default=60, help="start no figures after this time (default: 60)")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    late = figures(args.out)
    if unknown := set(args.only or ()) - {*CHECKS, *late}:
        parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {', '.join((*CHECKS, *late))}")
    chosen = args.only or [*CHECKS, *late]
    with concurrent.futures.ThreadPoolExecutor(len(CHECKS)) as pool:
        list(pool.map(lambda name: run(name, CHECKS[name], args.out), [name for name in chosen if name in CHECKS]))
    for name in (name for name in chosen if name in late):
        left = end - time.monotonic()
        if left < 20:
            print(f"{name:14} left out: {args.minutes:g} minutes are over")
            continue
        run(name, dataclasses.replace(late[name], limit=min(late[name].limit, int(left))), args.out)


if __name__ == "__main__":
    main()
