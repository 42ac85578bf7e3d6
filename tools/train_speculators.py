"""Trains speculators of the demo model: a draft model, an EAGLE-3 head and an MTP layer.

    python -m pip install -e . optax
    python tools/train_speculators.py train draft     # or eagle3, or mtp; continues from the last checkpoint
    python tools/train_speculators.py measure draft   # which share of the drafts the demo model accepts
    python tools/train_speculators.py export draft    # jpaged/demo_draft, jpaged/demo_eagle3; mtp needs --out

1. The demo model writes text, and its hidden states on this text and on its training text are stored
   (speculator_data.py). This happens once, before the first training.
2. `train` distils: the targets are the demo model's probabilities of the next token. A head is trained over several
   passes on its own states (speculator_passes.py).
3. `measure` counts the accepted drafts on the demo model's continuations of held-out text, greedy and at temperature 1.
4. `export` writes folders in Hugging Face format, with the measurements (speculator_folder.py).

docs/speculative_decoding.md has the figures and the reasons for the choices.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_corpus import Stream, read_corpus
from jax import lax
from jaxtyping import Array, Float, Int
from speculator_data import (
    AUX_LAYERS,
    ROW_LENGTH,
    Rows,
    Target,
    cache_states,
    continue_texts,
    load_target,
    prompts_from,
    target_states,
)
from speculator_folder import write_draft, write_eagle3, write_mtp
from speculator_passes import Acceptance, Drafting, agreement, head_passes, measure, shifted
from train_demo import (
    LOGITS_CHUNK,
    STDLIB,
    Progress,
    Recipe,
    blocked_causal_attend,
    init_tree,
    load_params,
    run_steps,
)

from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.spec import DecoderSpec, Params, Rope, param_shapes

DRAFTS = 6           # drafts per step of the measurements
MEASURED_ROWS = 48   # continuations of each temperature
MEASURED_LENGTH = 384
MEASURED_PROMPT = 128
# temperature of the text -> temperatures of the drafter, with their names
MEASURED = {
    0.0: {0.0: "greedy"},
    1.0: {1.0: "temperature 1", 0.7: "temperature 1, drafts at 0.7", 0.5: "temperature 1, drafts at 0.5",
          0.0: "temperature 1, greedy drafts"},
}  # fmt: skip

DRAFT_SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=96, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
    max_position=2048, rope=Rope(theta=10000.0), tie_embeddings=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SpeculatorRecipe(Recipe):
    """Hyperparameters of a run. Rows of ROW_LENGTH tokens are cut into sequences of `length_at` tokens."""

    steps: int = 2000
    batch_tokens: int = 4096
    decay_lengths: tuple[int, ...] = (512, 1024)
    passes: int = 1            # of a head, on its own states
    pass_weight: float = 0.8   # weight of a pass's loss, times the weight of the pass before
    draft_vocab: int | None = None  # ids of an EAGLE-3 head: the most frequent ones of the text


HEAD_TEXT: dict[str, Any] = {"length": ROW_LENGTH, "decay_lengths": (ROW_LENGTH,), "decay_share": 0.6}
RECIPES = {
    "draft": SpeculatorRecipe(steps=1800),
    "eagle3": SpeculatorRecipe(steps=500, passes=3, draft_vocab=1280, **HEAD_TEXT),
    "mtp": SpeculatorRecipe(steps=300, passes=2, **HEAD_TEXT),
}


def head_spec(method: str, target: DecoderSpec, recipe: SpeculatorRecipe) -> HeadSpec:
    """The head's shape. An EAGLE-3 head's layer is narrower than the target's: it is a sixth of its work."""
    layer = dataclasses.replace(target, num_layers=1)
    if method == "mtp":
        return HeadSpec(HeadKind.MTP, layer, target.hidden_size, own_head=False)
    layer = dataclasses.replace(layer, head_dim=32, intermediate_size=256, tie_embeddings=False)
    return HeadSpec(HeadKind.EAGLE3, layer, target.hidden_size, AUX_LAYERS, recipe.draft_vocab)


@dataclasses.dataclass(frozen=True)
class Speculator:
    """A kind of speculator: its initial weights, its loss, and its drafts."""

    params: Params                          # initial weights
    fixed: Params                           # leaves that are not trained
    which: slice                            # states of `Rows` that the loss reads
    loss: Callable[..., Float[Array, ""]]   # of the weights, ids, and states
    drafting: Callable[[Params], Drafting]  # of trained weights


def probabilities(
    target: Target, hidden: Float[Array, "batch length hidden"], chosen: np.ndarray | None = None
) -> Float[Array, "batch length chosen"]:
    """The target's probabilities of the next token: of all ids, or of those in `chosen`. They have no gradient."""

    def chunk(hidden: Array) -> Array:
        found = jax.nn.softmax(decoder.lm_head(target.spec, target.params, hidden))
        return found if chosen is None else jnp.take(found, chosen, axis=1)

    found = lax.map(chunk, hidden.reshape(-1, LOGITS_CHUNK, hidden.shape[-1]))
    return lax.stop_gradient(found.reshape(*hidden.shape[:2], -1))


@jax.custom_vjp
def distil(
    x: Float[Array, "rows hidden"], matrix: Float[Array, "vocab hidden"], wanted: Float[Array, "rows vocab"]
) -> Float[Array, ""]:
    """Sum of the rows' cross-entropies with the wanted probabilities, in nats. Logits are x times the matrix.

    Probabilities of a row may sum to less than 1: a row of zeros adds nothing. The gradient is computed in the same
    pass over chunks of rows, so that a chunk's logits stay in the CPU's cache.
    """
    return _distil(x, matrix, wanted)[0]


def _distil(x: Array, matrix: Array, wanted: Array) -> tuple[Array, tuple[Array, Array]]:
    def chunk(matrix_gradient: Array, rows: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, wanted = rows
        logs = jax.nn.log_softmax(x @ matrix.T)
        gradient = wanted.sum(-1, keepdims=True) * jnp.exp(logs) - wanted
        return matrix_gradient + gradient.T @ x, (-(wanted * logs).sum(), gradient @ matrix)

    chunks = (x.reshape(-1, LOGITS_CHUNK, x.shape[-1]), wanted.reshape(-1, LOGITS_CHUNK, wanted.shape[-1]))
    matrix_gradient, (losses, x_gradient) = lax.scan(chunk, jnp.zeros_like(matrix), chunks)
    return losses.sum(), (x_gradient.reshape(x.shape), matrix_gradient)


def _distil_backward(gradients: tuple[Array, Array], scale: Array) -> tuple[Array, Array, None]:
    return gradients[0] * scale, gradients[1] * scale, None


distil.defvjp(_distil, _distil_backward)


# --- the draft model --------------------------------------------------------------------------------------------------


def draft_speculator(target: Target, recipe: SpeculatorRecipe) -> Speculator:
    """A small Llama. Its embedding starts as the target's, on its main axes."""
    params = init_tree(param_shapes(DRAFT_SPEC, jnp.float32), recipe.seed, DRAFT_SPEC.num_layers)
    embed = np.asarray(target.params["embed"])
    axes = np.linalg.svd(embed - embed.mean(0), full_matrices=False)[2][: DRAFT_SPEC.hidden_size]
    embed = embed @ axes.T
    params["embed"] = jnp.asarray(0.05 * embed / embed.std())

    def hidden_of(params: Params, ids: Int[Array, "batch length"]) -> Float[Array, "tokens hidden"]:
        positions = jnp.tile(jnp.arange(ids.shape[1]), ids.shape[0])
        layers = [None] * DRAFT_SPEC.num_layers
        return decoder.decode(DRAFT_SPEC, params, ids.reshape(-1), positions, layers, ids, blocked_causal_attend)[0]

    def loss(params: Params, ids: Int[Array, "batch length"], states: tuple[Array, ...]) -> Float[Array, ""]:
        hidden = hidden_of(params, ids)
        x = decoder.lm_head(dataclasses.replace(DRAFT_SPEC, pools=True), params, hidden)  # only the final norm
        wanted = probabilities(target, states[-1].astype(jnp.float32))
        return distil(x, params["embed"], wanted.reshape(len(x), -1)) / len(x)

    def drafting(params: Params) -> Drafting:
        def logits(ids: Int[Array, "batch length"], states: tuple[Array, ...]) -> list[Array]:
            found = decoder.lm_head(DRAFT_SPEC, params, hidden_of(params, ids)).reshape(*ids.shape, -1)
            return [shifted(found, 1 + j) for j in range(DRAFTS)]

        return logits

    return Speculator(params, {}, slice(-1, None), loss, drafting)


# --- heads ------------------------------------------------------------------------------------------------------------


def head_speculator(target: Target, recipe: SpeculatorRecipe, method: str, ids: np.ndarray) -> Speculator:
    """An EAGLE-3 head or an MTP layer. Its output matrix and final norm start as the target's.

    ids: the text, whose most frequent ids are the draft vocabulary.
    """
    spec = head_spec(method, target.spec, recipe)
    shapes, fixed = draft_head.head_param_shapes(spec, jnp.float32), {}
    shapes.pop("d2t", None)
    params = init_tree(shapes, recipe.seed, target.spec.num_layers)
    params["final_norm"] = jnp.copy(target.params["final_norm"])  # a step of training donates its weights
    chosen = np.arange(target.spec.vocab_size)
    if spec.draft_vocab_size is not None:
        counts = np.bincount(ids.reshape(-1), minlength=target.spec.vocab_size)
        chosen = np.sort(np.argsort(-counts, kind="stable")[: spec.draft_vocab_size])
        fixed["d2t"] = jnp.asarray(chosen - np.arange(len(chosen)), jnp.int32)
    if spec.own_head:
        params["lm_head"] = target.params["embed"][chosen]

    def loss(params: Params, ids: Int[Array, "batch length"], states: tuple[Array, ...]) -> Float[Array, ""]:
        *aux, last = (state.astype(jnp.float32) for state in states)
        outputs = head_passes(spec, params | fixed, target, ids, tuple(aux) or (last,), recipe.passes)
        length, normed = ids.shape[1], dataclasses.replace(spec.layer, pools=True)
        wanted = probabilities(target, last, None if spec.draft_vocab_size is None else chosen)
        matrix = params["lm_head"] if spec.own_head else target.params["embed"]
        total, weight, weights = jnp.float32(0), 1.0, 0.0
        for j, hidden in enumerate(outputs):
            valid = jnp.arange(length) < length - 1 - j
            of_pass = (shifted(wanted, 1 + j) * valid[:, None]).reshape(len(hidden), -1)
            total += weight * distil(decoder.lm_head(normed, params, hidden), matrix, of_pass) / len(hidden)
            weight, weights = weight * recipe.pass_weight, weights + weight
        return total / weights

    def drafting(params: Params) -> Drafting:
        def logits(ids: Int[Array, "batch length"], states: tuple[Array, ...]) -> list[Array]:
            *aux, last = states
            used = tuple(aux) if spec.aux_layers else (last,)
            outputs = head_passes(spec, params | fixed, target, ids, used, DRAFTS)
            found = [draft_head.head_logits(spec, params, hidden, target.params) for hidden in outputs]
            return [spread_logits(x, chosen, target.spec.vocab_size).reshape(*ids.shape, -1) for x in found]

        return logits

    return Speculator(params, fixed, slice(None) if spec.aux_layers else slice(-1, None), loss, drafting)


def spread_logits(logits: Float[Array, "rows draft"], chosen: np.ndarray, vocab: int) -> Float[Array, "rows vocab"]:
    """Logits over the whole vocabulary: ids that are not drafted have -inf."""
    if len(chosen) == vocab:
        return logits
    return jnp.full((len(logits), vocab), -jnp.inf).at[:, chosen].set(logits)


# --- commands ---------------------------------------------------------------------------------------------------------


def speculator(method: str, target: Target, recipe: SpeculatorRecipe, ids: np.ndarray) -> Speculator:
    if method == "draft":
        return draft_speculator(target, recipe)
    return head_speculator(target, recipe, method, ids)


def rows_of(target: Target, work: pathlib.Path, seed: int) -> Rows:
    """Rows to train on, from `work` if they are there."""
    stream = Stream.encode(target.tokenizer, read_corpus(STDLIB).train)
    return cache_states(target, stream, work / "rows", seed, blocked_causal_attend)


def train(method: str, recipe: SpeculatorRecipe, target: Target, work: pathlib.Path) -> None:
    """Train until `recipe.steps`, from the last checkpoint if there is one."""
    rows, run = rows_of(target, work, recipe.seed), work / method
    run.mkdir(parents=True, exist_ok=True)
    made = speculator(method, target, recipe, rows.ids)
    held_out = Stream.encode(target.tokenizer, read_corpus(STDLIB).held_out).windows(ROW_LENGTH - 1, 8)
    states = target_states(target, jnp.asarray(held_out), blocked_causal_attend)[made.which]
    loss = jax.jit(made.loss)

    def held_out_loss(params: Params) -> float:
        parts = [loss(params, held_out[i : i + 4], tuple(s[i : i + 4] for s in states)) for i in (0, 4)]
        return float(np.mean(parts))

    def batch_of(step: int) -> tuple[Array, tuple[Array, ...]]:
        ids, states = rows.batch(step, recipe.batch_tokens // ROW_LENGTH, made.which)
        cut = (-1, recipe.length_at(step))
        return jnp.asarray(ids.reshape(cut)), tuple(jnp.asarray(s.reshape(*cut, s.shape[-1])) for s in states)

    data = f"{rows.ids.size:,} tokens"
    run_steps(recipe, run, made.params, made.loss, batch_of, held_out_loss, data)


def trained(method: str, target: Target, work: pathlib.Path) -> tuple[Speculator, Params, Progress, SpeculatorRecipe]:
    """The speculator of the run in `work`, with its weights rounded to bf16."""
    made = speculator(method, target, RECIPES[method], np.load(work / "rows" / "rows_0.npy"))
    return made, *load_params(work / method, made.params, SpeculatorRecipe)


def continuations(target: Target, work: pathlib.Path, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The target's continuations of held-out text, kept in `work`, and its states on them."""
    path = work / f"measured_{temperature:g}.npy"
    if not path.exists():
        stream = Stream.encode(target.tokenizer, read_corpus(STDLIB).held_out)
        prompts = list(prompts_from(stream, MEASURED_ROWS, MEASURED_PROMPT, np.random.default_rng(7)))
        np.save(path, continue_texts(target.model, prompts, [temperature] * MEASURED_ROWS, MEASURED_LENGTH, seed=7))
    ids = np.load(path)
    compute = jax.jit(functools.partial(target_states, target, attend=blocked_causal_attend))
    parts = [np.stack(compute(jnp.asarray(ids[i : i + 8]))) for i in range(0, len(ids), 8)]
    return ids, np.concatenate(parts, axis=1)


def measurements(method: str, target: Target, work: pathlib.Path) -> dict[str, Acceptance]:
    """Acceptance on greedy text and at temperature 1."""
    made, params, *_ = trained(method, target, work)
    found = {}
    for temperature, names in MEASURED.items():
        ids, states = continuations(target, work, temperature)
        of_drafters = measure(target, made.drafting(params), ids, states, MEASURED_PROMPT, tuple(names))
        found |= dict(zip(names.values(), of_drafters, strict=True))
    return found


def print_measurements(method: str, found: dict[str, Acceptance]) -> None:
    print(f"{method:60}" + "".join(f"{k:7}" for k in range(1, DRAFTS + 1)))
    for name, one in found.items():
        rows = {
            "drafts 1 to k are accepted": one.runs,
            "tokens per step, k drafts": one.lengths,
            "sum(min(p, q)), draft k": one.overlaps,
        }
        for title, values in rows.items():
            print(f"{name:32}{title:28}" + "".join(f"{value:7.3f}" for value in values))


def check_text(target: Target, drafting: Drafting) -> dict[str, Any]:
    """How many drafts agree with the target on a text of the package, so that a test can compute it again."""
    text = (pathlib.Path(target.model) / "held_out.txt").read_text("utf-8")
    ids = jnp.asarray([target.tokenizer.encode(text).ids[:LOGITS_CHUNK]], jnp.int32)
    states = target_states(target, ids, blocked_causal_attend)
    return {"file": "held_out.txt", "tokens": ids.size, "agreement": agreement(target, drafting, ids, states)}


def export(method: str, target: Target, work: pathlib.Path, out: pathlib.Path) -> None:
    """Write the folder `out`, with the measurements of the exported weights."""
    made, params, progress, recipe = trained(method, target, work)
    found = measurements(method, target, work)
    print_measurements(method, found)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": sum(a.size for a in jax.tree.leaves(params)),
        "seconds": round(progress.seconds),
        "cpu_seconds": round(progress.cpu_seconds),
        "acceptance": {name: one.record() for name, one in found.items()},
        "check_text": check_text(target, made.drafting(params)),
        "curve": progress.curve,
    }
    if method == "draft":
        size = write_draft(out, DRAFT_SPEC, params, record)
    elif method == "eagle3":
        size = write_eagle3(out, head_spec(method, target.spec, recipe), params | made.fixed, record)
    else:
        size = write_mtp(out, pathlib.Path(target.model), head_spec(method, target.spec, recipe), params)
    print(f"{out}: {size / 1e6:.2f} MB")


def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    folders = {"draft": root / "jpaged" / "demo_draft", "eagle3": root / "jpaged" / "demo_eagle3"}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "measure", "export"))
    parser.add_argument("method", choices=tuple(RECIPES))
    parser.add_argument("--model", default=str(root / "jpaged" / "demo_model"), help="folder of the target")
    work = root / "build" / "train_speculators"
    parser.add_argument("--work", type=pathlib.Path, default=work, help="folder of runs")
    parser.add_argument("--out", type=pathlib.Path, help="folder to export to (default: the package's; mtp has none)")
    parser.add_argument("--steps", type=int, help="steps of the whole run (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target, method = load_target(args.model), args.method
    match args.command:
        case "train":
            recipe = dataclasses.replace(RECIPES[method], seed=args.seed)
            train(method, dataclasses.replace(recipe, steps=args.steps or recipe.steps), target, args.work)
        case "measure":
            found = measurements(method, target, args.work)
            print_measurements(method, found)
            print(json.dumps({name: one.record() for name, one in found.items()}))
        case "export":
            out = args.out or folders.get(method)
            if out is None:
                parser.error("--out must name a folder for the copy of the demo model with an MTP layer")
            export(method, target, args.work, out)


if __name__ == "__main__":
    sys.exit(main())
