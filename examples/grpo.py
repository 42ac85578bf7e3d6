"""GRPO in one process: the engine generates with the arrays that the optimiser updates. Run `python examples/grpo.py`.

The demo model learns to end `def read(self, path, mode, size):\n    return` with an expression that is valid Python and
uses the second argument. Python's own parser gives the reward. A few minutes on two CPU cores.

    python examples/grpo.py --steps 200 --png grpo.png      # the PNG needs matplotlib

1. `rollout.generate(params, prompts)`: a group of answers to each prompt. The engine uses the optimiser's own arrays.
2. The reward of an answer, minus the mean of its group, is its advantage (GRPO, arXiv:2402.03300).
3. One step of Adam on the clipped objective. It donates the old weights, which the engine no longer needs.
"""

import argparse
import ast
import dataclasses
import functools
import pathlib
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

import jpaged
from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.spec import DecoderSpec

FUNCTIONS = (
    "add", "apply", "check", "copy", "create", "find", "get", "load", "make", "open", "parse", "read", "remove", "save",
    "send", "set", "start", "update", "write",
)  # fmt: skip
NAMES = (
    "value", "name", "key", "data", "path", "text", "line", "item", "index", "count", "size", "width", "height",
    "result", "node", "other", "message", "mode", "limit",
)  # fmt: skip
CLIP = 0.2
LENGTH = 32  # columns of a batch: prompts have at most 16 tokens, answers too


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt, and the name that its answer must use."""

    prompt: str
    name: str

    def reward(self, answer: str, finish_reason: str | None) -> float:
        """1 if the line is finished, the code is Python, and its expression uses the name; else 0."""
        if finish_reason != "stop":
            return 0.0
        try:
            tree = ast.parse(self.prompt + answer)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return 0.0
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        return float(self.name in used)


def draw_task(rng: random.Random) -> Task:
    first, second, third = rng.sample(NAMES, 3)
    return Task(f"def {rng.choice(FUNCTIONS)}(self, {first}, {second}, {third}):\n    return", second)


def log_probs(
    spec: DecoderSpec, params: Any, ids: Int[Array, "batch length"]
) -> Float[Array, "batch next"]:
    """Log-probability of each token after the first. The trainer's own forward pass: the decoder without pages."""
    batch, length = ids.shape
    positions = jnp.tile(jnp.arange(length), batch)
    hidden, *_ = decode(
        spec, params, ids.ravel(), positions, [None] * spec.num_layers, ids, dense_causal_attend
    )
    hidden = hidden.reshape(batch, length, -1)[:, :-1].reshape(batch * (length - 1), -1)
    every = jax.nn.log_softmax(lm_head(spec, params, hidden))
    return jnp.take_along_axis(every, ids[:, 1:].reshape(-1, 1), 1).reshape(batch, -1)


def objective(
    params: Any, spec: DecoderSpec, ids: Int[Array, "batch length"], mask: Bool[Array, "batch next"],
    sampled: Float[Array, "batch next"], advantages: Float[Array, " batch"],
) -> Float[Array, ""]:  # fmt: skip
    """The clipped objective, to be minimised. sampled: the engine's log-probabilities of the tokens."""
    ratio = jnp.exp(jnp.where(mask, log_probs(spec, params, ids) - sampled, 0))
    gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -jnp.sum(gain * mask) / jnp.sum(mask)


@functools.partial(jax.jit, static_argnames=("spec", "optimiser"), donate_argnames=("params", "state"))
def train_step(params: Any, state: Any, spec: DecoderSpec, optimiser: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """One step of the optimiser. The old weights and its old state are donated, so that there is one copy of each.

    Donating the weights is safe here: no request runs, and the next call of `generate` gives the engine the new ones.
    Until then the engine would refuse requests.
    """
    gradients = jax.grad(objective)(params, spec, *batch)
    updates, state = optimiser.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def batch_of(rollouts: jpaged.Rollouts, rewards: np.ndarray, group: int) -> tuple[np.ndarray, ...]:
    """Arrays of `objective`: each row is a prompt and its answer, then padding."""
    ids = np.zeros((len(rollouts), LENGTH), np.int32)
    mask, sampled = np.zeros((len(rollouts), LENGTH - 1), bool), np.zeros((len(rollouts), LENGTH - 1), np.float32)
    rows = zip(rollouts.prompt_ids, rollouts.token_ids, rollouts.logprobs, strict=True)
    for row, (prompt, answer, logprobs) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = np.concatenate([prompt, answer])
        place = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        mask[row, place], sampled[row, place] = True, logprobs
    grouped = rewards.reshape(-1, group)
    advantages = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-4)
    return ids, mask, sampled, advantages.astype(np.float32).ravel()


def differences(rollout: jpaged.Rollout, spec: DecoderSpec, params: Any, rollouts: jpaged.Rollouts) -> str:
    """A table: by how much log-probabilities of the sampled tokens differ."""
    sampled = np.concatenate(rollouts.logprobs)
    scores = np.concatenate(rollout.score(params, rollouts.prompt_ids, rollouts.token_ids))
    ids, mask, *_ = batch_of(rollouts, np.zeros(len(rollouts)), 1)
    own = np.asarray(jax.jit(log_probs, static_argnames="spec")(spec, params, ids))[mask]
    lines = [f"{len(sampled):,} sampled tokens, log-probabilities   largest difference   mean"]
    for title, other in (("LLM.score", scores), ("the trainer's forward pass", own)):
        difference = np.abs(other.astype(np.float64) - sampled)
        lines.append(f"  sampling against {title:<30} {difference.max():18.1e} {difference.mean():9.1e}")
    return "\n".join(lines)


def plot(rewards: list[float], path: pathlib.Path) -> None:
    """Draw the mean reward of each step."""
    import matplotlib  # only for --png

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    steps = np.arange(1, len(rewards) + 1)
    window = min(10, len(rewards))
    smooth = np.convolve(rewards, np.ones(window) / window, "valid")
    axes.plot(steps, rewards, ".", color="#9db7d5", markersize=4, label="a step")
    axes.plot(steps[window - 1 :], smooth, color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), xlim=(0, len(rewards) + 1))
    axes.set_title("GRPO on the demo model: valid Python that uses the second argument", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=140)


def main() -> None:
    """Train, print the reward and the table of differences, and draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of training; default 200")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step; default 8")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt; default 8")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of Adam; default 5e-5")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of prompts; default 0")
    parser.add_argument("--png", type=pathlib.Path, help="draw the reward; needs matplotlib")
    options = parser.parse_args()

    print("loading the demo model; then the first step compiles for 20 s or more", file=sys.stderr)
    model = load_model(EngineConfig(model="demo", dtype="float32"))
    spec, params = model.spec, model.params
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate, b2=0.95))
    state = optimiser.init(params)
    rng, rewards, began = random.Random(options.seed), list[float](), time.monotonic()
    seconds = {"generation": 0.0, "training": 0.0}
    sampling = jpaged.SamplingParams(n=options.group, temperature=1.0, max_tokens=16, stop="\n")
    sizes: Any = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": LENGTH + 16}
    with jpaged.Rollout("demo", **sizes) as rollout:
        progress = tqdm(range(options.steps), desc="GRPO", unit="step")
        for step in progress:
            tasks = [draw_task(rng) for _ in range(options.prompts)]
            start = time.monotonic()
            if not step:
                progress.set_postfix_str("compiling the engine's programs")
            rollouts = rollout.generate(params, [task.prompt for task in tasks], sampling)
            middle = time.monotonic()
            answers = zip(rollouts.prompt_indices, rollouts.texts, rollouts.finish_reasons, strict=True)
            of_step = np.array([tasks[i].reward(text, reason) for i, text, reason in answers])
            rewards.append(float(of_step.mean()))
            if not step:
                progress.set_postfix_str("compiling the training step")
            if step + 1 < options.steps:
                params, state = train_step(params, state, spec, optimiser, batch_of(rollouts, of_step, options.group))
                jax.block_until_ready(params)
            seconds["generation"] += middle - start
            seconds["training"] += time.monotonic() - middle
            progress.set_postfix(reward=f"{np.mean(rewards[-10:]):.2f}")
        update = rollout.update(params, version="the end")
        assert update is not None  # a new version is always an update
        few = max(1, min(10, options.steps // 2))
        first, last = np.mean(rewards[:few]), np.mean(rewards[-few:])
        print(f"mean reward: {first:.3f} in the first {few} steps, {last:.3f} in the last {few}")
        print(f"{update.num_by_reference} of {update.num_leaves} arrays of the engine are the trainer's own")
        print(f"{time.monotonic() - began:.0f} s: " + ", ".join(f"{name} {n:.0f} s" for name, n in seconds.items()))
        print(differences(rollout, spec, params, rollouts))
        print("\nanswers:")
        for i in range(0, len(rollouts), options.group):
            print("  " + (tasks[rollouts.prompt_indices[i]].prompt + rollouts.texts[i]).replace("\n    ", " "))
    if options.png:
        plot(rewards, options.png)


if __name__ == "__main__":
    main()
