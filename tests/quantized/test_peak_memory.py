"""Host memory while a bf16 checkpoint is quantised to 4 bits: little more than the quantised weights."""

import pathlib
import subprocess
import sys
import time

import pytest

from tests.support.hollow_checkpoint import write_headers

LAYERS, MIB = 20, 2**20
LOAD = """
import sys
from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.runtime.memory.weight_bytes import tree_bytes
loaded = load_model(EngineConfig(model=sys.argv[1], quantization="int4"))
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(tree_bytes(loaded.params), *(1024 * int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")))
"""


def write_llama(folder, hidden, intermediate, layers):
    """A Llama without data. Returns the bytes of a layer in bf16."""
    folder.mkdir()
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "intermediate_size": intermediate, "num_attention_heads": hidden // 64,
        "vocab_size": 512, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes = {"model.embed_tokens": (512, hidden), "lm_head": (512, hidden), "model.norm": (hidden,)}
    matrices = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}, "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in matrices.items()}
    write_headers(folder, values, {f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()})
    return 2 * (4 * hidden * hidden + 3 * hidden * intermediate)


def load(folder):
    """Load in a child.

    Returns the bytes of its weights, and its resident anonymous and file memory: at the end, and the largest.
    """
    child = subprocess.Popen([sys.executable, "-c", LOAD, str(folder)], stdout=subprocess.PIPE, text=True)
    most = {"RssAnon": 0, "RssFile": 0}
    status = pathlib.Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        for name in most:
            most[name] = max(most[name], 1024 * int(lines.get(name, "0 kB").split()[0]))
        time.sleep(0.001)
    assert child.returncode == 0
    size, *end = map(int, child.stdout.read().split())
    return size, end, list(most.values())


@pytest.mark.slow  # loads 671 MB, in two children
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs Linux")
def test_loading_needs_the_quantised_size_and_two_layers(tmp_path):
    """Anonymous memory: the interpreter, JAX and its compiler, the quantised weights, and less than two bf16 layers.

    The first is the memory that a child keeps which has loaded one such layer, less its weights. Mapped pages of the
    file are released after each tensor, so they are less than a layer.
    """
    write_llama(tmp_path / "one", 1024, 4096, 1)
    layer = write_llama(tmp_path / "all", 1024, 4096, LAYERS)
    size, (kept, mapped), _ = load(tmp_path / "one")
    base = kept - size
    size, _, (peak, files) = load(tmp_path / "all")
    print(
        f"weights {size / MIB:.0f} MiB, of {LAYERS} layers of {layer / MIB:.0f} MiB in bf16; interpreter, JAX and "
        f"compiler {base / MIB:.0f} MiB; peak {peak / MIB:.0f} MiB, {(peak - base - size) / layer:.2f} layers more; "
        f"mapped {(files - mapped) / MIB:.0f} MiB"
    )  # fmt: skip
    assert size < 0.3 * LAYERS * layer
    assert peak < base + size + 2 * layer
    assert files < mapped + layer
