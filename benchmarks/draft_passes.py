"""Time of a draft model's proposal on CPU, by the number of drafts: one pass costs the slope.

    python benchmarks/draft_passes.py [--hidden 96] [--layers 2] [--vocab 4096] [--rows 1 8] [--repeats 300]

Random weights in float32. Prints the median microseconds of a whole call with 1, 2, 4 and 8 drafts in each row, and of
one pass. Calls are interleaved in one process.
"""

import argparse
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.spec import DecoderSpec, Rope, WeightLayout, param_shapes
from jpaged.runtime.drafting.draft_model import DraftModelOptions, ProposeShape, compile_draft_model, pack_propose
from jpaged.runtime.drafting.draft_state import DraftSizes, TableColumns, create_draft_state, draft_state_shapes
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, Field
from jpaged.runtime.step.forward import flat_weights

BLOCK, WIDTH, TABLE_ROWS, MOST, LENGTH = 16, 64, 32, 8, 100
COUNTS = (1, 2, 4, 8)


def random_weights(spec: DecoderSpec) -> dict:
    """Weights whose logits are about as peaked as a trained model's."""
    rng = np.random.default_rng(0)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape.shape) * 0.1 + ("norm" in str(path[-1])), shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, param_shapes(spec, jnp.float32))
    return params | {"final_norm": params["final_norm"] * 4}


def measure(spec: DecoderSpec, rows: int, repeats: int) -> dict[int, float]:
    """Median microseconds of a proposal, by the number of drafts."""
    placement, dtype = Placement.single(jax.devices()[0]), np.dtype(np.float32)
    sizes, columns = DraftSizes(2048, BLOCK, TABLE_ROWS, is_head=False), TableColumns(0, WIDTH)
    shape, params = ProposeShape(MOST, 8, BLOCK), random_weights(spec)
    fields = np.zeros((TABLE_ROWS, NUM_FIELDS), np.int32)
    fields[:, Field.LENGTH] = LENGTH
    table = jnp.asarray(fields)
    blocks = jnp.arange(TABLE_ROWS * WIDTH, dtype=jnp.int32).reshape(TABLE_ROWS, WIDTH)
    options = DraftModelOptions(spec, WeightLayout(), columns, "cpu", spec.vocab_size)
    shapes = draft_state_shapes(spec, sizes, dtype=dtype, placement=placement)
    run = compile_draft_model(params, shapes, table, blocks, shape, options=options, placement=placement)
    arrays = create_draft_state(spec, sizes, dtype=dtype, placement=placement).arrays
    nothing, updates = np.zeros(rows, np.int32), np.zeros((0, 3), np.int32)
    packed = {
        count: pack_propose(
            np.arange(rows), np.full(rows, count), nothing, nothing.astype(bool), nothing[:0], updates, shape, columns
        )
        for count in COUNTS
    }
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(repeats):
        for count in COUNTS:
            start = time.perf_counter()
            arrays, drafts = run(flat_weights(params), arrays, table, blocks, packed[count])
            np.asarray(drafts)
            times[count].append((time.perf_counter() - start) * 1e6)
    return {count: statistics.median(each[repeats // 10 :]) for count, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    spec = DecoderSpec(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=8 * args.hidden // 3 // 16 * 16,
        num_layers=args.layers, num_heads=args.hidden // 16, num_kv_heads=args.hidden // 48, head_dim=16,
        max_position=BLOCK * WIDTH, rope=Rope(), tie_embeddings=True,
    )  # fmt: skip
    print(f"JAX {jax.__version__}, {platform.processor() or platform.machine()}; us of a call by drafts, us of a pass")
    for rows in args.rows:
        found = measure(spec, rows, args.repeats)
        calls = " ".join(f"{count}: {value:5.0f}" for count, value in found.items())
        print(f"{rows} rows   {calls}   pass {(found[8] - found[2]) / 6:5.0f}")


if __name__ == "__main__":
    main()
