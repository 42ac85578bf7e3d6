"""Trains the demo model: a Llama of 5 million parameters, on the source of Python's standard library.

    python -m pip install -e . optax
    python tools/train_demo.py train          # about 50 minutes on two quiet CPU cores
    python tools/train_demo.py train          # after an interruption: continues from the last checkpoint
    python tools/train_demo.py export --out jpaged/demo_model
    python tools/train_demo.py sample         # greedy continuations of the built-in prompts

1. `read_corpus` (demo_corpus.py) reads the standard library's files and holds out 5% of them.
2. `train_tokenizer` trains a byte-level BPE of 4,096 tokens on the training text.
3. `train` runs the serving decoder (`jpaged.models.decoder`) with dense attention in float32. Muon trains the matrices,
   Adam the rest. Learning rates warm up, stay constant, then decay (WSD). Batches are a function of (seed, step), so a
   run can continue from any checkpoint and gives the same result.
4. `export` measures the held-out loss and writes a Hugging Face folder (demo_folder.py).

The held-out loss is in nats per token, over consecutive windows of 1,024 tokens of the held-out text. The weights are
rounded to bf16, as exported. docs/demo_model.md has the measurements for these choices.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from complete_python import complete_python
from demo_corpus import END_OF_TEXT, Stream, held_out_sample, read_corpus, train_tokenizer
from demo_folder import write_folder
from jax import lax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jpaged.cli.common.demo_prompts import BUILT_IN_PROMPTS
from jpaged.models import decoder
from jpaged.models.spec import AttentionOptions, DecoderSpec, Params, Rope, param_shapes

STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))
LOSS_WINDOW = 1024  # tokens per window of the recorded held-out loss
LOGITS_CHUNK = 512  # tokens per chunk of logits: 8 MB, which fit into the CPU's cache

SPEC = DecoderSpec(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,  # 4 heads of 64, not 8 of 32: half the softmax, which is a third of a training step on CPU
    max_position=2048,
    rope=Rope(theta=10000.0),
    tie_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hyperparameters, recorded in the model folder. The defaults are those of the shipped model."""

    seed: int = 0
    steps: int = 1050
    batch_tokens: int = 8192
    warmup_steps: int = 60
    decay_share: float = 0.35        # share of the steps, at the end, in which the learning rate falls to zero
    length: int = 512                # tokens per sequence before the decay
    decay_lengths: tuple[int, ...] = (512, 1024, 512, 2048)  # in turn, in the decay: the model has to work at 2,048
    matrix_rate: float = 0.02        # Muon
    vector_rate: float = 0.004       # Adam: embedding and norms
    weight_decay: float = 0.05       # for matrices, times the learning rate
    clip_norm: float = 1.0

    @property
    def decay_start(self) -> int:
        """First step of the decay. It has the plateau's learning rate, and the next step a lower one."""
        return self.steps - int(self.steps * self.decay_share)

    def length_at(self, step: int) -> int:
        """Return the tokens per sequence in a step."""
        return self.length if step < self.decay_start else self.decay_lengths[step % len(self.decay_lengths)]

    def batch(self, stream: Stream, step: int) -> np.ndarray:
        """Return the batch of a step, int32[sequences, length + 1]."""
        length = self.length_at(step)
        first = step * (self.batch_tokens // min(self.length, *self.decay_lengths))
        numbers = first + np.arange(self.batch_tokens // length)
        return stream.spread(numbers, length, np.random.default_rng(self.seed).random())

    def schedule(self, peak: float, step: Any) -> Array:
        """Return the learning rate: linear warm-up, plateau, linear decay to zero (Hu et al. 2024, MiniCPM)."""
        left = (self.steps - step) / (self.steps - self.decay_start)
        return peak * jnp.minimum(1.0, jnp.minimum((step + 1) / self.warmup_steps, left))


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


# --- the model --------------------------------------------------------------------------------------------------------


def init_params(seed: int) -> decoder.Params:
    """Initialise the demo model's weights."""
    return init_tree(param_shapes(SPEC, jnp.float32), seed, SPEC.num_layers)


def init_tree(tree: Params, seed: int, num_layers: int) -> Params:
    """Initialise: normal with standard deviation 0.02, less for outputs to the residual stream; norms are 1."""
    shapes, tree = jax.tree.flatten_with_path(tree)
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def leaf(path: Any, shape: jax.ShapeDtypeStruct, key: Array) -> Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape.shape, shape.dtype)
        scale = 0.02 / math.sqrt(2 * num_layers) if name in ("o", "down") else 0.02
        return scale * jax.random.normal(key, shape.shape, shape.dtype)

    return jax.tree.unflatten(tree, [leaf(p, s, k) for (p, s), k in zip(shapes, keys, strict=True)])


def blocked_causal_attend(
    projection: decoder.Projection,
    pages: Any,
    metadata: Int[Array, "batch length"],
    options: AttentionOptions,
    sinks: Array | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Any]:
    """Compute `decoder.dense_causal_attend` in blocks of one KV head, one sequence and 256 queries.

    The scores of a block fit into the CPU's cache, and the backward pass recomputes them. Forward and backward of
    4 x 2,048 tokens take 209 ms per layer, 502 ms with whole sequences (two Zen 5 cores, float32). Supports
    causal masks and the scale, no other option.
    """
    batch, length = metadata.shape
    q, k, v = projection.finish()
    assert v is not None  # no latent attention here
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    q = q.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch * kv_heads, length, group, head_dim)
    k, v = (
        a.reshape(batch, length, kv_heads, head_dim).transpose(0, 2, 1, 3).reshape(batch * kv_heads, length, head_dim)
        for a in (k, v)
    )

    @jax.checkpoint
    def block(qkv: tuple[Array, Array, Array]) -> Array:
        q, k, v = qkv
        queries, keys = q.shape[0], k.shape[0]
        seen = jnp.repeat(jnp.arange(keys - queries, keys), group)[:, None] >= jnp.arange(keys)
        scores = q.reshape(-1, head_dim) @ k.T * options.scale
        return (jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) @ v).reshape(q.shape)

    blocks = []
    for start in range(0, length, 256):
        stop = min(start + 256, length)
        blocks.append(lax.map(block, (q[:, start:stop], k[:, :stop], v[:, :stop])))
    out = jnp.concatenate(blocks, axis=1).reshape(batch, kv_heads, length, group, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch * length, kv_heads * group, head_dim), pages


def token_losses(params: decoder.Params, ids: Int[Array, "batch length_plus_1"]) -> Float[Array, " tokens"]:
    """Return the negative log-probabilities, in nats, of all tokens except the first of each sequence."""
    inputs, targets = ids[:, :-1], ids[:, 1:].reshape(-1)
    positions = jnp.tile(jnp.arange(inputs.shape[1]), inputs.shape[0])
    hidden, *_ = decoder.decode(
        SPEC, params, inputs.reshape(-1), positions, [None] * SPEC.num_layers, inputs, blocked_causal_attend
    )

    @jax.checkpoint
    def chunk(hidden_and_targets: tuple[Array, Array]) -> Array:
        hidden, targets = hidden_and_targets
        logits = decoder.lm_head(SPEC, params, hidden)
        target = jnp.where(jnp.arange(SPEC.vocab_size) == targets[:, None], logits, 0.0).sum(-1)  # no scatter backward
        return jax.nn.logsumexp(logits, axis=-1) - target

    chunks = (hidden.reshape(-1, LOGITS_CHUNK, SPEC.hidden_size), targets.reshape(-1, LOGITS_CHUNK))
    return lax.map(chunk, chunks).reshape(-1)


def mean_loss(params: decoder.Params, windows: np.ndarray) -> float:
    """Return the mean token loss over windows [n, length + 1], computed eight windows at a time."""
    losses = jax.jit(token_losses)
    sums = []
    for start in range(0, len(windows), 8):
        rows = windows[start : start + 8]
        padded = np.pad(rows, ((0, 8 - len(rows)), (0, 0)))
        sums.append(np.asarray(losses(params, padded)).reshape(8, -1)[: len(rows)].sum(dtype=np.float64))
    return float(sum(sums) / (windows.shape[0] * (windows.shape[1] - 1)))


def loss_by_position(params: decoder.Params, windows: np.ndarray, width: int = 256) -> dict[str, float]:
    """Return the mean loss at positions 0 to 255, 256 to 511 and so on. It falls while more context helps the model."""
    losses = [np.asarray(jax.jit(token_losses)(params, windows[i : i + 4])) for i in range(0, len(windows), 4)]
    means = np.concatenate(losses).reshape(len(windows), -1, width).mean((0, 2), dtype=np.float64)
    return {f"{i * width}-{(i + 1) * width - 1}": float(mean) for i, mean in enumerate(means)}


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(recipe: Recipe) -> Any:
    """Make the optimizer: Muon (Jordan et al. 2024) for matrices [out, in], Adam for the rest, clipped gradients."""
    import optax
    from optax.contrib import MuonDimensionNumbers, muon

    axes = {
        "qkv": MuonDimensionNumbers(reduction_axis=3, output_axis=(0, 1, 2)),
        "gate_up": MuonDimensionNumbers(reduction_axis=2, output_axis=1),  # gate and up are two matrices
        "o": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
        "down": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
        "fc": MuonDimensionNumbers(reduction_axis=1, output_axis=0),  # of a draft head
    }

    def matrices(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: axes.get(path[-1].key), params)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        muon(
            functools.partial(recipe.schedule, recipe.matrix_rate),
            adam_learning_rate=functools.partial(recipe.schedule, recipe.vector_rate),
            adam_b2=0.98,
            weight_decay=recipe.weight_decay,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def train(recipe: Recipe, work: pathlib.Path) -> None:
    """Train the demo model."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(STDLIB)
    tokenizer = train_tokenizer(corpus.train, SPEC.vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    stream, held_out = Stream.encode(tokenizer, corpus.train), Stream.encode(tokenizer, corpus.held_out)
    probe = held_out.windows(512, 32)
    run_steps(
        recipe, work, init_params(recipe.seed), lambda params, ids: token_losses(params, ids).mean(),
        lambda step: (recipe.batch(stream, step),), lambda params: mean_loss(params, probe),
        f"{len(stream.ids):,} training tokens, {len(held_out.ids):,} held out",
    )  # fmt: skip


def run_steps(
    recipe: Recipe, work: pathlib.Path, params: Params, loss_of: Callable[..., Array],
    batch_of: Callable[[int], tuple[Any, ...]], held_out_loss: Callable[[Params], float], data: str,
) -> None:  # fmt: skip
    """Train until `recipe.steps`, from the last checkpoint in `work` if there is one. Prints and saves the curve.

    params:   initial weights, float32.
    loss_of:  loss of the weights and a batch.
    batch_of: batch of a step.
    data:     description of the data, for the first line.
    """
    import optax

    optimizer = make_optimizer(recipe)
    state = (params, optimizer.init(params))
    progress = Progress(0, 0.0, 0.0, [])
    if (work / "checkpoint.npz").exists():
        state, progress = load_checkpoint(work, state, recipe)
    print(f"{sum(a.size for a in jax.tree.leaves(params)):,} parameters, {data}; from step {progress.step}", flush=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, *batch: Any) -> tuple[Any, Float[Array, ""]]:
        params, optimizer_state = state
        loss, gradient = jax.value_and_grad(lambda p: loss_of(p, *batch))(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    started, cpu_started = time.monotonic() - progress.seconds, time.process_time() - progress.cpu_seconds
    losses = []
    bar = tqdm(range(progress.step, recipe.steps), initial=progress.step, total=recipe.steps, unit="step")
    for step in bar:
        state, loss = update(state, *batch_of(step))
        losses.append(float(loss))
        done = step + 1
        if done % 50 == 0 or done == recipe.steps:
            progress.step = done
            progress.seconds, progress.cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
            point = {
                "step": done,
                "tokens": done * recipe.batch_tokens,
                "seconds": round(progress.seconds, 1),
                "cpu_seconds": round(progress.cpu_seconds, 1),
                "train_loss": round(float(np.mean(losses)), 4),
                "held_out_loss": round(held_out_loss(state[0]), 4),
            }
            losses = []
            progress.curve.append(point)
            tqdm.write(json.dumps(point))
            if done % 100 == 0 or done == recipe.steps:
                save_checkpoint(work, state, progress, recipe)


@dataclasses.dataclass
class Progress:
    step: int
    seconds: float                  # wall time of training so far, without interruptions
    cpu_seconds: float              # CPU time of all threads; does not depend on the load of the machine
    curve: list[dict[str, float]]   # step, tokens, the two times, train_loss (mean since the last point), held_out_loss


def save_checkpoint(work: pathlib.Path, state: Any, progress: Progress, recipe: Recipe) -> None:
    """Write the state, progress and recipe to one file. The file is replaced atomically."""
    leaves: dict[str, Any] = {f"leaf_{i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(state))}
    record = json.dumps({"progress": dataclasses.asdict(progress), "recipe": dataclasses.asdict(recipe)})
    partial = work / "partial.npz"
    np.savez(partial, record=np.array(record), **leaves)
    os.replace(partial, work / "checkpoint.npz")


def load_checkpoint(work: pathlib.Path, like: Any, recipe: Recipe | None = None) -> tuple[Any, Progress]:
    """Return the state (a tree like `like`) and progress of the run in `work`.

    `recipe` must agree with the checkpoint's recipe for the steps done so far, else exits with an error. The number of
    steps and the decay may differ if neither recipe has begun to decay.
    """
    with np.load(work / "checkpoint.npz") as saved:
        record = json.loads(str(saved["record"]))
        progress = Progress(**record["progress"])
        leaves = [jnp.asarray(saved[f"leaf_{i}"]) for i in range(len(jax.tree.leaves(like)))]
    if recipe is not None:
        old = recipe_of(record["recipe"], type(recipe))
        free = dict.fromkeys(("steps", "decay_share", "decay_lengths"))
        same = old == recipe or (
            progress.step <= min(old.decay_start, recipe.decay_start)
            and dataclasses.asdict(old) | free == dataclasses.asdict(recipe) | free
        )
        if not same:
            raise SystemExit(f"{work} has a run with another recipe ({old}): choose another --work, or delete it")
    return jax.tree.unflatten(jax.tree.structure(like), leaves), progress


def load_params(work: pathlib.Path, like: Params, kind: type[AnyRecipe]) -> tuple[Params, Progress, AnyRecipe]:
    """Return weights (a tree like `like`), progress and recipe of the run in `work`.

    Weights are rounded to bf16, and stored as float32. kind: the recipe's class.
    """
    params, progress = load_checkpoint(work, like)
    with np.load(work / "checkpoint.npz") as saved:
        recipe = recipe_of(json.loads(str(saved["record"]))["recipe"], kind)
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), params), progress, recipe


def load_tokenizer(work: pathlib.Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(work / "tokenizer.json"))


def recipe_of(record: dict[str, Any], kind: type[AnyRecipe]) -> AnyRecipe:
    # JSON has no tuples
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
    return kind(**values)


# --- export and samples -----------------------------------------------------------------------------------------------


def export(work: pathlib.Path, out: pathlib.Path, check_text: pathlib.Path) -> None:
    """Write the model folder from the checkpoint in `work`, with the losses of the exported weights.

    check_text: a text outside the corpus. Its loss is recorded too, so that a test can compute it again.
    """
    params, progress, recipe = load_params(work, init_params(0), Recipe)
    tokenizer = load_tokenizer(work)
    corpus = read_corpus(STDLIB)
    train_ids = Stream.encode(tokenizer, corpus.train).ids
    held_out = Stream.encode(tokenizer, corpus.held_out)
    windows = held_out.windows(LOSS_WINDOW)
    loss = mean_loss(params, windows)
    held_out_bytes = len(tokenizer.decode(windows[:, 1:].reshape(-1).tolist()).encode())

    out.mkdir(parents=True, exist_ok=True)
    (out / "held_out.txt").write_text(held_out_sample(corpus), "utf-8")
    text = check_text.read_text("utf-8")
    check_ids = np.array([tokenizer.encode(text).ids], np.int32)
    check_tokens = (check_ids.shape[1] - 1) // LOGITS_CHUNK * LOGITS_CHUNK
    record = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(a.size for a in jax.tree.leaves(params)),
        "steps_done": progress.step,
        "seconds": round(progress.seconds),
        "cpu_seconds": round(progress.cpu_seconds),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "optax", "tokenizers", "numpy")},
        "corpus": {
            "sha256": corpus.sha256,
            "train_files": len(corpus.train),
            "train_tokens": len(train_ids),
            "held_out_files": len(corpus.held_out),
            "held_out_tokens": len(held_out.ids),
        },
        "held_out": {
            "loss": loss,
            "bits_per_byte": loss * windows[:, 1:].size / math.log(2) / held_out_bytes,
            "window": LOSS_WINDOW,
            "tokens": windows[:, 1:].size,
            "loss_by_position": loss_by_position(params, held_out.windows(SPEC.max_position, 32)),
        },
        "check_text": {
            "file": check_text.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": check_tokens,
            "loss": mean_loss(params, check_ids[:, : check_tokens + 1]),
        },
        "curve": progress.curve,
    }
    size = write_folder(out, SPEC, params, tokenizer, record)
    print(f"{out}: {size / 1e6:.2f} MB, held-out loss {loss:.4f} nats a token")


def sample(work: pathlib.Path, num_tokens: int) -> None:
    """Print greedy continuations of the built-in prompts, and how many are Python (`complete_python`).

    There is no KV cache: each step computes whole sequences.
    """
    params, progress, _ = load_params(work, init_params(0), Recipe)
    tokenizer = load_tokenizer(work)
    prompts = [tokenizer.encode(p).ids for p in BUILT_IN_PROMPTS]
    width = max(map(len, prompts)) + num_tokens
    ids = np.zeros((len(prompts), width), np.int32)
    lengths = np.array([len(p) for p in prompts])
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def next_tokens(ids: Int[Array, "batch width"], lengths: Int[Array, " batch"]) -> Int[Array, " batch"]:
        positions = jnp.tile(jnp.arange(width), len(prompts))
        hidden, *_ = decoder.decode(
            SPEC, params, ids.reshape(-1), positions, [None] * SPEC.num_layers, ids, blocked_causal_attend
        )
        last = hidden.reshape(*ids.shape, -1)[jnp.arange(len(prompts)), lengths - 1]
        return decoder.lm_head(SPEC, params, last).argmax(-1)

    for _ in range(num_tokens):
        ids[np.arange(len(prompts)), lengths] = np.asarray(next_tokens(ids, lengths))
        lengths += 1
    good = 0
    for prompt, start, row in zip(BUILT_IN_PROMPTS, map(len, prompts), ids, strict=True):
        text = tokenizer.decode(row[start : start + num_tokens].tolist(), skip_special_tokens=False)
        continuation = text.split(END_OF_TEXT)[0]
        is_python = complete_python(prompt, continuation) is not None
        good += is_python
        print(f"{'-' * 40} {'python' if is_python else 'not python'}\n{prompt}{continuation}")
    print(f"{'-' * 40}\nstep {progress.step}: {good} of {len(prompts)} continuations are Python")


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "export", "sample"))
    parser.add_argument("--work", type=pathlib.Path, default=root / "build" / "train_demo", help="folder of the run")
    parser.add_argument("--out", type=pathlib.Path, default=root / "jpaged" / "demo_model", help="folder to export to")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="steps of the whole run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokens", type=int, default=192, help="tokens of a sample (default: %(default)s)")
    args = parser.parse_args()
    match args.command:
        case "train":
            train(Recipe(seed=args.seed, steps=args.steps), args.work)
        case "export":
            export(args.work, args.out, root / "tests" / "golden" / "demo_check_text.py.txt")
        case "sample":
            sample(args.work, args.tokens)


if __name__ == "__main__":
    sys.exit(main())
