"""Matmuls with quantised weights on an NVIDIA GPU: checks against the reference on CPU, and times.

    python benchmarks/quantized_kernels.py --check                   # only compare with the reference
    python benchmarks/quantized_kernels.py --out FILE.json           # check, then measure: about 2 minutes on a GPU
    python benchmarks/quantized_kernels.py --tiny                    # small matrices on any machine: a rehearsal

1. quantized_dot: int8, int4, fp8 and fp4, with activations in float, int8 or fp8, and 1 to 300 rows. The reference runs
   on the CPU in float32. Each call runs 20 times: different bits would mean a race.
2. quantized_grouped_dot and grouped_dot: matrices of experts.
3. Times of a matrix of 4,096 inputs and 14,336 outputs for 1 to 2,048 rows, and of XLA's bf16 matmul.

The loop of a measurement cycles through several matrices, more than any cache holds.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernels import chained
from timing import seconds, sentence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_kernels import QuantizedWeight, grouped_dot, quantized_dot, quantized_grouped_dot
from pallas_kernels.quantized_dot.weight import RowsWeight
from tests.kernels.quantized_cases import Case

# |out - reference| / |reference|. GPUs do not round divisions exactly, so a number of x halfway between two codes may
# get either. With the same rows, a scale that is one bit larger changes int8 by 1e-3, and fp8 by 8e-3.
LIMITS = {"float": 1e-5, "int8": 2e-3, "fp8": 1e-2}
ROUNDED = 4e-3  # where weights or results are rounded to bfloat16
KINDS = {
    "int8": Case("int8", 0),
    "int8, groups of 128, zeros": Case("int8", 0, 128, zeros=True),
    "int8 x int8": Case("int8", 0, activations="int8"),
    "int4, groups of 128, zeros": Case("int4", 0, 128, zeros=True),
    "int4, groups of 32, float16": Case("int4", 0, 32, dtype="float16"),
    "int4 x int8, groups of 128": Case("int4", 0, 128, activations="int8"),
    "int4, mins, supergroups": Case("int4", 0, 32, mins=True, outer=4, scales="uint8"),
    "fp8, groups of 128": Case("fp8", 0, 128, scales="float32"),
    "fp8 x fp8, groups of 128": Case("fp8", 0, 128, scales="float32", activations="fp8"),
    "fp8 x fp8": Case("fp8", 0, scales="float32", activations="fp8"),
    "fp4, groups of 32": Case("fp4", 0, 32),
    "fp4, groups of 16, fp8 scales": Case("fp4", 0, 16, scales="float8_e4m3fn", outer=1),
}
GROUPED = ("int8", "int4, groups of 128, zeros", "fp8 x fp8, groups of 128", "fp4, groups of 32")
MEASURED = (
    "int8", "int8 x int8", "int4, groups of 128, zeros", "fp8, groups of 128", "fp8 x fp8, groups of 128",
    "fp4, groups of 32",
)  # fmt: skip
RUNS = 20


def drawn(rows: int, case: Case) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rows).standard_normal((rows, case.inputs)), case.dtype)


def compared(
    call: Callable[..., jax.Array], reference: Callable[..., jax.Array], arguments: tuple
) -> tuple[float, bool]:
    """(relative difference from the reference on CPU, True if all runs on the device had the same bits)."""
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(reference(*jax.device_put(arguments, jax.devices("cpu")[0])), np.float64)
    run = jax.jit(call)
    first, *others = (np.asarray(run(*arguments), np.float64) for _ in range(RUNS))
    difference = float(np.linalg.norm(first - expected) / np.linalg.norm(expected))
    return difference, all((first == other).all() for other in others)


def check(name: str, case: Case, rows: int, make: Callable[[Case, int], tuple[Any, ...]]) -> dict[str, Any]:
    """Run a check and print its line. Returns the result. make(case, rows): call, reference and arguments."""
    found: dict[str, Any] = {"case": name, "rows": rows}
    try:
        difference, same = compared(*make(case, rows))
        rounded = jax.default_backend() == "cpu" or name.startswith("experts")
        limit = ROUNDED if rounded else LIMITS[case.activations]
        found |= {"difference": difference, "same_bits": same, "ok": difference <= limit and same}
        text = f"{difference:.1e}, limit {limit:.0e}{'' if same else ', OTHER BITS IN EACH RUN'}"
    except Exception as error:  # compiler errors as well; continue with the others
        text = sentence(error)
        found |= {"error": text, "ok": False}
    print(f"  {name:42}{rows:5} rows: {text}{'' if found['ok'] else '  WRONG'}", flush=True)
    return found


def plain(case: Case, rows: int) -> tuple[Any, ...]:
    """quantized_dot."""
    dot = functools.partial(quantized_dot, dtype=jnp.float32)
    arguments = drawn(rows, case), RowsWeight.of(case.drawn()), rows
    return dot, functools.partial(dot, implementation="reference"), arguments


def grouped(case: Case, rows: int) -> tuple[Any, ...]:
    """quantized_grouped_dot of 5 blocks, which are all used."""
    case = dataclasses.replace(case, matrices=4)
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((5, rows, case.inputs)), case.dtype)
    arguments = x, RowsWeight.of(case.drawn()), jnp.array([2, 2, 0, 3, 1], jnp.int32), jnp.int32(5)
    return quantized_grouped_dot, functools.partial(quantized_grouped_dot, implementation="reference"), arguments


def grouped_bf16(case: Case, rows: int) -> tuple[Any, ...]:
    """grouped_dot of 5 blocks."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((5, rows, case.inputs)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((4, case.outputs, case.inputs)) * case.inputs**-0.5, jnp.bfloat16)
    arguments = x, weight, jnp.array([2, 2, 0, 3, 1], jnp.int32), jnp.int32(5)
    return grouped_dot, functools.partial(grouped_dot, implementation="reference"), arguments


def checks(tiny: bool) -> list[dict[str, Any]]:
    inputs, outputs = (256, 128) if tiny else (4096, 1024)
    sized = {name: dataclasses.replace(case, inputs=inputs, outputs=outputs) for name, case in KINDS.items()}
    print("quantized_dot:", flush=True)
    some = (5,) if tiny else (1, 17, 300)
    found = [check(name, case, rows, plain) for name, case in sized.items() for rows in some]
    print("quantized_grouped_dot and grouped_dot:", flush=True)
    blocks = (16,) if tiny else (16, 64)
    found += [check(f"experts, {name}", sized[name], rows, grouped) for name in GROUPED for rows in blocks]
    return [*found, *(check("experts, bf16", sized["int8"], rows, grouped_bf16) for rows in blocks)]


def random_weight(case: Case, key: jax.Array) -> QuantizedWeight:
    """Random codes and scales on the device."""
    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.uint8:
            return jax.random.bits(key, shape.shape, jnp.uint8)
        if shape.dtype == jnp.int8:
            return jax.random.randint(key, shape.shape, -127, 128, jnp.int8)
        return jax.random.uniform(key, shape.shape, jnp.float32, 0.001, 0.002).astype(shape.dtype)

    return jax.jit(lambda: jax.tree.map(fill, case.shapes()))()


def next_x(dot: Callable[[jax.Array, Any], jax.Array], x: jax.Array, weight: Any) -> jax.Array:
    """Compute the x of the next call, which depends on the result of this call."""
    out = lax.optimization_barrier(dot(x, weight))
    return x + out[:, : x.shape[1]] * jnp.asarray(1e-6, x.dtype)


def measure(tiny: bool, repeats: int, end: float) -> dict[str, Any]:
    """Seconds per call by kind and rows, and bytes of the weights."""
    inputs, outputs, layers = (256, 512, 2) if tiny else (4096, 14336, 6)
    keys = jax.random.split(jax.random.key(0), layers)
    found: dict[str, Any] = {}

    def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))

    def quantised(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_dot(x, weight, x.shape[0])

    for name in ("bf16", *MEASURED):
        times: dict[str, Any] = {}
        if name == "bf16":
            make = jax.jit(lambda key: jax.random.normal(key, (outputs, inputs), jnp.bfloat16) * inputs**-0.5)
            weights, dot = tuple(make(key) for key in keys), dense
        else:
            case = dataclasses.replace(KINDS[name], inputs=inputs, outputs=outputs)
            weights, dot = tuple(random_weight(case, key) for key in keys), quantised
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[0]))
        for rows in (1,) if tiny else (1, 16, 64, 256, 2048):
            if time.monotonic() > end:
                break
            x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
            one = max(moved / 3e12, 2 * rows * inputs * outputs / 3e14)
            turns = 1 if tiny else max(1, round(0.01 / one / layers))
            step = functools.partial(next_x, dot)
            try:
                times[str(rows)] = seconds(chained(step, turns), (x, weights), turns * layers, repeats)
                middle = statistics.median(times[str(rows)])
                text = f"{middle * 1e6:9.1f} us {moved / middle / 1e9:8,.0f} GB/s of weights"
                text += f" {2 * rows * inputs * outputs / middle / 1e12:8.1f} Tflop/s"
            except Exception as error:
                text = times[str(rows)] = sentence(error)
            print(f"  {name:42}{rows:5} rows {text}", flush=True)
        found[name] = {"weight_bytes": moved, "seconds": times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="only compare with the reference")
    only.add_argument("--measure", action="store_true", help="only measure")
    parser.add_argument("--tiny", action="store_true", help="small matrices: a rehearsal without a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=4.0, help="start no measurement after this time (default: 4)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of the results")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "tiny": args.tiny,
    }  # fmt: skip

    def keep(**parts: Any) -> None:
        record.update(parts)
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    print(f"{record['device']}, JAX {record['jax']}", flush=True)
    bad: list[dict[str, Any]] = []
    if not args.measure:
        keep(checks=checks(args.tiny))
        bad = [found for found in record["checks"] if not found["ok"]]
    if not args.check:
        keep(times=measure(args.tiny, args.repeats, end))
    if bad:
        raise SystemExit(f"{len(bad)} of {len(record['checks'])} checks failed")


if __name__ == "__main__":
    main()
