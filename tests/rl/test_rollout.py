"""`Rollout` and `TunixRollout`: one engine for all calls, which always serves the weights of the call."""

import abc
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tqdm import tqdm

import jpaged
from jpaged import EngineError, RequestError, Rollout, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.rl.tunix import TunixRollout
from tests.golden.checkpoints import BY_NAME, random_bits
from tests.golden.tensor_shapes import tensor_shapes
from tests.support import trainer_trees
from tests.support.tiny_engine import sampling_programs
from tests.support.trainer_trees import Checkpoint, nnx_module
from tests.support.tunix_values import SIZES, RolloutConfig, Tokenizer

CONFIG = BY_NAME["qwen3"].config
PROMPTS = [[5, 9, 200, 17], [33, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tree(seed: int) -> dict[str, Any]:
    """A random tree with tunix's names."""
    tensors = {}
    for index, (name, shape) in enumerate(tensor_shapes(CONFIG).items()):
        bits = random_bits(1000 * seed + index, int(np.prod(shape))) >> np.uint64(40)
        tensors[name] = ((bits.astype(np.float32) * np.float32(2**-23) - 1) * 0.3).reshape(shape)
        tensors[name] += np.float32(1) if len(shape) == 1 else np.float32(0)
    return trainer_trees.tunix(Checkpoint(CONFIG, tensors))


@pytest.fixture(scope="module")
def tunix() -> Iterator[TunixRollout]:
    with sampling_programs(SamplerVariant.FULL):
        worker = TunixRollout(nnx_module(tree(0)), Tokenizer(), None, RolloutConfig(), config=CONFIG, **SIZES)
        yield worker
        worker.close()


@pytest.mark.slow  # compiles an engine's programs
def test_each_call_serves_the_weights_of_the_call(tunix: TunixRollout) -> None:
    """In the trainer's own arrays: pointers show it. The same arrays again replace nothing."""
    rollout, params = tunix._rollout, [tree(0), tree(1)]
    first = rollout.generate(params[0], PROMPTS, GREEDY)
    other = rollout.generate(params[1], PROMPTS, GREEDY, version="step 1")
    assert other.weight_version == "step 1"
    assert [answer.weight_version for output in other.outputs for answer in output.outputs] == ["step 1"] * 2
    assert rollout.update(params[1]) is None
    update = rollout.update(params[0])
    assert update is not None
    # Two stacks of norms are made
    assert update.num_leaves - update.num_by_reference == 2
    again = rollout.generate(params[0], PROMPTS, GREEDY)
    for a, b, c in zip(first.token_ids, again.token_ids, other.token_ids, strict=True):
        assert a.tolist() == b.tolist() != c.tolist()
    for a, b in zip(first.logprobs, again.logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params[0])}
    served = rollout.llm.engine.runner.params
    assert all(layer["q"].unsafe_buffer_pointer() in own for layer in served["layers"])


@pytest.mark.slow
def test_scores_are_those_of_generation(tunix: TunixRollout) -> None:
    rollout, params = tunix._rollout, tree(2)
    rollouts = rollout.generate(params, PROMPTS, GREEDY)
    scores = rollout.score(params, PROMPTS, rollouts.token_ids)
    for score, logprobs in zip(scores, rollouts.logprobs, strict=True):
        assert score.dtype == np.float32
        np.testing.assert_allclose(score, logprobs, atol=1e-5)
    with pytest.raises(RequestError, match="answers must be as many as prompts: 2"):
        rollout.score(params, PROMPTS, rollouts.token_ids[:1])
    with pytest.raises(RequestError, match="answers must be lists of token ids"):
        rollout.score(params, PROMPTS, ["a", "b"])
    with pytest.raises(RequestError, match="prompts must be lists of token ids"):
        rollout.score(params, PROMPTS[0], rollouts.token_ids)


@pytest.mark.slow
def test_scores_of_the_sampled_distribution() -> None:
    """With the parameters of generation, one for each answer. An empty answer has no scores, and shifts no others."""
    sampled = [
        SamplingParams(temperature=temperature, top_k=top_k, seed=1, max_tokens=8, ignore_eos=True)
        for temperature, top_k in ((0.7, 5), (2, 9))
    ]
    bars = []

    def bar(*args: Any, **fields: Any) -> Any:
        bars.append(fields["total"])
        return tqdm(*args, **fields, disable=True)

    options = SIZES | {"logprobs_mode": "processed_logprobs"}
    with sampling_programs(SamplerVariant.FULL), Rollout(CONFIG, **options) as rollout:
        params = tree(2)
        rollouts = rollout.generate(params, PROMPTS, sampled)
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
        answers = [rollouts.token_ids[0], np.zeros(0, np.int32), rollouts.token_ids[1]]
        scores = rollout.score(params, prompts, answers, [sampled[0], sampled[0], sampled[1]], use_tqdm=bar)
        assert [len(score) for score in scores] == [8, 0, 8]
        assert bars == [2]
        for score, logprobs in zip(scores[::2], rollouts.logprobs, strict=True):
            np.testing.assert_allclose(score, logprobs, atol=1e-5)
        own = rollout.score(params, PROMPTS, rollouts.token_ids)
        assert all(abs(a - b).max() > 0.1 for a, b in zip(own, rollouts.logprobs, strict=True))
        with pytest.raises(RequestError, match="sampling_params"):
            rollout.score(params, PROMPTS, rollouts.token_ids, sampled[:1])


@pytest.mark.slow
def test_donated_weights_are_refused_until_the_next_call(tunix: TunixRollout) -> None:
    rollout, params = tunix._rollout, tree(3)
    rollout.update(params)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    with pytest.raises(EngineError, match="deleted"):
        rollout.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(rollout.generate(tree(3), PROMPTS, GREEDY)) == 2


def test_padded_rollouts() -> None:
    outputs = [
        jpaged.RequestOutput(
            "0", None, prompt, [
                jpaged.CompletionOutput(0, "", tokens, None, [{t: jpaged.Logprob(-float(t))} for t in tokens], "stop")
            ], True, jpaged.RequestMetrics(0.0),
        ) for prompt, tokens in (([1, 2, 3], [4]), ([5], [6, 7]))
    ]  # fmt: skip
    rollouts = jpaged.Rollouts.of(outputs, 7)
    padded = rollouts.padded(9, length=3)
    assert padded.prompt_ids.tolist() == [[1, 2, 3], [9, 9, 5]]
    assert padded.prompt_mask.tolist() == [[True] * 3, [False, False, True]]
    assert padded.token_ids.tolist() == [[4, 9, 9], [6, 7, 9]]
    assert padded.mask.tolist() == [[True, False, False], [True, True, False]]
    assert padded.logprobs.tolist() == [[-4, 0, 0], [-6, -7, 0]]
    assert rollouts.prompt_indices.tolist() == [0, 1]
    with pytest.raises(RequestError, match="prompt_length must be at least 3, the longest, got 2"):
        rollouts.padded(prompt_length=2)


@pytest.mark.slow
def test_tunix_generates_and_scores(tunix: TunixRollout) -> None:
    output = tunix.generate(["hello", "a longer prompt"], RolloutConfig())
    assert output.left_padded_prompt_tokens.shape == (2, 6)
    assert output.left_padded_prompt_tokens[0].tolist() == [2, *Tokenizer().encode("hello")]
    assert output.left_padded_prompt_tokens[1].tolist() == Tokenizer().encode("prompt")
    assert output.text == [Tokenizer().decode(tokens.tolist()) for tokens in output.tokens]
    completions = np.zeros((2, 10), np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    scores = tunix.get_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions))
    assert scores.shape == (2, 10)
    for row, logprobs in zip(np.asarray(scores), output.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=1e-5)
        assert not row[len(logprobs) :].any()
    assert tunix.generate(["hello"], RolloutConfig(return_logprobs=False)).logprobs is None


@pytest.mark.slow
def test_tunix_follows_its_model(tunix: TunixRollout) -> None:
    """After `update_params`, and after a trainer that shares the model has changed it in place."""
    before = tunix.generate(["hello"], RolloutConfig()).tokens[0].tolist()
    new = nnx.state(nnx_module(tree(5)), nnx.Param)
    tunix.update_params(new, (nnx.Param,))
    changed = tunix.generate(["hello"], RolloutConfig()).tokens[0].tolist()
    assert changed != before
    nnx.update(tunix.model(), nnx.state(nnx_module(tree(0)), nnx.Param))
    assert tunix.generate(["hello"], RolloutConfig()).tokens[0].tolist() == before
    with pytest.raises(RequestError, match="LoRA parameters must be merged"):
        tunix.update_params(new, (nnx.LoRAParam,))


def test_seeds_of_repeated_prompts_differ() -> None:
    worker = TunixRollout(nnx.Module(), Tokenizer(), None, RolloutConfig(), config=CONFIG)
    params = worker._sampling_params(RolloutConfig(temperature=1.0, top_k=5, seed=jax.random.key(3)), 2)
    assert [one.seed for one in params] == [3, 4]
    assert (params[0].top_k, params[0].stop_token_ids, params[0].max_tokens) == (5, (1,), 8)


class BaseRollout(abc.ABC):
    """The methods of tunix's abstract class, with their parameters."""

    @abc.abstractmethod
    def generate(self, prompts: Any, rollout_config: Any, **kwargs: Any) -> Any: ...
    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any: ...
    @abc.abstractmethod
    def update_params(self, params: Any, filter_types: Any = None) -> None: ...
    @abc.abstractmethod
    def pad_id(self) -> int: ...
    @abc.abstractmethod
    def eos_id(self) -> int: ...
    @abc.abstractmethod
    def model(self) -> Any: ...


def test_the_interface_of_tunix() -> None:
    """Against tunix itself where it is installed."""
    base: Any = BaseRollout
    if importlib.util.find_spec("tunix") is not None:
        from tunix.rl.rollout import base_rollout  # ty: ignore[import-not-found]

        base = base_rollout.BaseRollout
        assert issubclass(TunixRollout, base)
    for name in base.__abstractmethods__ - {"__init__"}:
        wanted = inspect.signature(getattr(base, name)).parameters
        found = inspect.signature(getattr(TunixRollout, name)).parameters
        assert list(found) == list(wanted), name
        for parameter, own in zip(wanted.values(), found.values(), strict=True):
            assert (parameter.kind, parameter.default) == (own.kind, own.default), name


@pytest.mark.slow
def test_trees_of_another_kind_than_at_the_start(tunix: TunixRollout) -> None:
    """An engine that began with fused matrices gets a tunix tree and others: copies in its own layout."""
    tensors = {}
    for index, (name, shape) in enumerate(tensor_shapes(CONFIG).items()):
        bits = random_bits(index, int(np.prod(shape))) >> np.uint64(40)
        tensors[name] = ((bits.astype(np.float32) * np.float32(2**-23) - 1) * 0.3).reshape(shape)
    checkpoint = Checkpoint(CONFIG, tensors)
    makers = (trainer_trees.linen_scanned, trainer_trees.tunix, trainer_trees.easydel, trainer_trees.maxtext)
    answers = []
    with sampling_programs(SamplerVariant.FULL), Rollout(CONFIG, **SIZES) as rollout:
        for make in makers:
            rollouts = rollout.generate(make(checkpoint), PROMPTS, GREEDY)
            answers.append([tokens.tolist() for tokens in rollouts.token_ids])
        rollout.generate(tree(1), PROMPTS, GREEDY)
    assert answers == [answers[0]] * len(makers)
    with pytest.raises(EngineError, match="the rollout is closed"):
        rollout.generate(tree(1), PROMPTS)
    with pytest.raises(EngineError, match="no engine before its first call"):
        _ = Rollout(CONFIG).llm


@pytest.mark.slow
def test_a_trainers_mesh() -> None:
    """Two devices divide matrices of three axes, which are merged first. The answers are those of one device."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))
    params = jax.tree.map(lambda leaf: jax.device_put(leaf, split), tree(1))
    answers = []
    with sampling_programs(SamplerVariant.FULL):
        for options in ({}, {"mesh": mesh, "tensor_parallel_size": 2}):
            with Rollout(CONFIG, **options, **SIZES) as rollout:
                for _ in range(2):  # at the start, and in an update
                    rollouts = rollout.generate(tree(1) if not options else dict(params), PROMPTS, GREEDY, version="a")
                    answers.append([tokens.tolist() for tokens in rollouts.token_ids])
    assert answers == [answers[0]] * 4


def test_an_engine_of_several_processes_starts_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes cannot have the arrays. So the first call updates the weights, as all later ones do."""
    calls: list[tuple[str, Any]] = []

    class Engine:
        def __init__(self, model: str, **options: Any):
            calls.append((model, options))

        def update_weights(self, params: Any, **_: Any) -> None:
            calls.append(("update", params))

        def close(self) -> None:
            calls.append(("close", None))

    monkeypatch.setattr(jpaged.rl.rollout, "LLM", Engine)
    first, second = {"a.b": np.zeros(1)}, {"a.b": np.zeros(1)}
    with Rollout("folder", nnodes=2) as rollout:
        for params in (first, first, second):
            rollout.update(params)
    assert calls == [("folder", {"nnodes": 2}), ("update", first), ("update", second), ("close", None)]
