"""Shapes of an engine's programs, and the kinds of work that they do."""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.step_plan import SamplerVariant, TextShape
from jpaged.errors import ModelLoadError
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.step.advance_states import AdvanceShape
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.draft_shapes import DraftShape
from jpaged.runtime.step.output_programs import OutputShape, PoolShape, SampleShape, ScoreShape

# Maximum number of programs with default options. Five are not in the table: upload_row, two sizes of block copies, and
# two of ExtrasUploader. A host tier adds two.
MAX_PROGRAMS = 24
MAX_STEP_PROGRAMS = MAX_PROGRAMS - 5
MAX_ROW_BUCKETS = 4
MAX_FORWARD_PROGRAMS = 8
# On a GPU decodes have two more programs, of a half and three quarters of the rows: with more than about 150 rows,
# matmuls of an 8B model take longer with each row.
GPU_DECODES, GPU_MIN_ROWS, GPU_ROW_STEP = (0.5, 0.75), 128, 32
MAX_FULL_BUCKETS = 2  # of `sample` programs with SamplerVariant.FULL
MIN_TEXT = 16  # shortest length to which an encoder's texts are padded
# Below 8 rows XLA's CPU matmuls give other bits, and bf16 is 5 to 18 times slower. 8 rows take as long as 2.
MIN_BUCKET = 8
# XLA's CPU reductions give other bits if all rows together have fewer elements than this.
MIN_REDUCTION = 4096


def smallest_bucket(spec: DecoderSpec, platform: str, devices: int = 1) -> int:
    """Minimum rows and tokens of a program. On CPU it makes a row's bits the same in every program.

    devices: that share heads of recurrent layers, or parts with `deterministic`.
    It is 8 for real models. Tiny models need more, so that their norms reduce over MIN_REDUCTION elements.
    """
    if platform != "cpu":
        return MIN_BUCKET
    widths = [spec.hidden_size, spec.vocab_size]  # of normalised vectors
    if spec.qk_norm is not None:
        widths.append(spec.num_kv_heads * spec.head_dim)
        widths += [kv.heads * kv.head_dim for kv in spec.layer_kv]
    if spec.layer_embed is not None:
        widths.append(spec.num_layers * spec.layer_embed.size)
    if spec.latent is not None:
        widths += [spec.latent.kv_rank, spec.latent.q_rank or spec.hidden_size]
    if spec.indexer is not None:
        widths.append(spec.indexer.head_dim)
    if spec.compressed is not None:
        widths += [spec.compressed.q_rank, spec.compressed.head_dim, spec.compressed.index_dim]
    if spec.recurrence is not None and spec.recurrence.scans:
        widths.append(spec.recurrence.inner_size // devices)  # normalised by head
    narrowest = min(widths)
    return max(MIN_BUCKET, 1 << (-(-MIN_REDUCTION // narrowest) - 1).bit_length())


Shape = ForwardShape | OutputShape | DraftShape | AdvanceShape

Kind = str  # see `kind_of`
# Kinds. A `sample` program has its variant's name, with CHECKS before it for verify steps.
DECODE, VERIFY, MIXED, SCORE, POOL, CHECKS = "decode", "verify", "mixed", "score", "pool", "checks "
DRAFT = "draft"  # all programs of a drafter on the device
FOLLOWED = "followed decode"  # decodes that a draft head follows
ADVANCE = "advance"  # after a verify step of a model with recurrent layers
FIRST_KINDS = (DECODE, MIXED, SamplerVariant.GREEDY.name, POOL)  # an engine starts when it has the largest of each
# Verify programs hold this many rows with the maximum of drafts. On CPU a step's time grows with its tokens, so one of
# them has as many tokens as the smallest decode program has rows: with it, a few drafts cost nothing.
VERIFY_ROWS = (8, 32)
VERIFY_ROWS_ON_CPU = (1, 8)


def text_shapes(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, smallest: int,
    lengths: Sequence[int] | None = None, rows: Sequence[int] | None = None,
) -> tuple[TextShape, ...]:  # fmt: skip
    """Shapes of an encoder's programs, by length, then by rows. A text always runs at the smallest length that fits it.

    smallest: minimum tokens of a program. lengths, rows: the caller's buckets; None: powers of two, and for each length
    the most rows that the token budget allows, an eighth of them, and a 64th.
    """
    shapes: list[TextShape] = []
    lengths = _checked(lengths, 1, max_model_len) if lengths else _powers(min(MIN_TEXT, max_model_len), max_model_len)
    for length in lengths:
        most = max(1, min(max_num_seqs, max_num_batched_tokens // length))
        least = min(most, -(-smallest // length))
        counts = _checked(rows, least, most) if rows else sorted({max(least, -(-most // n)) for n in (1, 8, 64)})
        shapes += (TextShape(length, count) for count in counts)
    return tuple(shapes)


def bucket_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    num_kv_groups: int = 1,
    smallest: int = MIN_BUCKET,
    row_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
    on_gpu: bool = False,
    pools: bool = False,
    context: int = 1,
    drafts: int = 0,
    proposes: bool = False,
    captures: bool = False,
    verify_rows: Sequence[int] = VERIFY_ROWS,
    advances: bool = False,
    processed_scores: bool = False,
    texts: Sequence[TextShape] = (),
) -> list[Shape]:
    """Shapes of the program table, at most MAX_STEP_PROGRAMS unless the caller names the buckets; 2 more on a GPU.

    Forward programs: one per row bucket for steps of decodes only; one per token bucket, with the maximum of rows, for
    all other steps. `sample` programs: one per row bucket and sampler variant, fewer for FULL. One `score` program. A
    model that pools has only a forward program per token bucket and a `pool` program per row bucket.

    drafts: most drafts per row of a verify step; 0: there are no verify programs. proposes: see `ForwardShape`.
    captures: all forward programs capture hidden states. Decodes have programs that do not, too, for the time in which
    a draft head does not follow: capturing takes 5% of a step of the demo model with 32 rows (CPU).
    verify_rows: rows with that many drafts, for each verify program.
    advances: the model has recurrent layers, so each verify program has an `advance_states` program.
    processed_scores: `score` programs can score by the distribution that a row samples from.
    context: number of devices that share a program's tokens, if each gets `smallest` or more. Decodes are not shared:
    they mostly read weights, and each device must read all. Raises ModelLoadError if no program can be shared.
    texts: shapes of an encoder's forward programs, in place of token buckets.
    """
    max_rows = max(max_num_seqs, smallest)
    max_tokens = max(max_num_batched_tokens, smallest)
    if row_buckets:
        rows = _checked(row_buckets, smallest, max_rows)
    else:
        rows = _thin(_powers(smallest, max_rows), MAX_ROW_BUCKETS)
    if texts:
        encodes = [
            ForwardShape(False, text.rows * text.length, text.rows, block_size, 0, row_len=text.length)
            for text in texts
        ]
        return [*encodes, *(PoolShape(n) for n in _thin(_powers(smallest, max_rows), MAX_ROW_BUCKETS))]
    if token_buckets:
        tokens = _checked(token_buckets, smallest, max_tokens)
    else:
        # Drops small buckets first: 16 tokens cost about as much as 32, but 128 cost half as much as 256.
        tokens = _powers(2 * smallest, max_tokens)[-(MAX_FORWARD_PROGRAMS - (0 if pools else len(rows))) :]
    parts = [1 if n % context or n // context < smallest else context for n in tokens]
    if context not in parts:
        raise ModelLoadError(
            f"prefill_context_parallel_size={context}: no program can be split into {context} parts of {smallest} "
            f"tokens or more (token_buckets {', '.join(map(str, tokens))}): use a power of two, or token_buckets and "
            f"max_num_batched_tokens with a multiple of {context * smallest}"
        )
    mixed = [
        ForwardShape(False, n, max_rows, block_size, num_kv_groups, count, captures=captures)
        for n, count in zip(tokens, parts, strict=True)
    ]
    if pools:
        return [*mixed, *(PoolShape(n) for n in rows)]
    decode_rows = rows
    if on_gpu and not row_buckets and max_rows >= GPU_MIN_ROWS:
        more = {-(-int(max_rows * part) // GPU_ROW_STEP) * GPU_ROW_STEP for part in GPU_DECODES}
        decode_rows = sorted({*rows, *(n for n in more if n < max_rows)})
    decodes = [
        ForwardShape(True, n, n, block_size, num_kv_groups, captures=captured)
        for captured in ((False, True) if captures else (False,)) for n in decode_rows
    ]  # fmt: skip
    samplers = [SampleShape(n, variant) for variant in (SamplerVariant.GREEDY, SamplerVariant.RANDOM) for n in rows]
    full = rows if row_buckets else _thin(rows, MAX_FULL_BUCKETS)
    samplers += [SampleShape(n, SamplerVariant.FULL) for n in full]
    verifies: list[Shape] = []
    for n in verify_sizes(drafts, verify_rows, smallest, max_rows, max_tokens):
        verifies.append(ForwardShape(
            False, n, min(n, max_rows), block_size, num_kv_groups, 1, drafts, proposes, captures
        ))  # fmt: skip
        verifies += [AdvanceShape(n, min(n, max_rows), drafts, block_size)] * advances
        verifies += [SampleShape(n, variant, checks=True) for variant in SamplerVariant]
    return [*decodes, *mixed, *samplers, ScoreShape(rows[-1], processed_scores), *verifies]


def verify_sizes(drafts: int, rows: Sequence[int], smallest: int, max_rows: int, max_tokens: int) -> list[int]:
    """Tokens of the verify programs, smallest first. Each adds four programs: `forward`, and `sample` per variant."""
    sizes = {smallest * -(-min(n, max_rows) * (1 + drafts) // smallest) for n in rows} if drafts else set()
    return sorted({min(n, max_tokens) for n in sizes})


def _powers(low: int, high: int) -> list[int]:
    """low times powers of two, below high; then high itself."""
    values = [low << i for i in range(32) if low << i < high]
    return [*values, high]


def _thin(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, including the largest."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _checked(values: Sequence[int], smallest: int, largest: int) -> list[int]:
    """The caller's buckets, sorted, clipped to smallest..largest, and with the largest added."""
    return sorted({max(smallest, min(int(v), largest)) for v in values} | {largest})


def kind_of(shape: Shape) -> Kind:
    """Kind of a program. The largest program of a kind can replace the others of its kind."""
    match shape:
        case ForwardShape():
            if shape.is_decode:
                return FOLLOWED if shape.captures else DECODE
            return VERIFY if shape.drafts else MIXED
        case SampleShape():
            return CHECKS * shape.checks + shape.variant.name
        case ScoreShape():
            return SCORE
        case AdvanceShape():
            return ADVANCE
        case PoolShape():
            return POOL
        case _:
            return DRAFT


def size(shape: Shape) -> int:
    """Rows or tokens of a program. Larger programs take longer to compile."""
    return shape.tokens if isinstance(shape, ForwardShape | ScoreShape | AdvanceShape) else shape.rows
