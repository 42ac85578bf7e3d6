"""Engines over tiny random models. One set of compiled programs serves any number of engines, with pools of any size.

`poison` fills free slots, and slots that were never written, with NaN between steps. A read of such a slot yields NaN.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions
from jpaged.engine.step_plan import SamplerVariant
from jpaged.kv_groups import group_layers
from jpaged.models.quantization import Quantizer
from jpaged.models.spec import DecoderSpec, Indexer, Latent, LayerEmbedding, LayerKV, QKNorm, Rope, param_shapes
from jpaged.runtime.compile import blueprint
from jpaged.runtime.runner import ModelRunner
from jpaged.speculation_config import SpeculationConfig

VOCAB_SIZE = 256
BLOCK_SIZE = 8
MAX_MODEL_LEN = 128
MAX_BLOCKS = 160  # of a runner's pool
HOST_SLOTS = 48
MAX_ROWS = 32  # of a runner; engines have 8 unless a test asks for more
FULL = DecoderSpec(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=2048, rope=Rope(), tie_embeddings=True,
)  # fmt: skip
# Layers 0, 2 and 3 have half a page each, in one KV group. Layer 1 has a whole page. The last two have no KV: they read
# layers 3 and 1. Layer 1 has no value projection
_NARROW, _WIDE = LayerKV(2, 16), LayerKV(2, 32, values_are_keys=True)
UNLIKE = dataclasses.replace(
    FULL, num_layers=6, head_dim=32, sliding_window=(20, None, 20, 20, 20, None), qk_norm=QKNorm.HEAD, v_norm=True,
    layer_kv=(
        _NARROW, _WIDE, _NARROW, _NARROW, dataclasses.replace(_NARROW, source=3), dataclasses.replace(_WIDE, source=1)
    ),
    layer_embed=LayerEmbedding(16, VOCAB_SIZE), attention_scale=0.25,
)  # fmt: skip
_INDEXER = Indexer(heads=4, head_dim=64, top_k=12)  # fewer tokens than most prompts have
_LATENT = Latent(q_rank=64, kv_rank=64, nope_dim=16, rope_dim=16, v_dim=16, indexer=_INDEXER)
SPECS = {
    "full": FULL,
    "windows": dataclasses.replace(FULL, sliding_window=(20, None)),
    "unlike": UNLIKE,
    "sparse": dataclasses.replace(FULL, num_kv_heads=1, head_dim=_LATENT.width, latent=_LATENT, attention_scale=0.18),
}


@contextlib.contextmanager
def sampling_programs(*variants: SamplerVariant) -> Iterator[None]:
    """Engines created inside the block have only these sampling programs, and GREEDY, which an engine needs to start.

    A request that needs another program fails. RANDOM and FULL take two thirds of a tiny engine's compile time, but
    most tests of models need only GREEDY. All programs compile before the engine runs, in 4 s of CPU time: a child
    process that compiles in the background would take 2 s to start.
    """
    bucket_shapes, needed = blueprint.bucket_shapes, (None, SamplerVariant.GREEDY, *variants)

    def some(**sizes):
        return [shape for shape in bucket_shapes(**sizes) if getattr(shape, "variant", None) in needed]

    all_first = property(lambda self: self.program_shapes)
    with (
        mock.patch.object(blueprint, "bucket_shapes", some),
        mock.patch.object(blueprint.Blueprint, "first_shapes", all_first),
    ):
        yield


def random_tree(shapes, seed=0):
    """Random weights of these shapes. Norm gains of 2 keep greedy answers from collapsing to one token."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        values = rng.standard_normal(shape.shape) * 0.15
        return jnp.asarray(values + (2 if "norm" in str(path[-1]) else 0), shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def make_runner(spec, scheme=None, drafter=None, **options):
    """A float32 runner with random weights.

    scheme: a `quantization.Scheme` that rounds the weights. drafter: a `DrafterModel`.
    """

    def rounded(tree):
        return {n: tuple(map(rounded, a)) if n == "layers" else quantizer(n, a) for n, a in tree.items()}

    params = random_tree(param_shapes(spec, jnp.float32))
    if scheme is not None:
        quantizer = Quantizer(scheme)
        params = rounded(params)
    parts = 2 if spec.latent is None else 1
    block_bytes = parts * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * 4 * len(params_layers(spec))
    config = {
        "max_num_seqs": MAX_ROWS, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
        "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": MAX_BLOCKS * block_bytes,
        "swap_space": HOST_SLOTS * block_bytes / 2**30,
    }  # fmt: skip
    return ModelRunner.create(spec, params, EngineConfig(model="tiny", **config | options), drafter=drafter)


def params_layers(spec):
    """Page arrays of a block: one per layer of a KV group."""
    if spec.layer_kv:
        groups = group_layers(spec.windows, MAX_MODEL_LEN, parts=spec.page_parts, sources=spec.kv_sources)
        return range(groups.num_arrays)
    kinds = spec.windows
    return range(max(kinds.count(kind) for kind in set(kinds)))


class View:
    """A runner with lower limits, for an engine with a smaller pool or fewer rows."""

    def __init__(self, runner, **limits):
        self.runner = runner
        self.__dict__.update(limits)

    def __getattr__(self, name):
        return getattr(self.runner, name)


def make_engine(
    runner, *, num_blocks=None, host_slots=0, costs=None, caching=True, budget=64, rows=8, drafts=None, **scheduling
):
    """An engine over a runner that other engines may have used.

    num_blocks None: all blocks. costs: TransferCosts. drafts: a `speculative_config`; the runner has verify programs.
    """
    limits = {"host_slots": host_slots, "transfer_costs": costs, "max_num_batched_tokens": budget}
    limits["max_num_seqs"] = rows
    if num_blocks is not None:
        limits["num_blocks"] = num_blocks
    speculation = None if drafts is None else SpeculationConfig.from_fields(drafts)
    options = EngineOptions(
        enable_prefix_caching=caching, scheduling=SchedulingOptions(**scheduling), speculation=speculation
    )
    return Engine(View(runner, **limits), options=options)


def poison(engine):
    """Write NaN into every slot that no request may read: unwritten slots, and free blocks without a name.

    If several layers share a page, only into whole blocks: their slots are at other places of the page.
    """
    pool, runner = engine.scheduler.manager.pool, engine.runner.runner
    if pool.moves:
        return  # pending moves still read blocks that are marked free
    written = np.zeros(len(runner.state.pages[0].data), int)
    for block in range(pool.num_blocks):
        if pool.name(block) is not None:
            written[block] = BLOCK_SIZE
    for request in engine.scheduler.running:
        for table in request.kv.block_tables:
            for index, block in enumerate(table.held, table.first_held):
                computed = request.schedule.num_computed - index * BLOCK_SIZE
                written[block] = max(written[block], min(computed, BLOCK_SIZE))
    if runner.memory_plan.limits.kv_groups.parts:
        written = np.where(written > 0, BLOCK_SIZE, 0)
    unwritten = np.arange(BLOCK_SIZE) >= written[:, None]
    runner._last.state = runner.state.with_pages(_poisoned(runner.state.pages, unwritten))


@jax.jit
def _poisoned(pages, unwritten):
    return jax.tree.map(lambda data: jnp.where(unwritten[:, None, None, :, None], jnp.nan, data), pages)


def run(engine, requests, *, check=True, after_step=None):
    """Add all requests (prompt, params), and return the answers. Checks every step, and poisons free slots."""
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    return drain(engine, check=check, after_step=after_step)


def drain(engine, *, check=True, after_step=None):
    """Run until no request is left. Returns the final outputs by id."""
    done = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in done, "answered twice"
            done[output.request_id] = output
        if check:
            engine.check_integrity()
            poison(engine)
        if after_step is not None:
            after_step(engine)
    assert engine.stats().used_blocks == 0
    assert engine.stats().compiles_after_ready == 0
    return done


def bits(output):
    """The parts of an answer that must not change, with exact floats."""
    return [
        (answer.token_ids, answer.finish_reason, answer.cumulative_logprob, answer.logprobs)
        for answer in output.outputs
    ]


def alone(engine, requests):
    """The bits of each request when it runs alone."""
    return [bits(run(engine, [request], check=False)["0"]) for request in requests]
