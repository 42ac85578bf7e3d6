"""Finds the fastest tile sizes of the NVIDIA kernels on this GPU, and writes them to the kernels' tuning.json.

    python benchmarks/tune_kernels.py                      # the shapes below, about 5 minutes each on a GPU
    python benchmarks/tune_kernels.py --only llama-3-8b
    python benchmarks/tune_kernels.py --tiny --file /tmp/tuning.json   # a rehearsal on any machine, in interpret mode

For each shape, decode and prefill are tuned separately. The search starts with the rule (`Tiling.by_rule`), changes one
size at a time and keeps changes that are at least 2% faster, until no change is. The time of a tiling is the geometric
mean over the workloads. A tiling that does not compile, or gives other results than XLA, is skipped. Calls are timed as
in benchmarks/kernels.py. 8-bit pages are not tuned, and use the rule. gated_dot is tuned for Llama 3.1 8B with 1, 64,
256 and 2,048 rows. XLA's matmul and activation are chosen if no tiling takes at least 2% less time.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import time
from typing import Any, Protocol

import gated_matmul
import jax
import numpy as np
from kernels import Shape, chained, paged_case, seconds, sentence
from tqdm import tqdm

from pallas_kernels import paged_attention
from pallas_kernels.gated_dot import tiling as gated_tilings
from pallas_kernels.paged_attention import mosaic_gpu, triton
from pallas_kernels.paged_attention import tiling as tilings
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.platforms import compiled_on, has_small_blocks, nvidia_capability

MODELS = {  # query heads, KV heads, head_dim, block size
    "llama-3-8b": (32, 8, 128, 16),
    "qwen2-0.5b": (14, 2, 64, 16),
    "qwen3-30b-a3b": (32, 4, 128, 16),
    "gemma-2-9b": (16, 8, 256, 16),
}
DECODE: dict[str, tuple[Any, ...]] = {
    "decode_keys": (32, 64, 128), "decode_warps": (2, 4, 8), "decode_stages": (1, 2, 3, 4),
    "min_split_keys": (256, 512, 1024),
}  # fmt: skip
PREFILL: dict[str, tuple[Any, ...]] = {
    "prefill_kernel": ("triton", "mosaic_gpu"),  # the second has no sizes to choose
    "prefill_rows": (32, 64, 128, 256), "prefill_keys": (32, 64, 128), "prefill_warps": (4, 8),
    "prefill_stages": (1, 2, 3, 4),
}  # fmt: skip
GATED = {
    "rows": (64, 128, 256), "outputs": (32, 64, 128, 256), "inputs": (32, 64, 128), "warps": (4, 8),
    "stages": (2, 3, 4, 5, 6),
}  # fmt: skip
GAIN = 0.98  # a faster time is below this share of the best time: repeats differ by about 1%


def workloads(model: str, tiny: bool) -> tuple[list[Shape], list[Shape]]:
    """Workloads for decode tilings and for prefill tilings."""
    heads, kv_heads, head_dim, block = MODELS[model]
    if tiny:
        small = functools.partial(Shape, heads=4, kv_heads=2, head_dim=16)
        return [small("decode", (40, 7))], [small("prefill", (64,), chunk=16)]
    real = functools.partial(Shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block)
    decodes = [real("64 rows of 4,096", (4096,) * 64), real("1 row of 32,768", (32768,))]
    return decodes, [real("2,048 tokens on 8,192", (8192,), chunk=2048)]


class Judge:
    """Measures tilings with the same workloads."""

    def __init__(self, shapes: list[Shape], repeats: int) -> None:
        self._cases = [(shape, paged_case(shape)) for shape in shapes]
        self._repeats = repeats
        self._expected: dict[str, Any] = {}
        self.problems: dict[str, str] = {}

    def __call__(self, tiling: Tiling) -> float:
        """Geometric mean of the seconds per call; infinite if the tiling does not run or gives wrong results."""
        times = []
        for shape, case in self._cases:
            kernels = compiled_on("cuda", triton.paged_attention)
            if tiling.prefill_kernel == "mosaic_gpu":
                q, (layer, *_), tables, *_ = case
                reason = mosaic_gpu.refuse_with_triton(jax.devices()[0], q, layer, tables, shape.chunk)
                if reason is not None:
                    self.problems[str(tiling)] = reason
                    return float("inf")
                kernels = mosaic_gpu.with_triton_decode
            attend = functools.partial(_attend, kernels, tiling, shape.head_dim**-0.5, shape.chunk)
            try:
                self._check(shape, case, attend)
                turns = max(1, round(0.01 / (shape.layers * (shape.kv_bytes / 3e12 + shape.flops / 3e14))))
                turns = turns if jax.default_backend() == "gpu" else 1
                measured = seconds(chained(attend, turns), case, turns * shape.layers, self._repeats)
                times.append(statistics.median(measured))
            except Exception as error:  # the tiling does not compile, or its results are wrong
                self.problems[str(tiling)] = sentence(error)
                return float("inf")
        return statistics.geometric_mean(times)

    def _check(self, shape: Shape, case: tuple, attend: Any) -> None:
        q, layers, *rest = case
        if shape.name not in self._expected:
            call = functools.partial(paged_attention, scale=shape.head_dim**-0.5, max_query_len=shape.chunk)
            self._expected[shape.name] = np.asarray(
                jax.jit(functools.partial(call, implementation="xla"))(q, layers[0], *rest), np.float32
            )
        difference = np.abs(np.asarray(jax.jit(attend)(q, layers[0], *rest), np.float32) - self._expected[shape.name])
        if not difference.max() <= 2e-2:
            raise ValueError(f"differs from XLA's by {difference.max():.3g}")


def _attend(kernels: Any, tiling: Tiling, scale: float, max_query_len: int, *arrays: Any) -> Any:
    """The output of kernels with a tiling. arrays: the first fields of AttentionCall."""
    return kernels(AttentionCall(*arrays, scale=scale, max_query_len=max_query_len), tiling=tiling)


class Measure(Protocol):
    """Measures tilings."""

    problems: dict[str, str]  # errors of tilings that do not run

    def __call__(self, tiling: Any) -> float:
        """Seconds per call; infinite if the tiling does not run."""
        ...


def search(
    judge: Measure, start: Any, choices: dict[str, tuple[Any, ...]], name: str, end: float
) -> tuple[Any, float]:
    """The best tiling, and its time as a share of the first tiling's. Raises RuntimeError if no tiling runs."""
    best, best_time = start, judge(start)
    first, seen = best_time, {start}
    candidates = sum(len(values) - 1 for values in choices.values())
    with tqdm(total=candidates, desc=name) as bar:
        improved = True
        while improved:
            improved = False
            for field, value in ((field, value) for field, values in choices.items() for value in values):
                tiling = dataclasses.replace(best, **{field: value})
                if tiling in seen or time.monotonic() > end:
                    continue
                seen.add(tiling)
                bar.total = max(bar.total, len(seen) - 1)
                taken = judge(tiling)
                bar.update()
                if taken < GAIN * best_time:
                    best, best_time, improved = tiling, taken, True
                    bar.set_postfix_str(f"{best_time / first:.2f} of the rule's time")
    # Measure the best once more. If a kernel broke the GPU, nothing runs any more, and no result is kept.
    if not np.isfinite(judge(best)):
        raise RuntimeError(f"{name}: no tiling runs, {judge.problems}")
    return best, best_time / first if np.isfinite(first) else float("nan")


def tune_gated_dot(args: argparse.Namespace, end: float) -> None:
    """Search tiles for gated_dot, compare them with XLA's matmul, and write the choice for each number of rows."""
    device = jax.devices()[0]
    found = json.loads(args.gated_file.read_text("utf-8")) if args.gated_file.exists() else {}
    choices = {"stages": GATED["stages"][:2]} if args.tiny else GATED
    for products in gated_matmul.workloads(args.tiny):
        judge = gated_matmul.Judge(products, args.repeats)
        start = gated_tilings.Tiling.by_rule(products.rows, small_blocks=has_small_blocks())
        share = float("inf")
        best: Any = None
        try:
            best, _ = search(judge, start, choices, products.name, end)
            share = judge(best) / judge.xla_seconds()
        except RuntimeError as error:  # no tiling runs: XLA's matmul remains
            print(f"  {error}")
        for tiling, problem in judge.problems.items():
            print(f"  out: {tiling}: {problem}")
        print(f"{products.name}: {best}, {share:.3f} of XLA's time")
        shapes = found.setdefault(device.device_kind, {}).setdefault(gated_tilings.key(*products.shapes()), {})
        shapes[str(products.rows)] = {
            "tiling": dataclasses.asdict(best) if share < GAIN else None,
            "time_of_xla": round(share, 3) if np.isfinite(share) else None,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
        args.gated_file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(args.gated_file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = [*MODELS, "gated_dot"]
    parser.add_argument("--only", choices=only, help="one shape of attention, or gated_dot; default: all")
    parser.add_argument("--file", type=pathlib.Path, default=tilings.FILE, help="default: %(default)s")
    parser.add_argument(
        "--gated-file", type=pathlib.Path, default=gated_tilings.FILE, help="of gated_dot; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=25.0, help="try no tiling after this time (default: 25)")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few candidates: a rehearsal")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    device = jax.devices()[0]
    if not args.tiny and nvidia_capability(device) is None:
        parser.exit(2, f"{device.device_kind} is not an NVIDIA GPU: there is nothing to tune, except with --tiny\n")
    if args.tiny and (args.file == tilings.FILE or args.gated_file == gated_tilings.FILE):
        parser.exit(2, "--tiny measures nothing: name another --file and --gated-file than the kernels' own\n")
    if args.only in (None, "gated_dot"):
        tune_gated_dot(args, end)
    if args.only == "gated_dot":
        return
    found = json.loads(args.file.read_text("utf-8")) if args.file.exists() else {}
    for model in [args.only] if args.only else list(MODELS)[: 1 if args.tiny else None]:
        decodes, prefills = workloads(model, args.tiny)
        shape = decodes[0]
        q, layers, *_ = paged_case(dataclasses.replace(shape, context=(1,)))
        best = Tiling.by_rule(shape.head_dim, q.dtype.itemsize)
        gains = {}
        for kind, judged, choices in (("decode", decodes, DECODE), ("prefill", prefills, PREFILL)):
            if args.tiny:
                choices = {name: values[:2] for name, values in list(choices.items())[:1]}
            judge = Judge(judged, args.repeats)
            best, gains[kind] = search(judge, best, choices, f"{model}, {kind}", end)
            for tiling, problem in judge.problems.items():
                print(f"  out: {tiling}: {problem}")
        print(f"{model}: {best}; " + ", ".join(f"{kind} {gain:.2f} of the rule's time" for kind, gain in gains.items()))
        found.setdefault(device.device_kind, {})[tilings.key(q, layers[0])] = {
            "tiling": dataclasses.asdict(best),
            # null if the rule's tiling does not run
            "time_of_rules": {kind: round(gain, 3) if np.isfinite(gain) else None for kind, gain in gains.items()},
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
        args.file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(args.file)


if __name__ == "__main__":
    main()
