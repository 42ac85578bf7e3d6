"""The sampler compared with the oracle, on the demo model's logits: all pairs of parameters.

Each pair of values occurs twice: alone, where no other parameter hides its effect, and mixed with values of all other
parameters. Only `device_distribution` calls the sampler.
"""

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from jpaged.cli.common.demo_prompts import BUILT_IN_PROMPTS
from jpaged.config import EngineConfig
from jpaged.engine.request import Request
from jpaged.engine.sampling_extras import SamplingExtras, unpack_mask
from jpaged.engine.scheduling.plan_builder import row_init
from jpaged.engine.step_plan import RowMask, SamplerVariant
from jpaged.kv_groups import group_layers
from jpaged.loading import load_model
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec
from jpaged.outputs import RequestMetrics
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.sampling import SamplingParams
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampling.sampler import SamplerOptions, sample_tokens, score_tokens
from jpaged.runtime.state import NUM_FIELDS, DeviceState, SamplingState, StateSizes, create_state, row_values
from jpaged.runtime.step.row_extras import ExtrasUploader
from tests.sampling.sampling_oracle import MODES, Oracle, chi_square, distribution, log_softmax, logprobs, rank
from tests.support.covering import all_pairs

DEMO = "jpaged/demo_model"
NUM_DRAWS = 5_000
NUM_LOGPROBS = 5
# Largest error of a probability. Logits here are up to 13.6. A temperature of 0.5 and a repetition penalty of 0.7 make
# one of them 32.2, where float32 rounds by 1.9e-6. The largest error found is 1.24e-6.
PROBABILITY = 2e-6
GRID = np.float32(2**18)  # of logits: float32 between 16 and 32 has steps of 2**-19
LEAST_P = 1e-5  # smallest p of chi-square, for about 70 rows with fixed seeds


def scale(logits: Any, by: float) -> Any:
    """A custom logits processor for numpy and JAX arrays. Values of -inf stay."""
    return logits * by


@dataclasses.dataclass(frozen=True)
class Row:
    """Inputs of the sampler for one row of the batch."""

    logits: np.ndarray                 # float32[vocab]
    params: Mapping[str, Any]          # fields of SamplingParams, without bad_words
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]          # sampled so far
    stop_ids: Sequence[int]            # ids that min_tokens forbids
    bad_word_ids: Sequence[Sequence[int]]
    known_ids: np.ndarray | None       # bool[vocab] ids that the tokenizer has; None = all
    scale_by: float | None             # parameter of the processor `scale`; None = the processor does not apply
    seed: int = 11                     # of its draws

    @functools.cached_property
    def oracle(self) -> Oracle:
        return distribution(
            self.logits, params=types.SimpleNamespace(**self.params), prompt_ids=self.prompt_ids,
            output_ids=self.output_ids, stop_ids=self.stop_ids, bad_word_ids=self.bad_word_ids,
            known_ids=self.known_ids,
            processors=[] if self.scale_by is None else [functools.partial(scale, by=self.scale_by)],
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """Results of the sampler for one row."""

    kept: np.ndarray   # bool[vocab], ids that all filters keep; for a greedy row its token only
    probs: np.ndarray  # float32[vocab], distribution of the draws; for a greedy row 1 for its token
    draws: np.ndarray  # int[num_draws] tokens sampled with one seed, each at another sample index or position
    # logprobs_mode -> token -> (value, rank): for the NUM_LOGPROBS tokens with the largest values, and for draws[0]
    logprobs: Mapping[str, Mapping[int, tuple[float, int]]]
    mask: np.ndarray  # bool[vocab]  the sampling mask
    score: float | None  # processed log-probability of draws[0], from `score_tokens`


def device_distribution(
    rows: Sequence[Row], num_draws: int, modes: Sequence[str] = (), *, scores: bool = False
) -> list[DeviceRow]:
    """Run SamplerVariant.FULL, which serves any mix of requests, on the device. modes: other logprobs_modes to report.

    scores: run `score_tokens`, too.

    Rows are cut into batches in their order, so that a batch has rows with and without each parameter. Counts of prompt
    and output tokens are uploaded as a running engine does. `scale` is registered as a custom processor. All draws of a
    row have one seed, and differ in sample index or position.
    """
    groups: dict[bytes, list[int]] = {}  # rows of one batch share their known ids, as in an engine
    for i, row in enumerate(rows):
        groups.setdefault(b"" if row.known_ids is None else row.known_ids.tobytes(), []).append(i)
    answers: dict[int, DeviceRow] = {}
    for group in groups.values():
        for start in range(0, len(group), BATCH):
            part = group[start : start + BATCH]
            answers |= dict(zip(part, _ask([rows[i] for i in part], num_draws, modes, scores=scores), strict=True))
    return [answers[i] for i in range(len(rows))]


PROCESSOR = LogitsProcessor("scale", scale, ("by",))
BATCH = 8
DRAWS_AT_ONCE = 2000


@functools.cache
def _sampler(mode: str, num_logprobs: int) -> Any:
    options = SamplerOptions(num_logprobs, mode, (PROCESSOR,), returns_mask=mode == "processed_logprobs")
    return jax.jit(functools.partial(sample_tokens, variant=SamplerVariant.FULL, options=options))


@functools.cache
def _scorer() -> Any:
    options = SamplerOptions(NUM_LOGPROBS, "processed_logprobs", (PROCESSOR,))
    return jax.jit(functools.partial(score_tokens, options=options))


@functools.cache
def _empty_state(vocab: int) -> tuple[ExtrasUploader, DeviceState]:
    spec = DecoderSpec(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        max_position=64,
    )  # fmt: skip
    sizes = StateSizes(num_blocks=1, block_size=8, rows=BATCH, width=1, tokens=8, program_rows=8, custom=1)
    placement = Placement.single(jax.devices()[0])
    state = create_state(spec, group_layers((None,), 64), sizes, dtype=np.dtype(np.float32), placement=placement)
    return ExtrasUploader(state, 64, placement), state


def _started(rows: Sequence[Row]) -> tuple[np.ndarray, SamplingState]:
    """Fields and sampling state of rows whose last output token was just sampled on the device."""
    vocab = len(rows[0].logits)
    uploader, state = _empty_state(vocab)
    state = jax.tree.map(jnp.copy, state)  # it is donated
    fields = np.zeros((BATCH, NUM_FIELDS), np.int32)
    for number, row in enumerate(rows):
        processors = None if row.scale_by is None else {"scale": {"by": row.scale_by}}
        params = SamplingParams(
            **row.params, max_tokens=64, logits_processors=processors, logprobs=1, return_sampling_mask=True
        )
        extras = SamplingExtras(
            params, vocab, end_token_ids=row.stop_ids, bad_words=row.bad_word_ids, processors=(PROCESSOR,)
        )
        request = Request(
            request_id="", prompt_token_ids=list(row.prompt_ids), params=params, max_total_tokens=64, seed=row.seed,
            eos_token_ids=frozenset(), eos_token_id=None, metrics=RequestMetrics(0.0), extras=extras,
        )  # fmt: skip
        request.schedule.row = number
        request.token_ids += row.output_ids[:-1]
        init = row_init(request, vocab)
        state = uploader.start(state, init)
        fields[number] = row_values(init)
        if row.output_ids:
            counts = state.sampling.counts.at[number, row.output_ids[-1]].add(2)
            state = state.replace(sampling=state.sampling.replace(counts=counts))
            masks = [RowMask(number, extras.mask(row.output_ids, len(row.output_ids)))]
            state = uploader.set_masks(state, masks)
    return fields, state.sampling


def _ask(rows: Sequence[Row], num_draws: int, modes: Sequence[str], *, scores: bool) -> list[DeviceRow]:
    """Results for the rows of one batch, which have the same known ids."""
    fields, sampling = _started(rows)
    vocab = len(rows[0].logits)
    known = np.ones(vocab, bool) if rows[0].known_ids is None else rows[0].known_ids
    logits = np.zeros((BATCH, vocab), np.float32)
    logits[: len(rows)] = [row.logits for row in rows]
    modes = ["processed_logprobs", *modes]
    positions = np.zeros(BATCH, np.int32)
    results = {mode: _sampler(mode, vocab)(logits, fields, positions, known, sampling) for mode in modes}
    scored = None
    if scores:
        drawn = results["processed_logprobs"].token_ids
        scored = _scorer()(logits, drawn, fields, np.ones(BATCH, bool), known, sampling).logprobs
    answers = []
    for index, row in enumerate(rows):
        draws = np.asarray(results["processed_logprobs"].token_ids)[index : index + 1]
        if num_draws > 1:
            draws = _draws(index, logits, fields, known, sampling, num_draws)
        probs = np.zeros(vocab, np.float32)
        whole = results["processed_logprobs"]
        probs[np.asarray(whole.top_ids)[index]] = np.exp(np.asarray(whole.top_logprobs)[index])
        if row.params["temperature"] == 0:
            probs = (np.arange(vocab) == draws[0]).astype(np.float32)
        reported = {mode: _reported(results[mode], index, draws[0]) for mode in modes}
        mask = np.zeros(vocab, bool)
        mask[unpack_mask(np.asarray(whole.kept_ids)[index])] = True
        score = None if scored is None else float(scored[index])
        answers.append(DeviceRow(probs > 0, probs, draws, reported, mask, score))
    return answers


def _draws(
    index: int, logits: np.ndarray, fields: np.ndarray, known: np.ndarray, sampling: SamplingState, num_draws: int
) -> np.ndarray:
    """Draws of one row, each at another position."""
    again = np.full(DRAWS_AT_ONCE, index)
    extras = jax.tree.map(lambda x: x[again], sampling)
    parts = [
        _sampler("raw_logprobs", 1)(
            logits[again], fields[again], np.arange(first, first + DRAWS_AT_ONCE, dtype=np.int32), known, extras
        ).token_ids
        for first in range(0, num_draws, DRAWS_AT_ONCE)
    ]
    return np.concatenate(parts)[:num_draws]


def _reported(results: Any, index: int, token_id: int) -> dict[int, tuple[float, int]]:
    """(value, rank) of the NUM_LOGPROBS tokens with the largest values, and of the drawn token."""
    ids, values = (np.asarray(part)[index][:NUM_LOGPROBS].tolist() for part in (results.top_ids, results.top_logprobs))
    entries = {i: (value, rank) for rank, (i, value) in enumerate(zip(ids, values, strict=True), start=1)}
    return entries | {int(token_id): (float(results.logprobs[index]), int(results.ranks[index]))}


@pytest.fixture(scope="module")
def demo_logits() -> list[tuple[list[int], np.ndarray]]:
    """(token ids, float32[vocab] logits) at eight positions of the built-in prompts, from almost certain to open."""
    model = load_model(EngineConfig(model=DEMO, dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = [ids for ids in tokenizer(list(BUILT_IN_PROMPTS)).input_ids if len(ids) >= 8]
    tokens = jnp.asarray(np.array([ids[:8] for ids in prompts], np.int32))
    hidden, *_ = decoder.decode(
        model.spec, model.params, tokens.reshape(-1), jnp.tile(jnp.arange(8), len(prompts)),
        [None] * model.spec.num_layers, tokens, decoder.dense_causal_attend,
    )  # fmt: skip
    logits = np.asarray(decoder.lm_head(model.spec, model.params, hidden)).reshape(len(prompts), 8, -1)
    # On a grid: adding a bias of 16 is exact then. Off it, float32 rounds each sum by 1e-6, in other directions on
    # other processors: at temperature 0.5 that made a probability 1.6e-6 wrong on one of two.
    logits = np.round(logits * GRID) / GRID
    positions = [(ids[: i + 1], logits[row, i]) for row, ids in enumerate(prompts) for i in range(8)]
    positions.sort(key=lambda known: -float(known[1].max() - np.log(np.exp(known[1]).sum())))
    return [positions[round(share * (len(positions) - 1))] for share in (0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1)]


# The first value of each is neutral.
FACTORS = {
    "temperature": (1.0, 0.0, 0.7, 1.6, 3.0),
    "top_k": (0, 20, 700),
    "top_p": (1.0, 0.95, 0.8),
    "min_p": (0.0, 0.01, 0.05),
    "typical_p": (1.0, 0.9, 0.6),
    "presence_penalty": (0.0, 1.5, -1.0),
    "frequency_penalty": (0.0, 0.75, -0.5),
    "repetition_penalty": (1.0, 1.3, 0.7),
    "logit_bias": ("none", "some", "ban and lift"),
    "allowed_token_ids": ("all", "some"),
    "bad_words": ("none", "one token", "several tokens"),
    "min_tokens": (0, 1, 30),
    "known_ids": ("all", "not all"),
    "scale_by": (None, 0.75, 1.5),
}
# Values that keep so few tokens that they hide other parameters. They are not in the mixed rows.
STRICT = {
    "temperature": (0.5,), "top_k": (1,), "top_p": (0.5, 0.05), "min_p": (0.3, 1.0), "typical_p": (0.2,),
    "frequency_penalty": (-2.0,), "repetition_penalty": (2.0,), "allowed_token_ids": ("few",),
}  # fmt: skip
ALL = {name: (*values, *STRICT.get(name, ())) for name, values in FACTORS.items()}
WHERE = {"position": range(8), "num_output": (0, 1, 29)}


def row_of(choice: dict[str, Any], demo_logits: list[tuple[list[int], np.ndarray]], seed: int) -> Row:
    """A combination of FACTORS as a row. Parameters that name tokens name likely ones, so that they have an effect."""
    ids, logits = demo_logits[choice["position"]]
    vocab = len(logits)
    rng = np.random.default_rng(seed)
    likely = np.argsort(-logits, kind="stable")
    output = [int(token) for token in rng.choice(likely[:12], choice["num_output"])]
    params = {
        name: choice[name]
        for name in FACTORS
        if name not in ("logit_bias", "allowed_token_ids", "bad_words", "known_ids", "scale_by")
    }
    first, second, third, fourth = (int(token) for token in likely[:4])
    if choice["logit_bias"] == "some":
        params["logit_bias"] = {first: -1.75, third: 2.5, int(likely[200]): 9.0, 0: -0.5}
    elif choice["logit_bias"] == "ban and lift":  # not 100, which would cost a float32 logit its last digits
        params["logit_bias"] = {first: -100.0, int(likely[1000]): 16.0, int(likely[1001]): 16.0}
    if choice["allowed_token_ids"] != "all":
        count = 300 if choice["allowed_token_ids"] == "some" else 3
        params["allowed_token_ids"] = sorted({*map(int, rng.choice(vocab, count, replace=False)), second, fourth})
    bad_words = []
    if choice["bad_words"] == "one token":
        bad_words = [[third], [int(likely[5])]]
    elif choice["bad_words"] == "several tokens":
        end = output[-2:]
        bad_words = [[*end, third], [*ids[-1:], *output, first], [*reversed(end), second, first], [first, first, first]]
        bad_words = [word for word in bad_words if len(word) > 1]
    known = None
    if choice["known_ids"] == "not all":
        known = np.arange(vocab) < vocab - 96  # a padded vocabulary, and one more unknown id
        known[int(likely[6])] = False
    stop = [0, int(likely[4]), int(likely[7])]
    return Row(logits, params, ids, output, stop, bad_words, known, choice["scale_by"])


def choices_alone() -> list[dict[str, Any]]:
    """Each pair of values that are not neutral, with all other parameters neutral."""
    neutral = {name: values[0] for name, values in FACTORS.items()}
    pairs = [
        {one: a, other: b}
        for one, other in itertools.combinations(ALL, 2)
        for a, b in itertools.product(ALL[one][1:], ALL[other][1:])
    ]
    return [
        {**neutral, **pair, "position": i % 8, "num_output": 0 if pair.get("min_tokens") == 1 else 29}
        for i, pair in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def alone(demo_logits: list[tuple[list[int], np.ndarray]]) -> list[Row]:
    return [row_of(choice, demo_logits, seed) for seed, choice in enumerate(choices_alone())]


@pytest.fixture(scope="module")
def mixed(demo_logits: list[tuple[list[int], np.ndarray]]) -> list[Row]:
    return [row_of(choice, demo_logits, seed) for seed, choice in enumerate(all_pairs(WHERE | FACTORS))]


@pytest.fixture(scope="module")
def answers(alone: list[Row], mixed: list[Row]) -> list[tuple[Row, DeviceRow]]:
    """Results of all rows, with one draw each."""
    return list(zip(alone + mixed, device_distribution(alone + mixed, 1, ["raw_logprobs"]), strict=True))


@pytest.fixture(scope="module")
def with_logits(alone: list[Row], mixed: list[Row]) -> list[tuple[Row, DeviceRow]]:
    """Results of all rows, with logits in place of log-probabilities."""
    modes = ["raw_logits", "processed_logits"]
    return list(zip(alone + mixed, device_distribution(alone + mixed, 1, modes), strict=True))


@pytest.mark.slow
def test_every_value_has_an_effect(alone: list[Row]):
    """Without the value, the oracle's distribution differs in at least three rows."""
    choices = choices_alone()
    for name, values in ALL.items():
        for value in values[1:]:
            with_it = [i for i, choice in enumerate(choices) if choice[name] == value]
            changed = sum(_without(alone[i], name) for i in with_it)
            assert changed >= 3, (name, value, changed, len(with_it))


def _without(row: Row, name: str) -> bool:
    """True if the row's distribution differs without this parameter."""
    neutral = {"bad_words": {"bad_word_ids": []}, "known_ids": {"known_ids": None}, "scale_by": {"scale_by": None}}
    params = {key: value for key, value in row.params.items() if key != name}
    other = dataclasses.replace(row, **neutral.get(name, {"params": params}))
    return bool(np.abs(row.oracle.probs - other.oracle.probs).max() > 100 * PROBABILITY)


def test_same_tokens_may_be_chosen(answers: list[tuple[Row, DeviceRow]]):
    for row, answer in answers:
        wrong = np.flatnonzero((answer.kept != row.oracle.kept) & ~row.oracle.edge)
        assert row.oracle.accepts(answer.kept), (row.params, wrong[:10])


def test_probabilities(answers: list[tuple[Row, DeviceRow]]):
    for row, answer in answers:
        off = np.abs(answer.probs.astype(np.float64) - row.oracle.probs_of(answer.kept)).max()
        assert off <= PROBABILITY, (row.params, off)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_draws(alone: list[Row], mixed: list[Row]):
    """The mixed rows and some of the others, with NUM_DRAWS draws each. Every row has another seed.

    One test, because the draws take minutes: several tests would draw on several workers.
    """
    rows = [dataclasses.replace(row, seed=seed) for seed, row in enumerate([*mixed, *alone[::24]], 11)]
    drawn = list(zip(rows, device_distribution(rows, NUM_DRAWS), strict=True))
    greedy_rows_take_the_most_likely(drawn)
    draws_follow_the_probabilities(drawn)
    rows_draw_independently(drawn)


def greedy_rows_take_the_most_likely(drawn: list[tuple[Row, DeviceRow]]) -> None:
    greedy = [(row, answer) for row, answer in drawn if row.params["temperature"] == 0]
    assert len(greedy) >= 5
    for row, answer in greedy:
        allowed = row.oracle.kept | row.oracle.edge
        assert len(set(answer.draws.tolist())) == 1
        assert allowed[answer.draws[0]], row.params


def draws_follow_the_probabilities(drawn: list[tuple[Row, DeviceRow]]) -> None:
    p_values = []
    for row, answer in drawn:
        assert len(answer.draws) == NUM_DRAWS
        got = chi_square(answer.draws, row.oracle.probs_of(answer.kept))
        assert got.p_value > LEAST_P, (row.params, got)
        if got.degrees >= 5:
            p_values.append(got.p_value)
    # All rows together: p values are uniform, so -2 times the sum of their logarithms is chi-square (Fisher).
    statistic, degrees = -2 * sum(map(math.log, p_values)), 2 * len(p_values)
    assert degrees > 10
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees), (statistic, degrees)


def rows_draw_independently(drawn: list[tuple[Row, DeviceRow]]) -> None:
    """Rows with other seeds draw other numbers: the uniform numbers of their draws are not correlated."""
    open_rows = [a for r, a in drawn if (r.oracle.probs > 0.01).sum() >= 4]
    assert len(open_rows) >= 4
    for one, other in itertools.pairwise(open_rows):
        uniforms = []
        for answer in (one, other):
            below = np.concatenate([[0.0], np.cumsum(answer.probs.astype(np.float64))])
            uniforms.append(below[answer.draws] + answer.probs[answer.draws] / 2)
        assert abs(np.corrcoef(uniforms)[0, 1]) < 5 / math.sqrt(NUM_DRAWS)


@pytest.mark.slow
def test_scores(alone: list[Row], mixed: list[Row]):
    """`score_tokens` gives a drawn token the value that `sample_tokens` gave it."""
    rows = [*alone, *mixed]
    for row, answer in zip(rows, device_distribution(rows, 1, scores=True), strict=True):
        token = int(answer.draws[0])
        assert answer.score == answer.logprobs["processed_logprobs"][token][0], row.params


def test_sampling_masks(answers: list[tuple[Row, DeviceRow]]):
    """They are the oracle's ids. Its logits, normalised over them, are the log-probabilities of the draws."""
    drawn = [(row, answer) for row, answer in answers if row.params["temperature"] > 0]
    assert len(drawn) > 20
    for row, answer in drawn:
        assert row.oracle.accepts(answer.mask), row.params
        wanted = log_softmax(np.where(answer.mask, row.oracle.scaled_logits, -np.inf))
        room = 8 * 2.0**-24 * np.abs(row.oracle.scaled_logits[answer.mask]).max() + 1e-6
        assert answer.mask[answer.draws].all()
        for token, (value, _) in answer.logprobs["processed_logprobs"].items():
            assert value == pytest.approx(wanted[token], abs=room), row.params


@pytest.mark.parametrize(
    ("mode", "fixture"),
    [
        (mode, "answers") if mode.endswith("logprobs") else pytest.param(mode, "with_logits", marks=pytest.mark.slow)
        for mode in MODES
    ],
)
def test_log_probabilities(request: pytest.FixtureRequest, mode: str, fixture: str):
    for row, answer in request.getfixturevalue(fixture):
        want = logprobs(mode, row.oracle)
        if mode.startswith("processed") and (answer.kept != row.oracle.kept).any():
            continue  # rounding kept other ids, so the processed values differ
        reported = answer.logprobs[mode]
        assert int(answer.draws[0]) in reported
        finite = want[want > -np.inf]
        assert len(reported) >= min(NUM_LOGPROBS, len(finite))
        # Four roundings of the largest number in the computation, and of a sum.
        size = float(max(np.abs(finite).max(), np.abs(row.logits).max() / max(row.params["temperature"], 0.5)))
        room = 4 * 2.0**-24 * size + 1e-6
        for token, (value, reported_rank) in reported.items():
            if want[token] == -np.inf:
                assert value == -np.inf
                continue
            assert value == pytest.approx(want[token], abs=room), (row.params, mode, token)
            near = int((np.abs(want - want[token]) <= 2 * room).sum()) - 1
            assert abs(reported_rank - rank(want, token)) <= near, (row.params, mode, token)
