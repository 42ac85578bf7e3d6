"""Speed of embeddings on CPU: jpaged, sentence-transformers (torch) and ONNX Runtime, in turn on the same texts.

    python benchmarks/encoders.py --peer-python PYTHON [--rounds 7]

PYTHON is that of an environment with sentence-transformers, torch, onnxruntime and onnx. Each engine runs in a process
of its own, and waits while another one works. A round is one call of each, from texts to embeddings of length
1: 64 texts of 128 tokens, tokenised by the same tokenizer, in float32. The model has MiniLM's shape (22 million
parameters) and random weights. The peers use the batch size that is fastest in their warm-up, and ONNX Runtime the
faster of the exported graph and the one that its BERT optimizer fuses. Prints for each engine the
median and the minimum of its seconds, the smallest number of seconds that all cores worked for it, and its largest
1 - cosine to sentence-transformers. Then the median of jpaged's ratio to the best peer of the same round. Core-seconds
can be compared on a busy machine.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, VOCABULARY, POSITIONS = 384, 1536, 6, 12, 30_522, 512
TEXTS, TOKENS = 64, 128
BATCHES = (16, 32, 64)  # that the peers try
JPAGED, TORCH, ONNX = "jpaged", "sentence-transformers", "onnxruntime"
Embed = Callable[[list[str]], np.ndarray]


def write_model(folder: Path) -> None:
    """Write a BERT with random weights, a tokenizer of whole words, and Sentence Transformers' files."""
    import safetensors.numpy
    import tokenizers
    import transformers

    rng, tensors = np.random.default_rng(0), {}

    def dense(name: str, out: int, inputs: int) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((out, inputs), np.float32) / np.float32(inputs**0.5)
        tensors[f"{name}.bias"] = rng.standard_normal(out, np.float32) / 10

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + rng.standard_normal(HIDDEN, np.float32) / 10
        tensors[f"{name}.bias"] = rng.standard_normal(HIDDEN, np.float32) / 10

    for name, rows in (("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = rng.standard_normal((rows, HIDDEN), np.float32)
    norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            dense(f"{at}attention.{name}", HIDDEN, HIDDEN)
        norm(f"{at}attention.output.LayerNorm")
        dense(f"{at}intermediate.dense", INTERMEDIATE, HIDDEN)
        dense(f"{at}output.dense", HIDDEN, INTERMEDIATE)
        norm(f"{at}output.LayerNorm")
    dense("pooler.dense", HIDDEN, HIDDEN)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_Normalize"):
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts() -> list[str]:
    """64 texts of 126 words. The tokenizer adds two tokens."""
    ids = np.random.default_rng(1).integers(3, VOCABULARY, (TEXTS, TOKENS - 2))
    return [" ".join(f"w{i}" for i in row) for row in ids]


def jpaged_engine(folder: str) -> Embed:
    """`LLM.embed`. Only the programs for this length are compiled: others would not run."""
    from jpaged import LLM

    llm = LLM(folder, max_model_len=TOKENS, token_buckets=(TOKENS,))
    llm.engine.runner.wait_until_ready()
    return lambda texts: np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])


def torch_engine(folder: str, texts: list[str]) -> Embed:
    """`SentenceTransformer.encode`."""
    model = importlib.import_module("sentence_transformers").SentenceTransformer(folder, device="cpu")
    return fastest(
        [lambda texts, size=size: model.encode(texts, batch_size=size, show_progress_bar=False) for size in BATCHES],
        texts,
    )


def onnx_engine(folder: str, texts: list[str]) -> Embed:
    """ONNX Runtime, with Transformers' tokenizer, and pooling in numpy."""
    import transformers

    onnxruntime, torch = (importlib.import_module(name) for name in ("onnxruntime", "torch"))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    names = ["input_ids", "attention_mask", "token_type_ids"]

    class LastState(torch.nn.Module):
        """The model's last hidden state."""

        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True))).last_hidden_state

    plain, fused = f"{folder}/plain.onnx", f"{folder}/fused.onnx"
    example = tuple(torch.ones((2, TOKENS), dtype=torch.int64) for _ in names)
    axes = {name: {0: "batch", 1: "length"} for name in names}
    torch.onnx.export(
        LastState(), example, plain, input_names=names, output_names=["states"], dynamic_axes=axes, dynamo=False
    )
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    optimizer.optimize_model(plain, model_type="bert", num_heads=HEADS, hidden_size=HIDDEN).save_model_to_file(fused)

    def embed(texts: list[str], session: Any, size: int) -> np.ndarray:
        parts = []
        for first in range(0, len(texts), size):
            inputs = tokenizer(texts[first : first + size], padding=True, return_tensors="np")
            states = session.run(None, {name: inputs[name] for name in names})[0]
            mask = inputs["attention_mask"][..., None].astype(np.float32)
            means = (states * mask).sum(1) / mask.sum(1)
            parts.append(means / np.linalg.norm(means, axis=1, keepdims=True))
        return np.concatenate(parts)

    ways = []
    for path in (plain, fused):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count() or 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        ways += [lambda texts, s=session, size=size: embed(texts, s, size) for size in BATCHES]
    return fastest(ways, texts)


def fastest(ways: list[Embed], texts: list[str]) -> Embed:
    """The way with the smallest minimum of two calls."""

    def seconds(embed: Embed) -> float:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            embed(texts)
            times.append(time.perf_counter() - began)
        return min(times)

    return min(ways, key=seconds)


def child(name: str, folder: str) -> None:
    """Serve one engine: a line in is a call, a line out its seconds of the clock and of all cores.

    The last line in is a path for the embeddings.
    """
    texts = make_texts()
    embed = jpaged_engine(folder) if name == JPAGED else (torch_engine if name == TORCH else onnx_engine)(folder, texts)
    result = embed(texts)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() != "go":
            np.save(line.strip(), result)
            return
        began, worked = time.perf_counter(), time.process_time()
        result = embed(texts)
        print(time.perf_counter() - began, time.process_time() - worked, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable, help="Python with the peers installed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(*given.child)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        children: dict[str, subprocess.Popen[str]] = {}
        for name in (JPAGED, TORCH, ONNX):  # one after another: each warms up alone
            python = sys.executable if name == JPAGED else given.peer_python
            # -P: Transformers imports a module `kernels` if there is one, and benchmarks/kernels.py is not it
            command = [python, "-P", __file__, "--child", name, folder]
            children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if not _read_until(children[name], "ready"):
                raise SystemExit(f"{name} did not start")
        times: dict[str, list[float]] = {name: [] for name in children}
        work: dict[str, list[float]] = {name: [] for name in children}
        for _ in range(given.rounds):
            for name, process in children.items():
                for found, seconds in zip((times, work), map(float, _ask(process, "go").split()), strict=True):
                    found[name].append(seconds)
        vectors = {}
        for name, process in children.items():
            path = f"{folder}/{name}.npy"
            process.communicate(path + "\n")
            vectors[name] = np.load(path).astype(np.float64)
    _report(times, work, vectors)
    return None


def _ask(process: "subprocess.Popen[str]", line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def _read_until(process: "subprocess.Popen[str]", wanted: str) -> bool:
    """Skip what libraries print. False: the process has ended."""
    assert process.stdout is not None
    return any(line.strip() == wanted for line in process.stdout)


def _report(
    times: dict[str, list[float]], work: dict[str, list[float]], vectors: dict[str, np.ndarray]
) -> None:
    print(f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{TEXTS} texts of {TOKENS} tokens, {len(times[JPAGED])} rounds\n")
    print(f"{'engine':24}{'median s':>10}{'minimum s':>11}{'texts/s':>10}{'core-s':>9}{'1 - cosine':>12}")
    for name, each in times.items():
        middle, lengths = statistics.median(each), np.linalg.norm(vectors[name], axis=1)
        cosines = (vectors[name] * vectors[TORCH]).sum(1) / lengths / np.linalg.norm(vectors[TORCH], axis=1)
        numbers = f"{middle:10.3f}{min(each):11.3f}{TEXTS / middle:10.1f}{min(work[name]):9.3f}"
        print(f"{name:24}{numbers}{(1 - cosines).max():12.1e}")
    best = [min(pair) for pair in zip(times[TORCH], times[ONNX], strict=True)]
    ratios = [peer / ours for peer, ours in zip(best, times[JPAGED], strict=True)]
    print(f"\njpaged's speed, relative to the best peer of each round: median {statistics.median(ratios):.2f}")
    print(f"by core-seconds: {min(*work[TORCH], *work[ONNX]) / min(work[JPAGED]):.2f}")


if __name__ == "__main__":
    main()
