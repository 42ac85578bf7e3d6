"""Quality of the demo model with quantised weights and KV, on the whole held-out text: a table and a picture.

    python benchmarks/quality.py --out benchmarks/results/quality.json --plot docs/quantization.png

An engine computes the perplexity. The KL divergence of a token is from the float32 model, over the whole vocabulary.
Bytes count the loaded matrices and their scales. bfloat16 on CPU needs JAX 0.11. The calibration text is from the
demo model's training text: the standard library of the running Python. Exits with 1 if a case exceeds its limits.
"""

import argparse
import dataclasses
import pathlib
import sys
import sysconfig
import tempfile
from typing import Any

import jax
from tqdm import tqdm

from jpaged.cli.bench.quality import HELD_OUT, measure, windows_of
from jpaged.cli.common.results import check_writable, machine, needs_matplotlib, write_json
from jpaged.config import EngineConfig
from jpaged.divergence import divergence
from jpaged.loading import LoadedModel, load_model
from jpaged.quantizing import quantize_checkpoint
from jpaged.runtime.memory.weight_bytes import tree_bytes

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
from demo_corpus import read_corpus

WINDOW = 1024
GROUP_SIZE = 64
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "row_buckets": (8,), "token_buckets": (512,), "max_num_batched_tokens": 512,
    "max_model_len": 1100, "enable_prefix_caching": False,
}  # fmt: skip
CALIBRATION_FILES, CALIBRATION_CHARACTERS = 24, 2500  # characters of each file; 17,408 tokens in all


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table, and its limits."""

    name: str
    options: dict[str, Any]            # of the engine; default dtype: bfloat16
    checkpoint: tuple[str, str] | None = None  # scheme and method of `jpaged quantize`; None: the demo model itself
    most_ratio: float | None = None    # of the perplexity to float32's
    most_bytes: float | None = None    # of the layers' matrices, as a share of their bytes in bfloat16


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of a case."""

    name: str
    tokens: int
    perplexity: float
    ratio: float              # to float32
    mean_kl: float            # nats, as p99_kl
    p99_kl: float
    top1_agreement: float
    matrix_bytes: int         # of the layers
    matrix_share: float       # of their bytes in bfloat16
    embedding_bytes: int      # with the output matrix


# CPUs dequantise fp8 weights at load, unless activations stay float
_FLOAT = {"quantized_activations": "float"}
CASES = (
    Case("float32", {"dtype": "float32"}),
    Case("bf16", {}),
    Case("--quantization int8", {"quantization": "int8"}, None, 1.005, 0.53),
    Case("--quantization w8a8", {"quantization": "w8a8"}, None, 1.005, 0.53),
    Case("--quantization fp8", {"quantization": "fp8"}, None, None, 0.53),
    Case("fp8, activations fp8", {"quantization": "fp8", "quantized_activations": "fp8"}, None, None, 0.53),
    Case("--quantization int4", {"quantization": "int4"}, None, None, 0.30),
    Case("w8a8 rtn", {}, ("w8a8", "rtn"), 1.005, 0.53),
    Case("fp8 rtn", _FLOAT, ("fp8", "rtn"), None, 0.53),
    Case("w4a16 rtn", {}, ("w4a16", "rtn"), None, 0.30),
    Case("w4a16 awq", {}, ("w4a16", "awq"), 1.03, 0.30),
    Case("w4a16 gptq", {}, ("w4a16", "gptq"), 1.03, 0.30),
    Case("w4a8 rtn", {}, ("w4a8", "rtn"), None, 0.30),
    Case("KV int8", {"kv_cache_dtype": "int8"}, None, 1.003),
    Case("KV fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}, None, 1.003),
)


def calibration_text() -> str:
    """The first characters of evenly spread training files."""
    files = read_corpus(pathlib.Path(sysconfig.get_paths()["stdlib"])).train
    step = len(files) // CALIBRATION_FILES
    return "".join(text[:CALIBRATION_CHARACTERS] for text in files[::step])


def write_checkpoints(folder: pathlib.Path, cases: list[Case]) -> None:
    """Write the checkpoints that do not exist yet."""
    missing = [case for case in cases if case.checkpoint and not folder_of(folder, case).exists()]
    text = calibration_text() if missing else ""
    for case in tqdm(missing, desc="quantizing", unit="checkpoint", disable=not missing):
        assert case.checkpoint is not None, "the others were left out"
        scheme, method = case.checkpoint
        quantize_checkpoint(
            "demo", folder_of(folder, case), scheme=scheme, method=method,
            calibration=None if method == "rtn" else text,
            group_size=GROUP_SIZE if scheme.startswith("w4") else None,
        )  # fmt: skip


def folder_of(folder: pathlib.Path, case: Case) -> pathlib.Path:
    assert case.checkpoint is not None, "the case has no checkpoint"
    return folder / "-".join(case.checkpoint)


def weight_bytes(model: LoadedModel) -> tuple[int, int]:
    """Bytes of the layers' matrices, and of the embedding and the output matrix, with their scales."""
    return tree_bytes(model.params["layers"]), tree_bytes([model.params.get(name) for name in ("embed", "lm_head")])


def measured(case: Case, folder: pathlib.Path, text: str, exact: LoadedModel, perplexity: float | None) -> Row:
    """Measure a case. exact: the float32 model. perplexity: of that model; None: the case is that model."""
    model = "demo" if case.checkpoint is None else str(folder_of(folder, case))
    options: dict[str, Any] = {"model": model, "dtype": "bfloat16"} | case.options
    quality = measure(options | SIZES, text, WINDOW)
    loaded = load_model(EngineConfig(**options))
    found = divergence(
        loaded, exact, windows_of(loaded.tokenizer, text, WINDOW), options.get("kv_cache_dtype", "auto")
    )
    matrices, embedding = weight_bytes(loaded)
    return Row(
        case.name, quality.tokens, quality.perplexity, quality.perplexity / (perplexity or quality.perplexity),
        found.mean, found.p99, found.top1_agreement, matrices, matrices / (weight_bytes(exact)[0] / 2), embedding,
    )  # fmt: skip


def failures(cases: list[Case], rows: list[Row]) -> list[str]:
    """Names of the cases that exceed a limit. Prints each comparison."""
    found = []
    for case, row in zip(cases, rows, strict=True):
        for what, value, most in (
            ("ratio", row.ratio, case.most_ratio), ("share of bytes", row.matrix_share, case.most_bytes),
        ):  # fmt: skip
            if most is not None:
                print(f"{case.name}: {what} {value:.4f}, at most {most}: {'ok' if value <= most else 'WORSE'}")
                found += [case.name] if value > most else []
    return found


def plot(rows: list[Row], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.name != "float32"][::-1]
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    title = f"The demo model against float32, {rows[0].tokens:,} tokens"
    figure.suptitle(title, fontsize="medium")
    bars, dots = figure.subplots(1, 2, sharey=True)
    names, places = [row.name for row in rows], range(len(rows))
    change = [100 * (row.ratio - 1) for row in rows]
    bars.barh(places, change, color="#9db8c7")
    for place, value in zip(places, change, strict=True):
        bars.annotate(f"{value:+.2f}", (max(value, 0), place), (3, -3), textcoords="offset points", fontsize="x-small")
    bars.axvline(0, color="grey", linewidth=0.8)
    bars.set_yticks(places, names)
    bars.set_xlabel("change of the perplexity, %", fontsize="small")
    bars.margins(x=0.15)
    dots.plot([row.mean_kl for row in rows], places, "o", color="#28587b", label="mean")
    dots.plot([row.p99_kl for row in rows], places, "s", color="#c8553d", label="P99")
    dots.set_xscale("log")
    dots.set_xlabel("KL divergence of a token, nats", fontsize="small")
    dots.legend(fontsize="small", frameon=False)
    for axes in (bars, dots):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="small")
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure all cases. Prints a row after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="rows in addition to float32")
    parser.add_argument("--characters", type=int, help="score only the first characters of the text")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="folder of the checkpoints; missing ones are written")
    parser.add_argument("--out", type=pathlib.Path, help="write the measurements to this file, as JSON")
    parser.add_argument("--plot", type=pathlib.Path, help="draw a PNG file; needs matplotlib")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    check_writable(arguments.out)
    if arguments.plot is not None:
        needs_matplotlib("plot", arguments.plot)
    text = HELD_OUT.read_text("utf-8")[: arguments.characters]
    cases = [case for case in CASES if not arguments.only or case.name in ("float32", *arguments.only)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.checkpoints or pathlib.Path(temporary)
        write_checkpoints(folder, cases)
        exact = load_model(EngineConfig(model="demo", dtype="float32"))
        print(f"{'':22} perplexity   ratio  mean KL   P99 KL   top-1  bytes  embedding", flush=True)
        for case in tqdm(cases, desc="measuring", unit="row"):
            row = measured(case, folder, text, exact, rows[0].perplexity if rows else None)
            rows.append(row)
            tqdm.write(
                f"{row.name:22} {row.perplexity:10.3f}  {row.ratio:6.4f}  {row.mean_kl:7.2g}  {row.p99_kl:7.2g}  "
                f"{100 * row.top1_agreement:5.2f}%  {row.matrix_share:5.3f}  {row.embedding_bytes / 1e6:6.2f} MB",
                file=sys.stdout,
            )
            sys.stdout.flush()
            figures = [dataclasses.asdict(row) for row in rows]
            write_json(arguments.out, {"window": WINDOW, "rows": figures, "machine": machine()})
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    return 1 if failures(cases, rows) else 0


if __name__ == "__main__":
    sys.exit(main())
