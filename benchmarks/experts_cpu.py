"""Times of a mixture of experts on CPU: the whole layer, compared with its matmuls alone.

    python benchmarks/experts_cpu.py [--dtype bfloat16] [--experts 64 --per-token 8 --hidden 1024 --intermediate 512]

`dense` is XLA's matmul of each used expert with its tokens' rows, rounded up to 8 rows, without sorting or routing.
Each expert has its own arrays. `experts` is the layer as served, `xla_loop` the same without the native kernel, and
`ragged_dot` with XLA's operation instead of `grouped_dot`. `int8` and `int4` (groups of 64) are the layer with
quantised experts. Runs are interleaved in one process. Prints medians, and the bytes of the experts.
"""

import argparse
import functools
import platform
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.models import experts as moe
from jpaged.models import linear
from jpaged.models.layers import gate, gate_and_up
from jpaged.models.linear import LayerContext
from jpaged.models.quantization import SCHEMES, Quantizer
from jpaged.models.spec import DecoderSpec, Experts, WeightLayout


def dense(spec: DecoderSpec, inputs: list[Any], gate_up: list[Any], down: list[Any]) -> list[Any]:
    """Matmuls of the used experts, with the gate between them."""
    outputs = []
    for x, first, second in zip(inputs, gate_up, down, strict=True):
        context = LayerContext(spec, WeightLayout(), {"gate_up": first, "down": second})
        outputs.append(linear.linear("down", gate(spec, *gate_and_up("gate_up", x, context)), context))
    return outputs


def ragged_dot(x: Any, weights: Any, matrix_of_block: Any, num_blocks_used: Any, **_: Any) -> Any:
    """`grouped_dot`, computed with `lax.ragged_dot_general`."""
    used = jnp.arange(x.shape[0]) < num_blocks_used
    sizes = jnp.zeros(weights.shape[0], jnp.int32).at[matrix_of_block].add(jnp.where(used, x.shape[1], 0))
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(x.reshape(-1, x.shape[2]), weights, sizes, dims)
    return out.reshape(*x.shape[:2], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 64), ("per-token", 8), ("hidden", 1024), ("intermediate", 512), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ragged", action="store_true", help="measure XLA's ragged_dot as well, which is slow")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"JAX {jax.__version__}, {platform.processor() or platform.machine()}, {args.dtype}; {vars(args)}")

    experts = Experts(args.experts, args.per_token, args.intermediate, (True,), renormalise=True)
    spec = DecoderSpec(32, args.hidden, args.intermediate, 1, 8, 8, 64, 64, experts=experts)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]), args.dtype)

    matrices = {
        "router": normal(args.experts, args.hidden),
        "expert_gate_up": normal(args.experts, 2, args.intermediate, args.hidden),
        "expert_down": normal(args.experts, args.hidden, args.intermediate),
    }

    quantised = {}
    for name in ("int8", "int4"):
        quantizer = Quantizer(SCHEMES[name])
        quantised[name] = {leaf: quantizer(leaf, matrix) for leaf, matrix in matrices.items()}
    sizes = {args.dtype: matrices} | quantised
    shown = (f"{name} {sum(a.nbytes for a in jax.tree.leaves(tree)) / 1e6:.1f} MB" for name, tree in sizes.items())
    print(f"experts and router: {', '.join(shown)}")

    def served(params: Any, x: Any) -> Any:
        return moe.sparse_feed_forward(experts, x, LayerContext(spec, WeightLayout(), params))[0]

    for tokens in args.tokens:
        x = normal(tokens, args.hidden) * 30
        _, choice = moe.route(experts, x, LayerContext(spec, WeightLayout(), matrices))
        counts = np.bincount(np.asarray(choice).ravel(), minlength=args.experts)
        used = np.flatnonzero(counts)
        apart = (
            [normal(-(-int(counts[e]) // 8) * 8, args.hidden) for e in used],
            [jnp.array(matrices["expert_gate_up"][e]) for e in used],
            [jnp.array(matrices["expert_down"][e]) for e in used],
        )
        runs: dict[str, Any] = {
            "dense": (jax.jit(functools.partial(dense, spec)), apart),
            "experts": (jax.jit(served), (matrices, x)),
        } | {name: (jax.jit(served), (tree, x)) for name, tree in quantised.items()}
        others = {"xla_loop": functools.partial(linear.grouped_dot, implementation="xla_loop")}
        if args.ragged:
            others["ragged_dot"] = ragged_dot
        for name, product in others.items():
            with mock.patch.object(linear, "grouped_dot", product):
                # a new function, because jit would reuse the trace of `served`
                program = jax.jit(lambda params, x: served(params, x)).lower(matrices, x).compile()
            runs[name] = (program, (matrices, x))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.repeats + 1):
            for name, (call, arguments) in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(call(*arguments))
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first compiles
        shown = ", ".join(f"{n} {1e3 * t:.1f} ms ({t / medians['dense']:.2f})" for n, t in medians.items())
        print(f"{tokens:5} tokens, {len(used)} experts used, {moe.rows_per_block(tokens, experts)} rows: {shown}")


if __name__ == "__main__":
    main()
