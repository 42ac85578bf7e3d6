"""Recurrent layers: the state of a row, its copies for forks, and snapshots that later requests continue from.

On CPU every token is computed by the same operations in the same order. So an answer has the same bits if its prefix is
computed, found, or computed again after preemption.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.updates import EngineWeights, prepare
from jpaged.models.recurrent_spec import GatedDelta, GateNorm, KimiDelta, Mamba2, ShortConv
from jpaged.models.spec import Activation, Experts, Latent, Norm, QKNorm, Scoring, WeightLayout, param_shapes
from jpaged.runtime.state import Field
from jpaged.speculation_config import SpeculationConfig
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.drafting import Recorded, always_drafting, check_drafts
from tests.support.tiny_engine import (
    BLOCK_SIZE,
    FULL,
    HOST_SLOTS,
    MAX_ROWS,
    VOCAB_SIZE,
    alone,
    bits,
    drain,
    make_engine,
    make_runner,
    random_tree,
    run,
)

pytestmark = pytest.mark.codegen

HYBRID = dataclasses.replace(
    FULL, num_layers=3, norm=Norm.RMS_OFFSET, qk_norm=QKNorm.HEAD, attention_gate=True,
    recurrence=GatedDelta((True, False, True), k_heads=2, v_heads=4, head_dim=16, conv_width=4),
)  # fmt: skip
WITH_WINDOW = dataclasses.replace(
    HYBRID, num_layers=4, sliding_window=(20, 20, None, None),
    recurrence=dataclasses.replace(HYBRID.recurrence, layers=(True, False, True, False)),
)  # fmt: skip
SHORT_CONV = dataclasses.replace(
    FULL, num_layers=3, qk_norm=QKNorm.HEAD,
    recurrence=ShortConv((True, False, True), width=64, conv_width=3, bias=True),
)  # fmt: skip
MAMBA = Mamba2((True, False, True), heads=4, head_dim=16, groups=2, state_dim=32, conv_width=4)
BY_KIND = {
    "short convolution": SHORT_CONV,
    "mamba": dataclasses.replace(FULL, num_layers=3, recurrence=MAMBA),
    # Nemotron-H: Mamba-2, a feed-forward network, attention, Mamba-2, a feed-forward network
    "one block a layer": dataclasses.replace(
        FULL, num_layers=5, gated=False, activation=Activation.RELU2,
        recurrence=dataclasses.replace(MAMBA, layers=(True, False, False, True, False)),
        attention_layers=(False, False, True, False, False), lone_feed_forward=(False, True, False, False, True),
    ),
    # Falcon-H1
    "side by side": dataclasses.replace(
        FULL, num_layers=2, attention_layers=(True, True),
        recurrence=dataclasses.replace(MAMBA, layers=(True, True), gate_norm=GateNorm.BEFORE),
    ),
    # Kimi Linear: latent attention without rope, experts, and a decay for each channel
    "kimi delta": dataclasses.replace(
        FULL, num_layers=3, num_kv_heads=1, head_dim=40, latent=Latent(None, 32, 16, 8, 12), rope_layers=(False,) * 3,
        recurrence=KimiDelta((True, False, True), k_heads=2, v_heads=2, head_dim=16, conv_width=4),
        experts=Experts(8, 3, 32, (False, True, True), scoring=Scoring.SIGMOID, correction=True, shared_size=32),
    ),
    # the last layer has KV and a state
    "gated DeltaNet next to attention": dataclasses.replace(HYBRID, attention_layers=(False, True, True)),
}  # fmt: skip
FETCH = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0)


DRAFTS = {"method": "custom", "num_speculative_tokens": 5}


def drafting_runner(spec):
    """A runner with verify programs. Engines on it may have drafts."""
    return make_runner(spec, speculative_config=SpeculationConfig.from_fields(DRAFTS | {"function": len}))


@pytest.fixture(scope="module")
def runner():
    runner = drafting_runner(HYBRID)
    yield runner
    runner.close()


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def greedy(max_tokens=6, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **more)


def poison_states(engine):
    """Write NaN into the slots of rows without a request, and of free snapshots."""
    runner, states = engine.runner.runner, engine.scheduler.manager.states
    if states._due or states._late:
        return  # copies that are due still read them
    used = {request.schedule.row for request in engine.scheduler.running} | {*states._named.values(), *states._reserved}
    used |= {request.kv.snapshot_slot for request in engine.scheduler.running}
    count = runner.state.recurrent[0][0].shape[0]
    free = jnp.array([slot not in used for slot in range(count)])
    runner._last.state = runner.state.replace(recurrent=_poisoned(runner.state.recurrent, free))


@jax.jit
def _poisoned(recurrent, free):
    def one(slots):
        return jnp.where(free.reshape(-1, *[1] * (slots.ndim - 1)), jnp.nan, slots)

    return jax.tree.map(one, recurrent)


def answer(engine, prompt, params):
    """(bits of the answer, cached tokens)."""
    output = run(engine, [(prompt, params)], after_step=poison_states)["0"]
    return bits(output), output.num_cached_tokens


@pytest.mark.parametrize(
    "splits", [pytest.param((39, 40, 41), id="around a snapshot"),
               pytest.param(tuple(range(1, 60)), id="all", marks=pytest.mark.slow)]
)  # fmt: skip
def test_cold_equals_warm_at_every_split(runner, splits):
    """A prompt shares `split` tokens with an earlier prompt: it starts after their last whole block."""
    check_splits(runner, splits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_KIND)
def test_cold_equals_warm_with_other_kinds(kind):
    """Short convolutions, and Mamba-2 in layers of each form."""
    runner = make_runner(BY_KIND[kind])
    check_splits(runner, (7, 8, 39, 40, 41, 59))
    runner.close()


def check_splits(runner, splits):
    """Compare answers to prompts that share `split` tokens with an earlier one, cold and warm."""
    whole = prompt_of(60)
    hits = []
    for split in splits:
        prompt = whole[:split] + prompt_of(60 - split, seed=split)
        cold, none = answer(make_engine(runner), prompt, greedy())
        assert none == 0
        engine = make_engine(runner)
        answer(engine, whole[:split], greedy())
        warm, cached = answer(engine, prompt, greedy())
        assert warm == cold
        hits.append(cached)
        assert answer(engine, prompt, greedy()) == (cold, 59 // BLOCK_SIZE * BLOCK_SIZE)
    assert hits == [split // BLOCK_SIZE * BLOCK_SIZE for split in splits]


@pytest.mark.parametrize(
    "lengths", [pytest.param((3, 4, 5), id="around a block"),
                pytest.param(tuple(range(1, 18)), id="all", marks=pytest.mark.slow)]
)  # fmt: skip
def test_the_second_turn_finds_all_of_the_first(runner, lengths):
    """All whole blocks of prompt and answer, for answers of any length."""
    for length in lengths:
        engine, prompt = make_engine(runner), prompt_of(21)
        first = run(engine, [(prompt, greedy(length))], after_step=poison_states)["0"].outputs[0].token_ids
        computed = len(prompt) + length - 1  # the last token is not computed
        turn = prompt + first + prompt_of(9, seed=length)
        warm, cached = answer(engine, turn, greedy())
        assert cached == computed // BLOCK_SIZE * BLOCK_SIZE
        assert warm == answer(make_engine(runner), turn, greedy())[0]


def test_a_prefix_of_two_requests_is_found_by_the_third(runner):
    """The first leaves no snapshot where the second branches off. The second takes one there."""
    prompts = [prompt_of(33) + prompt_of(20, seed) for seed in (1, 2, 3)]
    cold = [answer(make_engine(runner), prompt, greedy())[0] for prompt in prompts]
    engine = make_engine(runner)
    warm = [answer(engine, prompt, greedy()) for prompt in prompts]
    assert [each for each, _ in warm] == cold
    cached = [found for _, found in warm]
    assert cached[0] == 0
    assert cached[1] < cached[2] == 32


def test_samples_continue_with_the_state_of_their_prompt(runner):
    """With one row, each sample computes the prompt again. With more, they fork."""
    request = (prompt_of(20), SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, n=3, temperature=0.9, seed=1))
    forked, apart = (
        run(make_engine(runner, caching=False, rows=rows), [request], after_step=poison_states)["0"] for rows in (4, 1)
    )
    assert bits(forked) == bits(apart)
    assert len({tuple(each.token_ids) for each in forked.outputs}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [HYBRID, WITH_WINDOW, BY_KIND["side by side"]], ids=["full", "window", "side by side"]
)
@pytest.mark.parametrize(
    "kind", [{"n": 3, "temperature": 0.9}, {}, {"use_beam_search": True, "beam_width": 3, "n": 2}],
    ids=["samples", "one", "beams"],
)  # fmt: skip
def test_forks_and_preemption_change_no_answer(runner, spec, kind):
    runner = runner if spec is HYBRID else make_runner(spec)
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, **{"temperature": 0, "seed": i, **kind})
        for i in range(5)
    ]
    lengths = (7, 16, 25, 33, 40)
    requests = [(prompt_of(length, seed=length), each) for length, each in zip(lengths, params, strict=True)]
    wanted = alone(make_engine(runner), requests)
    for options in ({}, {"caching": False}, {"host_slots": HOST_SLOTS, "costs": FETCH}):
        blocks = {"full": 26, "one": 28, "several": 44}
        kind_of = "full" if len(runner.windows) == 1 else "several" if kind else "one"
        engine = make_engine(runner, num_blocks=blocks[kind_of], **options)
        for number, (prompt, each) in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, each)
        done = drain(engine, after_step=poison_states)
        assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
        assert engine.stats().preemptions > 0


def test_few_snapshots_are_used_again(runner):
    """With fewer slots than prompts, the least recently used snapshots are overwritten. Answers stay right."""
    sizes = dataclasses.replace(runner.recurrent_sizes, num_snapshots=3)
    engine = make_engine(runner)
    engine.runner.recurrent_sizes = sizes
    engine.start_over()
    prompts = [prompt_of(40, seed) for seed in range(5)]
    wanted = [answer(make_engine(runner), prompt, greedy())[0] for prompt in prompts]
    for _ in range(2):
        found = [answer(engine, prompt, greedy()) for prompt in prompts]
        assert [each for each, _ in found] == wanted
    assert engine.scheduler.manager.states.num_snapshots == 3
    assert answer(engine, prompts[-1], greedy())[1] == 32  # the last used one is there


def small_engine(runner, num_snapshots, **options):
    """An engine with few snapshots on the device, and a host tier that any move pays for."""
    engine = make_engine(runner, **{"host_slots": HOST_SLOTS, "costs": FETCH} | options)
    engine.runner.recurrent_sizes = dataclasses.replace(runner.recurrent_sizes, num_snapshots=num_snapshots)
    engine.start_over()
    return engine


def check_that_snapshots_return(runner, *, blocks, count=5):
    """Prompts that push each other's blocks and snapshots from the device, again and again, and the turns after them.

    Blocks and snapshots of each prompt come back from the host. All answers have the bits of a cold engine.
    """
    prompts = [prompt_of(33 + 5 * i, seed=i) for i in range(count)]
    cold = [run(make_engine(runner), [(prompt, greedy(12))])["0"] for prompt in prompts]
    turns = [sequence + prompt_of(9, seed=i) for i, sequence in enumerate(sequences_of(cold))]
    cold_turns = [answer(make_engine(runner), turn, greedy())[0] for turn in turns]
    engine = small_engine(runner, 2, num_blocks=blocks, host_slots=4 * HOST_SLOTS)
    for number in range(2):
        found = [answer(engine, prompt, greedy(12)) for prompt in prompts]
        assert [each for each, _ in found] == [bits(output) for output in cold]
        assert [cached for _, cached in found] == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE * number for p in prompts]
    found = [answer(engine, turn, greedy()) for turn in turns]
    assert [each for each, _ in found] == cold_turns
    assert [cached for _, cached in found] == [(len(p) + 11) // BLOCK_SIZE * BLOCK_SIZE for p in prompts]
    stats = engine.stats()
    assert min(stats.snapshots_to_host, stats.blocks_to_host, stats.blocks_to_device) > 0
    assert stats.snapshots_to_device >= 2 * count - 2
    assert stats.used_host_snapshots > 0
    sizes, tier = engine.runner.recurrent_sizes, engine.scheduler.manager.pool.host_tier
    held = jax.tree.leaves([list(runner._last.mover._host.values()), list(runner._last.mover._host_states.values())])
    assert sum(leaf.nbytes for leaf in held) == tier._used_bytes <= 4 * HOST_SLOTS * sizes.block_bytes
    return engine


def test_snapshots_return_from_the_host(runner):
    check_that_snapshots_return(runner, blocks=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BY_KIND, "window"])
def test_snapshots_of_other_kinds_return_from_the_host(kind):
    runner = make_runner(WITH_WINDOW if kind == "window" else BY_KIND[kind])
    check_that_snapshots_return(runner, blocks=28 if kind == "window" else 16)
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [HYBRID, WITH_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("drafts", [False, True])
def test_preempted_requests_find_their_snapshots_on_the_host(runner, spec, drafts):
    """Few snapshots on the device, few blocks, and more requests than fit."""
    runner = runner if spec is HYBRID else drafting_runner(spec)
    requests = [(prompt_of(length, seed=length), greedy(40)) for length in (7, 16, 25, 33, 40, 48, 56)]
    plain = [run(make_engine(runner), [request])["0"] for request in requests]
    with always_drafting():
        more = {"drafts": DRAFTS | {"function": Recorded(sequences_of(plain))}} if drafts else {}
        blocks = 26 if spec is HYBRID else 48
        engine = small_engine(runner, 3, num_blocks=blocks, host_slots=4 * HOST_SLOTS, **more)
        for _ in range(3):
            done = run(engine, requests, after_step=poison_states)
            assert [bits(done[str(i)]) for i in range(len(requests))] == [bits(output) for output in plain]
    stats = engine.stats()
    assert min(stats.preemptions, stats.snapshots_to_host, stats.snapshots_to_device) > 0


# --- drafts ----------------------------------------------------------------------------------------------------------

def drafting_engine(runner, sequences, **options):
    """An engine that drafts in most steps. It knows the sequences, and is wrong at some places."""
    with always_drafting():
        return make_engine(runner, drafts=DRAFTS | {"function": Recorded(sequences)}, **options)


def sequences_of(outputs):
    """Prompts with their answers."""
    return [[*each.prompt_token_ids, *answer.token_ids] for each in outputs for answer in each.outputs]


def check_that_drafts_change_nothing(runner, requests, **options):
    """All requests at once have the bits that they have without drafts. So does the next turn, which finds them."""
    plain = run(make_engine(runner), requests, after_step=poison_states)
    sequences = sequences_of(plain.values())
    turns = [(sequence + prompt_of(9, seed=i), greedy()) for i, sequence in enumerate(sequences)]
    cold = alone(make_engine(runner, caching=False), turns)
    engine = drafting_engine(runner, sequences, **options)
    for _ in range(2):  # the second time from the prefix cache
        found = run(engine, requests, after_step=poison_states)
        assert [bits(found[name]) for name in plain] == [bits(output) for output in plain.values()]
    check_drafts(engine.stats().speculation)
    outputs = [run(engine, [turn], after_step=poison_states)["0"] for turn in turns]
    assert [bits(output) for output in outputs] == cold
    lengths = map(len, sequences)
    return engine, [(length, output.num_cached_tokens) for length, output in zip(lengths, outputs, strict=True)]


def test_drafts_change_no_bit_and_the_next_turn_is_found(runner):
    """Snapshots in the middle of a verify step have the state at the block boundary."""
    lengths = (3, 16, 33, 40)
    requests = [(prompt_of(length, seed=length), greedy(40 - i)) for i, length in enumerate(lengths)]
    _, found = check_that_drafts_change_nothing(runner, requests)
    assert [cached for _, cached in found] == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        HYBRID, WITH_WINDOW, SHORT_CONV, pytest.param(BY_KIND["mamba"], marks=pytest.mark.soak),
        BY_KIND["side by side"],  # Mamba-2 and attention in a layer
        BY_KIND["kimi delta"],
    ],
    ids=["full", "window", "convolutions", "mamba", "side by side", "kimi delta"],
)  # fmt: skip
def test_drafts_with_samples_preemption_and_the_host_tier(runner, spec):
    runner = runner if spec is HYBRID else drafting_runner(spec)
    samples = SamplingParams(max_tokens=25, ignore_eos=True, logprobs=2, n=3, temperature=0.9, seed=1)
    requests = [(prompt_of(20), samples)]
    requests += [(prompt_of(length, seed=length), greedy(30)) for length in (7, 16, 25, 33, 40)]
    blocks = 26 if len(runner.windows) == 1 else 48
    for options in ({}, {"caching": False}, {"host_slots": HOST_SLOTS, "costs": FETCH}):
        check_that_drafts_change_nothing(runner, requests, **options)
        engine, _ = check_that_drafts_change_nothing(runner, requests, num_blocks=blocks, **options)
        assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_aborts_while_drafts_are_in_flight(runner):
    """Requests of other lengths end at each step. The others, and those that find their prefix, have the right bits."""
    requests = [(prompt_of(length, seed=length), greedy(40)) for length in (3, 16, 33, 40)]
    plain = run(make_engine(runner), requests)
    engine = drafting_engine(runner, sequences_of(plain.values()))
    for moment in range(1, 14):
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for _ in range(moment):
            engine.step()
            poison_states(engine)
        engine.abort([str(moment % 4)])
        done = drain(engine, after_step=poison_states)
        assert {name: bits(output) for name, output in done.items()}.items() <= {
            name: bits(output) for name, output in plain.items()
        }.items()


@pytest.mark.parametrize("kept", ["all", "none"])
def test_states_of_wrong_tokens_are_seen(runner, kept, monkeypatch):
    """The state after all tokens of a verify step, rejected drafts included, or before them, gives other answers."""
    requests = [(prompt_of(length, seed=length), greedy(40)) for length in (3, 16, 33, 40)]
    plain = run(make_engine(runner), requests)

    def wrong(program):
        def advance(params, states, inputs, table, packed):
            (rows, num_tokens, _), lengths = packed[:, packed[0] >= 0], np.array(table)
            before = np.asarray(inputs[0])[: len(rows)]
            lengths[rows, Field.LENGTH] = before + num_tokens * (kept == "all")
            return program.run(params, states, inputs, lengths, packed)

        return dataclasses.replace(program, run=advance)

    programs = runner.programs
    monkeypatch.setattr(programs, "advances", {size: wrong(program) for size, program in programs.advances.items()})
    engine = drafting_engine(runner, sequences_of(plain.values()))
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step()}
    assert [bits(done[name]) for name in plain] != [bits(output) for output in plain.values()]


@pytest.mark.parametrize("recompute", [False, True])
def test_no_state_of_old_weights_is_found(runner, recompute):
    """New weights while requests run, with drafts in flight. Later requests have the bits of a cold engine."""
    requests = [(prompt_of(length, seed=length), greedy(30)) for length in (16, 33, 40)]
    plain = run(make_engine(runner), requests)
    engine = drafting_engine(runner, sequences_of(plain.values()))
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        engine.step()
    engine.flush()
    engine.update_weights(weights_of(runner, seed=1), recompute=recompute)
    drain(engine, after_step=poison_states)
    found = [run(engine, requests, after_step=poison_states) for _ in range(2)]
    assert [[output.num_cached_tokens for output in each.values()] for each in found] == [[0, 0, 0], [8, 32, 32]]
    cold = [bits(output) for output in run(make_engine(runner, caching=False), requests).values()]
    assert [[bits(output) for output in each.values()] for each in found] == [cold, cold]
    assert cold != [bits(output) for output in plain.values()]
    engine.update_weights(weights_of(runner, seed=0))


def weights_of(runner, seed):
    """Leaves of random weights, for `update_weights`."""
    loaded = LoadedModel(HYBRID, {}, WeightLayout(), np.dtype(np.float32), {}, {}, None, "live arrays")
    target = EngineWeights.of(loaded, EngineConfig(model="tiny"), runner.weight_slots, runner.first_device)
    return prepare(random_tree(param_shapes(HYBRID, jnp.float32), seed), target)()


def test_options_that_do_not_work_with_state_are_refused_by_name(tmp_path):
    write_checkpoint(BY_NAME["qwen3.5"], 0, tmp_path)
    for name, value in {"pipeline_parallel_size": 2, "kv_handover": True}.items():  # fmt: skip
        with pytest.raises(ModelLoadError, match=f"{name}=.*recurrent layers"):
            LLM(str(tmp_path), dtype="float32", **{name: value})
    with pytest.raises(ModelLoadError, match=r"has recurrent layers.*use a draft model with attention"):
        LLM(str(tmp_path), dtype="float32", speculative_config={"method": "draft_model", "model": str(tmp_path)})


def test_bytes_are_planned(runner):
    plan = runner.memory_plan
    a_slot = 2 * (3 * 8 * 16 * 4 + 4 * 16 * 16 * 4)  # two layers: inputs of the convolution, matrices
    assert plan.slot_bytes == a_slot
    assert plan.input_bytes == 2 * (8 * 16 * 4 + 2 * 4 * 4)  # of a token: input of the convolution, decays, betas
    arrays = (runner.state.recurrent, runner.state.state_inputs[1:])
    assert plan.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    assert runner.recurrent_sizes.num_rows == MAX_ROWS
    assert f"{MAX_ROWS} rows and {runner.recurrent_sizes.num_snapshots} snapshots" in str(plan)
    assert len(runner.state.pages) == 1  # of the one layer with attention


def test_live_arrays_with_separate_queries_are_refused():
    """Their gates would be lost."""
    params = random_tree(param_shapes(HYBRID, jnp.float32))
    layers = []
    for layer in params["layers"]:
        qkv = None if "qkv" not in layer else np.asarray(layer["qkv"])
        parts = {} if qkv is None else {"q": qkv[:, 2:-2], "k": qkv[:, -2], "v": qkv[:, -1]}
        parts = {name: jax.device_put(leaf.reshape(-1, HYBRID.hidden_size)) for name, leaf in parts.items()}
        layers.append({name: leaf for name, leaf in layer.items() if name != "qkv"} | parts)
    with pytest.raises(ModelLoadError, match="qkv"):
        load_model(EngineConfig(model="tiny"), params | {"layers": tuple(layers)}, HYBRID)
