"""Requests with all sampling parameters and a seed: the same answers, bit for bit, under any load and history."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.step_plan import TransferCosts
from jpaged.models.draft_head import HeadKind, HeadSpec, head_param_shapes
from jpaged.models.spec import param_shapes
from jpaged.params.sampling import RequestOutputKind
from jpaged.runtime.drafting.drafter_model import DrafterModel
from jpaged.speculation_config import SpeculationConfig
from tests.support.drafting import Recorded, always_drafting, check_drafts
from tests.support.tiny_engine import (
    HOST_SLOTS,
    MAX_ROWS,
    SPECS,
    VOCAB_SIZE,
    alone,
    bits,
    make_engine,
    make_runner,
    random_tree,
    run,
)

pytestmark = pytest.mark.codegen

ROWS = MAX_ROWS
LENGTHS = (3, 8, 17, 24, 33, 40, 12, 21, 35, 16, 9, 38)
DRAFTS = 5
MODELS = {"draft_model": {"model": "a draft model"}, "eagle3": {"model": "an EAGLE-3 head"}, "mtp": {}}
FETCH = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0)


@pytest.fixture(scope="module")
def runner():
    drafts = SpeculationConfig(method="ngram", num_speculative_tokens=DRAFTS)
    runner = make_runner(SPECS["full"], speculative_config=drafts)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


def requests():
    """Requests for 32 answers, each with another mix of parameters. The prompts share a prefix, and so blocks."""
    rng = np.random.default_rng(3)
    beginning = rng.integers(0, VOCAB_SIZE, 40).tolist()
    made = []
    for i in range(28):
        length = LENGTHS[i % len(LENGTHS)]
        sampling = {
            "temperature": (0.0, 0.8, 1.4)[i % 3],
            "top_k": (0, 40)[i % 2],
            "top_p": (1.0, 0.9)[i // 2 % 2],
            "min_p": (0.0, 0.01)[i // 3 % 2],
            "typical_p": (1.0, 0.9)[i // 4 % 2],
            "presence_penalty": (0.0, 0.7)[i % 2],
            "frequency_penalty": (0.3, 0.0)[i // 2 % 2],
            "repetition_penalty": (1.0, 1.3)[i // 3 % 2],
            "logit_bias": None if i % 2 else {5: 4.0, 7: -100.0, 200: 2.5},
            "allowed_token_ids": None if i % 3 else list(range(0, VOCAB_SIZE, 2)),
            "min_tokens": (0, 6)[i % 2],
            "stop_token_ids": rng.integers(0, VOCAB_SIZE, 12).tolist(),
            "logprobs": (None, 3)[i // 2 % 2],
            "n": (1, 1, 1, 2)[i % 4] if i % 3 else 1,
        }
        if sampling["n"] > 1 and sum(params.n for _, params in made) + 28 - i > ROWS - 1:
            sampling["n"] = 1
        made.append((beginning[:length], SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **sampling)))
    return made


@pytest.fixture(scope="module")
def wanted(runner):
    return alone(make_engine(runner, rows=ROWS), requests())


def drafting_engine(runner, wanted, method, **options):
    """An engine that drafts in most steps. A drafter of method custom knows the wanted answers, with mistakes."""
    fields = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "ngram":
        fields |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if method == "custom":
        fields["function"] = Recorded([
            [*prompt, *output[0]] for (prompt, _), answer in zip(requests(), wanted, strict=True) for output in answer
        ])  # fmt: skip
    with always_drafting():
        return make_engine(runner, drafts=fields, **options)


def device_drafter(method, wanted):
    """A model with other rounding of the weights, or a random head. The EAGLE-3 head has the 16 most frequent ids."""
    spec = SPECS["full"]
    if method == "draft_model":
        params = random_tree(param_shapes(spec, jnp.float32))
        return DrafterModel(spec, jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn).astype(leaf.dtype), params))
    layer = dataclasses.replace(spec, num_layers=1)
    if method == "mtp":
        head = HeadSpec(HeadKind.MTP, layer, spec.hidden_size, own_head=False, norm_output=True)
    else:
        head = HeadSpec(HeadKind.EAGLE3, layer, spec.hidden_size, aux_layers=(0, 1, 2), draft_vocab_size=16)
    params = random_tree(head_param_shapes(head, np.dtype(np.float32)), 1)
    if method == "eagle3":
        said = np.concatenate([output[0] for answer in wanted for output in answer])
        ids = np.sort(np.argsort(-np.bincount(said, minlength=VOCAB_SIZE), kind="stable")[:16])
        params["d2t"] = jnp.asarray(ids - np.arange(16), jnp.int32)
    return DrafterModel(head, params)


def answers(engine, work):
    done = run(engine, work)
    return [bits(done[str(i)]) for i in range(len(work))]


def test_the_parameters_have_an_effect(wanted):
    assert sum(params.n for _, params in requests()) == ROWS
    for (_, params), answer in zip(requests(), wanted, strict=True):
        for output in answer:
            token_ids = output[0]
            assert params.allowed_token_ids is None or set(token_ids) <= set(params.allowed_token_ids)
            assert params.logit_bias is None or 7 not in token_ids
            assert not set(token_ids[: params.min_tokens]) & set(params.stop_token_ids)


@pytest.mark.parametrize(
    ("budget", "caching"),
    [
        (41, True),
        *(pytest.param(budget, caching, marks=pytest.mark.slow)
          for budget, caching in ((64, True), (64, False), (41, False), (ROWS, True), (ROWS, False))),
    ],
)  # fmt: skip
def test_in_a_batch_cached_or_not_in_chunks_of_any_size(runner, wanted, caching, budget):
    engine = make_engine(runner, rows=ROWS, caching=caching, budget=budget)
    assert answers(engine, requests()) == wanted
    assert answers(engine, requests()[::-1])[::-1] == wanted  # with caching, all prompts are cached now
    assert (engine.stats().prefix_hit_tokens > 0) == caching


@pytest.mark.parametrize("host", [pytest.param(False, marks=pytest.mark.slow), True])
def test_preempted(runner, wanted, host):
    options = {"host_slots": HOST_SLOTS, "costs": FETCH} if host else {}
    engine = make_engine(runner, rows=ROWS, num_blocks=20, **options)
    assert answers(engine, requests()) == wanted
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "custom"])
def test_with_drafts(runner, wanted, method):
    engine = drafting_engine(runner, wanted, method, rows=ROWS, num_blocks=40)
    assert answers(engine, requests()) == wanted
    assert answers(engine, requests()[::-1])[::-1] == wanted  # a suffix tree knows all answers now
    check_drafts(engine.stats().speculation)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "custom"])
@pytest.mark.parametrize("budget", [41, 64])
@pytest.mark.parametrize("host", [False, True])
def test_preempted_with_drafts(runner, wanted, method, budget, host):
    options = {"host_slots": HOST_SLOTS, "costs": FETCH} if host else {}
    engine = drafting_engine(runner, wanted, method, rows=ROWS, num_blocks=20, budget=budget, **options)
    for _ in range(2):
        assert answers(engine, requests()) == wanted
    assert engine.stats().preemptions > 0
    assert (engine.stats().blocks_to_host > 0) == host
    check_drafts(engine.stats().speculation)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "custom"])
def test_requests_without_a_seed_with_drafts(runner, wanted, method):
    work = [(prompt, dataclasses.replace(params, seed=None)) for prompt, params in requests()]
    expected = alone(make_engine(runner, rows=ROWS), work)
    assert expected != wanted
    engine = drafting_engine(runner, expected, method, rows=ROWS)
    assert answers(engine, work) == expected
    check_drafts(engine.stats().speculation)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_with_drafts_of_the_device(wanted, method):
    config = SpeculationConfig(method=method, num_speculative_tokens=DRAFTS, **MODELS[method])
    runner = make_runner(SPECS["full"], drafter=device_drafter(method, wanted), speculative_config=config)
    try:
        with always_drafting():
            engine = make_engine(runner, rows=ROWS, num_blocks=60, drafts=config)
        assert answers(engine, requests()) == wanted
        assert answers(engine, requests()[::-1])[::-1] == wanted
        check_drafts(engine.stats().speculation)
    finally:
        runner.close()


@pytest.mark.slow
def test_streamed(runner, wanted):
    """The deltas of all outputs add up to the answer. Every second request gets a delta every two tokens."""
    engine, parts = make_engine(runner, rows=ROWS), {}
    for number, (prompt, params) in enumerate(requests()):
        asked = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA, stream_interval=1 + number % 2)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, asked, stream=True)
    while engine.has_work:
        for output in engine.step():
            for answer in output.outputs:
                parts.setdefault((int(output.request_id), answer.index), []).append(answer)
    for (number, index), pieces in parts.items():
        token_ids, finish_reason, cumulative, logprobs = wanted[number][index]
        assert len(pieces) > 1 or len(token_ids) <= 2
        assert [token_id for piece in pieces for token_id in piece.token_ids] == token_ids
        assert (pieces[-1].finish_reason, pieces[-1].cumulative_logprob) == (finish_reason, cumulative)
        assert (None if logprobs is None else [one for piece in pieces for one in piece.logprobs]) == logprobs
    assert len(parts) == ROWS


def test_sample_0_of_4_is_the_answer_with_n_1(runner):
    prompt, params = requests()[7]
    [several] = alone(make_engine(runner, rows=ROWS), [(prompt, SamplingParams(**_fields(params) | {"n": 4}))])
    [one] = alone(make_engine(runner, rows=ROWS), [(prompt, SamplingParams(**_fields(params) | {"n": 1}))])
    assert several[0] == one[0]
    assert len({tuple(answer[0]) for answer in several}) > 1


def _fields(params):
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
             "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "max_tokens", "seed")  # fmt: skip
    return {name: getattr(params, name) for name in names}
