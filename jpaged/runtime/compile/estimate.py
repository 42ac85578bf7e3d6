"""Estimates the temporaries of a program without compiling it, for devices whose compiler is not installed.

The estimate errs on the high side. Layers reuse each other's buffers, and the sampler is another program. The factors
were fitted to compiled programs; docs/decisions.md has the ratios.
"""

from typing import TYPE_CHECKING

from jpaged.models.compressed_spec import Compressed, Entries
from jpaged.models.experts import rows_per_block
from jpaged.models.spec import Indexer
from jpaged.runtime.step import compressed_attention
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import PoolShape, SampleShape
from jpaged.runtime.step.sparse_attention import KEYS_ON_CPU, KEYS_PER_STEP, TOKENS_AT_ONCE, TOKENS_ON_CPU
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.paged_attention.triton import ENOUGH_ROWS

if TYPE_CHECKING:
    from jpaged.runtime.compile.blueprint import Blueprint
    from jpaged.runtime.step.program_shapes import Shape

# float32 copies of the logits: the logits, the processed logits, and the sort of the most likely logits.
LOGITS = {"gpu": 4.5, "tpu": 10.0, "cpu": 4.5}
HIDDEN = 6    # copies of [tokens, hidden]: the residual stream, its norm, and float32 copies
TILE_ROWS, KEYS = 16, 128  # tile sizes of the XLA attention
WIDE = 256  # heads wider than this have splits with large results
CHOSEN = 3  # int32 arrays of [tokens, lines]: numbers of lines that a token attends to, and parts of them
SORTED = 8  # arrays of [tokens, keys]: scores, masked scores, and their sort with positions


def estimate_temporaries(blueprint: "Blueprint") -> "tuple[Shape, int]":
    """The program with the most temporaries, and their bytes."""
    forward, *outputs = blueprint.largest_shapes
    assert isinstance(forward, ForwardShape), "the first one"
    hidden = HIDDEN * forward.tokens * blueprint.model.spec.hidden_size * blueprint.dtype.itemsize
    layers = hidden + max(_feed_forward(blueprint, forward), _attention(blueprint, forward))
    sizes: list[tuple[Shape, int]] = [(forward, layers)]
    sizes += [(shape, _logits(blueprint, shape)) for shape in outputs if not isinstance(shape, ForwardShape)]
    return max(sizes, key=lambda size: size[1])


def _logits(blueprint: "Blueprint", shape: SampleShape | PoolShape) -> int:
    """Logits and the sampler's copies, or the vectors of a model that pools."""
    spec = blueprint.model.spec
    copies = 1 if isinstance(shape, PoolShape) else LOGITS[blueprint.placement.platform]
    hidden = HIDDEN * shape.rows * spec.hidden_size * blueprint.dtype.itemsize
    return hidden + int(copies * 4 * shape.rows * spec.output_size)


def _feed_forward(blueprint: "Blueprint", shape: ForwardShape) -> int:
    """Gate, up and their elementwise product, in the widest kind of layer."""
    spec = blueprint.local_spec
    width = 3 if spec.gated else 2
    dense = 0
    if spec.experts is None or not all(spec.experts.layers):
        dense = shape.tokens * width * spec.intermediate_size
    sparse = 0
    if spec.experts is not None:
        pairs = shape.tokens * spec.experts.per_token
        rows = rows_per_block(shape.tokens, spec.experts)
        padded = (pairs // rows + min(spec.experts.num, pairs)) * rows
        sparse = padded * (width * spec.experts.intermediate_size + spec.hidden_size)
        sparse += shape.tokens * width * spec.experts.shared_size
    return max(dense, sparse) * blueprint.dtype.itemsize


def _attention(blueprint: "Blueprint", shape: ForwardShape) -> int:
    """Queries, keys and values, before and after rope, and keys and values that XLA's attention gathers."""
    spec, item = blueprint.local_spec, blueprint.dtype.itemsize
    v_dim = spec.page_v_dim or spec.head_dim
    total = 2 * shape.tokens * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * item
    if spec.indexer is not None:
        total += _choice(blueprint, shape, spec.indexer)
    if spec.compressed is not None:
        total += _lines_and_entries(blueprint, shape, spec.compressed)
    if not blueprint.implementation.startswith("xla"):
        return total + (_splits(blueprint, shape) if blueprint.implementation == "triton" else 0)
    single = spec.indexer is not None or spec.compressed is not None  # each token is a row
    tile = 1 if shape.is_decode or single else max(1, TILE_ROWS // spec.q_per_kv)
    padded = max(TILE_ROWS, -(-spec.q_per_kv // 8) * 8)
    tiles = -(-shape.tokens // tile) + min(shape.rows, shape.tokens)
    at_once = min(tiles, TILE_ROWS) if blueprint.implementation == "xla_loop" else tiles
    a_tile = spec.num_kv_heads * padded * (spec.head_dim * item + v_dim * item)
    gathered = 3 * KEYS * (spec.head_dim + v_dim) * item // 2
    softmax = padded * (3 * v_dim + 2 * KEYS) * 4
    return total + tiles * a_tile + at_once * spec.num_kv_heads * (gathered + softmax)


def _splits(blueprint: "Blueprint", shape: ForwardShape) -> int:
    """Results of splits of long rows in a decode. They are large with wide heads only."""
    spec, limits = blueprint.local_spec, blueprint.limits
    head_dim = max([spec.head_dim, *(kv.head_dim for kv in spec.layer_kv)])
    if head_dim <= WIDE or spec.indexer is not None:
        return 0
    tiling = Tiling.by_rule(head_dim, blueprint.dtype.itemsize, q_per_kv=spec.q_per_kv)
    keys, rows = limits.width * limits.block_size, shape.rows
    if spec.compressed is not None:  # each token is a row, and many rows have no splits
        keys, rows = _most_lines(blueprint, spec.compressed), min(shape.tokens, ENOUGH_ROWS)
    splits = tiling.splits(keys, None, spec.num_kv_heads)
    return splits * rows * spec.num_heads * (spec.page_v_dim or head_dim) * 4 if splits > 1 else 0


def _choice(blueprint: "Blueprint", shape: ForwardShape, indexer: Indexer) -> int:
    """Scores of all keys of a block table, their sort, and the chosen slots of each token: `rows_by_token`."""
    on_cpu = blueprint.implementation in ("cpu", "xla_loop")
    at_once = TOKENS_ON_CPU if on_cpu else min(TOKENS_AT_ONCE, shape.tokens)
    keys = blueprint.limits.width * blueprint.limits.block_size
    step = min(keys, KEYS_ON_CPU if on_cpu else KEYS_PER_STEP)
    scored = step * (3 * 4 * indexer.heads + 2 * indexer.head_dim * blueprint.dtype.itemsize)
    chosen = min(indexer.top_k, keys)
    return at_once * (SORTED * 4 * keys + scored + 4 * 4 * chosen) + 2 * 4 * shape.tokens * chosen


def _most_entries(blueprint: "Blueprint", compressed: Compressed, kind: Entries) -> int:
    """Entries of a full block table in layers of a kind."""
    if kind not in compressed.entries:
        return 0
    ratio = compressed.ratios[kind is Entries.HEAVY]
    return max(1, blueprint.limits.width * blueprint.limits.block_size // ratio)


def _most_lines(blueprint: "Blueprint", compressed: Compressed) -> int:
    """Lines of the pages that a token of DeepSeek V4 attends to, at most."""
    sparse, heavy = (_most_entries(blueprint, compressed, kind) for kind in (Entries.SPARSE, Entries.HEAVY))
    return compressed.window + max(min(sparse, compressed.top_k), heavy)


def _lines_and_entries(blueprint: "Blueprint", shape: ForwardShape, compressed: Compressed) -> int:
    """Numbers of lines, scores of entries and their sort, and entries in the making: `attend_compressed`."""
    item, keys = blueprint.dtype.itemsize, _most_entries(blueprint, compressed, Entries.SPARSE)
    step = compressed_attention.steps_of(blueprint.implementation, shape.tokens, keys)
    scored = step.keys * (3 * 4 * compressed.index_heads + 2 * compressed.index_dim * item)
    choice = step.tokens * (SORTED * 4 * keys + scored)
    made = 0
    for kind in {*compressed.entries} - {Entries.NONE}:
        of_kind = compressed.of_layer(compressed.entries.index(kind))
        inputs = shape.tokens * of_kind.input_size * item
        made = max(made, inputs + step.entries * of_kind.span * of_kind.input_size * (2 * item + 4))
    return CHOSEN * 4 * shape.tokens * _most_lines(blueprint, compressed) + max(choice, made)
