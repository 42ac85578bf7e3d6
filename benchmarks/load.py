"""Seconds to load a model: from safetensors files, from a converted folder, and from that with Orbax's own handler.

    python benchmarks/load.py [--model FOLDER] [--rounds 7] [--dtypes bfloat16 float32]

Without --model it uses a Llama of random numbers, 0.86 GB in bfloat16. Every load runs in its own process, and the
three ways take turns. A time runs from after `import jax` until all arrays are on the device, so it includes the import
of Orbax. The files are in the page cache from the second round on, so the first round is not counted. Medians are
printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jpaged.cli.results import machine
from jpaged.loading.convert import convert

HIDDEN, INTERMEDIATE, LAYERS, VOCAB, HEADS, KV_HEADS = 1024, 4096, 24, 32000, 16, 4

LOAD = """
import logging, sys, time
import jax
jax.devices()
import jpaged.loading
from jpaged.config import EngineConfig
logging.disable(logging.WARNING)
start = time.perf_counter()
model = jpaged.loading.load_model(EngineConfig(model=sys.argv[1], dtype=sys.argv[2]))
jax.block_until_ready(model.params)
print(time.perf_counter() - start)
"""

# Loads the converted folder with Orbax's own array handler.
OWN_HANDLER = """
import sys, time
import jax
import numpy as np
jax.devices()
import jpaged.loading
from jpaged.models.families import spec_of
from jpaged.models.spec import param_shapes
from jpaged.loading.checkpoint import read_json
from pathlib import Path
folder = Path(sys.argv[1])
start = time.perf_counter()
import orbax.checkpoint as ocp
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
shapes = param_shapes(spec_of(read_json(folder / "config.json")), jax.numpy.dtype(sys.argv[2]))
target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
jax.block_until_ready(ocp.StandardCheckpointer().restore(folder / "params", target))
print(time.perf_counter() - start)
"""


def write_llama(folder: Path) -> None:
    """Write a checkpoint of random numbers."""
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        rows = {"q_proj": HIDDEN, "k_proj": kv_rows, "v_proj": kv_rows, "o_proj": HIDDEN}
        shapes |= {f"model.layers.{i}.self_attn.{name}": (n, HIDDEN) for name, n in rows.items()}
        shapes |= {f"model.layers.{i}.mlp.{name}": (INTERMEDIATE, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"model.layers.{i}.mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"model.layers.{i}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    save_file(
        {f"{n}.weight": rng.standard_normal(s, dtype="f4").astype(ml_dtypes.bfloat16) for n, s in shapes.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def seconds(code: str, folder: Path, dtype: str) -> float:
    """Return the seconds of one load in its own process."""
    done = subprocess.run([sys.executable, "-c", code, str(folder), dtype], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: a Llama of random numbers")
    parser.add_argument("--rounds", type=int, default=7, help="counted loads of each way (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="dtypes to load with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source, converted = args.model or Path(scratch, "llama"), Path(scratch, "converted")
        if args.model is None:
            source.mkdir()
            write_llama(source)
        size = convert(str(source), converted).num_bytes
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(f"{size / 1e9:.2f} GB, {args.rounds} rounds; median, ratio to safetensors, and all times sorted\n")
        for dtype in args.dtypes:
            ways = {"safetensors": (LOAD, source), "converted": (LOAD, converted)}
            ways["Orbax's own"] = (OWN_HANDLER, converted)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for round_number in range(args.rounds + 1):
                for name, (code, folder) in ways.items():
                    taken = seconds(code, folder, dtype)
                    if round_number:
                        times[name].append(taken)
            base = statistics.median(times["safetensors"])
            for name, values in times.items():
                median, each = statistics.median(values), " ".join(f"{value:.2f}" for value in sorted(values))
                print(f"{dtype:9} {name:12} {median:6.2f} s {median / base:6.2f} x   ({each})")


if __name__ == "__main__":
    main()
