"""Run all checks, then all measurements, on an NVIDIA GPU.

    python benchmarks/on_card.py --out FOLDER                      # all stages, about 25 minutes
    python benchmarks/on_card.py --out FOLDER --only kernels demo  # some of the stages
    python benchmarks/on_card.py --out FOLDER --minutes 6          # end measurements after 6 minutes

Checks run at the same time, each in a process with a share of the GPU's memory. Measurements run one after the other.
Every stage has a time limit and a log in the folder, and prints one line. A failed stage does not stop the others.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = (sys.executable, "-u")


QWEN = {  # Qwen3 0.6B
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command and its limits. memory: share of the GPU's memory; 0: the command decides."""

    command: tuple[str, ...]
    limit: int            # seconds
    memory: float = 0.0
    flags: str = ""       # XLA_FLAGS

    def environment(self, out: pathlib.Path) -> dict[str, str]:
        found = dict(os.environ, JAX_PLATFORMS="cuda,cpu", PYTHONUNBUFFERED="1", TQDM_MININTERVAL="10")
        found["JAX_COMPILATION_CACHE_DIR"] = str(out / "programs")
        if self.memory:
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.memory)
        return found | ({"XLA_FLAGS": self.flags} if self.flags else {})


FAMILIES = (
    ("llama", "bloom", "olmo3"), ("qwen3-moe", "gemma3"), ("deepseek-v3", "falcon-7b"), ("gpt-oss", "mistral-window"),
    ("gemma2", "phi3", "opt-125m"),
)  # fmt: skip


def families(out: pathlib.Path, number: int) -> Stage:
    """Models of tests/golden in float32, against Transformers' answers. XLA does not tune matmuls, to save time."""
    rest = ("--sizes", "1", "--stages", "1", "--contexts", "1", "--output", str(out / f"families-{number}.json"))
    command = (*PYTHON, str(HERE / "parallel_matrix.py"), *rest, "--variants", *FAMILIES[number])
    return Stage(command, 200, 0.05, "--xla_gpu_autotune_level=0")


def checks(out: pathlib.Path) -> dict[str, Stage]:
    """Checks, which share the GPU."""
    quantized = (str(HERE / "quantized_kernels.py"), "--check", "--out", str(out / "quantized_checks.json"))
    return {
        "kernels": Stage((*PYTHON, str(HERE / "kernels.py"), "--check", "--out", str(out)), 300, 0.08),
        "quantized": Stage((*PYTHON, *quantized), 200, 0.08),
        "demo": Stage((*PYTHON, "-m", "jpaged", "generate", "--model", "demo"), 200, 0.06),
        "same": Stage((*PYTHON, str(HERE / "same_on_card.py")), 200, 0.06),
        **{f"families-{number}": families(out, number) for number in range(len(FAMILIES))},
    }


def figures(out: pathlib.Path) -> dict[str, Stage]:
    """Measurements. Each needs the GPU alone."""
    steps = (*PYTHON, str(HERE / "steps.py"), "--out", str(out / "steps.jsonl"), "--trace", str(out / "traces"))
    model = out / "qwen3-0.6b"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(QWEN))
    return {
        "steps-qwen": Stage((*steps, "--only", "qwen3-0.6b"), 400),
        "steps-llama": Stage((*steps, "--only", "llama-3.1-8b"), 400),
        "throughput": Stage((*PYTHON, "-m", "jpaged", "bench", "throughput", "--model", str(model), "--load-format",
                             "dummy", "--num-prompts", "1000", "--input-len", "512", "--output-len", "128",
                             "--max-model-len", "4096", "--output-json", str(out / "throughput.json")), 200),
        "attention": Stage((*PYTHON, str(HERE / "kernels.py"), "--measure", "--out", str(out)), 480),
        "products": Stage((*PYTHON, str(HERE / "quantized_kernels.py"), "--measure", "--out",
                           str(out / "quantized_kernels.json")), 240),
        "tune-gated": Stage((*PYTHON, str(HERE / "tune_kernels.py"), "--only", "gated_dot", "--minutes", "4",
                             "--gated-file", str(out / "gated_tuning.json")), 300),
        "tune-llama": Stage((*PYTHON, str(HERE / "tune_kernels.py"), "--only", "llama-3-8b", "--minutes", "4",
                             "--file", str(out / "tuning.json")), 300),
    }  # fmt: skip


def run(name: str, stage: Stage, out: pathlib.Path) -> None:
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
    print(f"{name:14} {ended:8} {time.monotonic() - began:5.0f} s  {lines[-1][:120] if lines else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of logs and results")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="some stages; default: all")
    parser.add_argument("--minutes", type=float, default=60, help="end measurements after this time (default: 60)")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    first, late = checks(args.out), figures(args.out)
    if unknown := set(args.only or ()) - {*first, *late}:
        parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {', '.join((*first, *late))}")
    chosen = args.only or [*first, *late]
    with concurrent.futures.ThreadPoolExecutor(len(first)) as pool:
        list(pool.map(lambda name: run(name, first[name], args.out), [name for name in chosen if name in first]))
    for name in (name for name in chosen if name in late):
        left = end - time.monotonic()
        if left < 20:
            print(f"{name:14} left out: {args.minutes:g} minutes are over")
            continue
        run(name, dataclasses.replace(late[name], limit=min(late[name].limit, int(left))), args.out)


if __name__ == "__main__":
    main()
