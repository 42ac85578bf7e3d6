"""64 LoRA adapters of one model, all in use at a time. Run `python examples/many_adapters.py`. Needs `openai`.

It writes random adapters of rank 4 in PEFT's layout, starts `jpaged serve` with room for 16 of them on the device, and
sends requests to all of them at once. `model` chooses the adapter.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from openai import AsyncOpenAI
from safetensors.numpy import save_file

RANK, ALPHA = 4, 8
HIDDEN, KV_SIZE, LAYERS = 256, 128, 6  # of the demo model
WIDTHS = {"q_proj": HIDDEN, "v_proj": KV_SIZE}
PROMPT = "def split_path(path):"


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter with random numbers for q_proj and v_proj of each layer."""
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name, width in WIDTHS.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = random.normal(0, 0.06, (RANK, HIDDEN)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = random.normal(0, 0.2, (width, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(WIDTHS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until all programs are compiled. Raises RuntimeError if the server ends."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("the server has ended: its messages are above")


async def ask_all(url: str, models: list[str], max_tokens: int) -> tuple[list[str], int, float]:
    """Return the answer of each model, the number of their tokens, and the seconds of all requests together."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        start = time.perf_counter()
        made = await asyncio.gather(
            *(
                client.completions.create(model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0)
                for model in models
            )
        )
        seconds = time.perf_counter() - start
    return [one.choices[0].text for one in made], sum(one.usage.completion_tokens for one in made if one.usage), seconds


def main() -> None:
    """Print how long the requests took, and how many different answers came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--max-loras", type=int, default=16, help="adapters on the device at a time")
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"adapter-{number}" for number in range(given.adapters)]
        for seed, name in enumerate(names):
            write_adapter(Path(folder) / name, seed)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "jpaged", "serve", "demo", "--port", str(port), "--enable-lora"]
        command += ["--max-loras", str(given.max_loras), "--max-lora-rank", str(RANK)]
        command += ["--max-cpu-loras", str(max(given.adapters, given.max_loras))]
        command += ["--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--max-model-len", "512"]
        command += ["--row-buckets", "32", "--token-buckets", "128", "--disable-log-stats"]
        command += ["--lora-modules", *(f"{name}={Path(folder) / name}" for name in names)]
        server = subprocess.Popen(command)
        try:
            wait_until_ready(server, url)
            print(f"{'models':>24} {'seconds':>8} {'tokens/s':>9} {'distinct answers':>17}")
            for title, models in (("base model alone", ["demo"] * len(names)), (f"{len(names)} adapters", names)):
                answers, tokens, seconds = asyncio.run(ask_all(url, models, given.max_tokens))
                print(f"{title:>24} {seconds:8.2f} {tokens / seconds:9,.0f} {len(set(answers)):17}")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
