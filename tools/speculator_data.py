"""Text and hidden states that speculators of the demo model are trained on, and the text that they are measured on.

1. `continue_texts` continues prompts with the model, in jpaged.
2. `training_rows` makes rows of ROW_LENGTH tokens: windows of the training text, and the model's own continuations of
   its openings, at several temperatures.
3. `cache_states` computes the model's hidden states of all rows once, and keeps them in files. A training step then
   reads them: it costs no forward pass of the model.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from demo_corpus import Stream
from jaxtyping import Array, Int
from tokenizers import Tokenizer
from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec

ROW_LENGTH = 1024
ROWS = 1600                          # of these:
GENERATED_ROWS = 600                 # rows that the model wrote
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)  # of the continuations, each for a quarter of them
ROWS_AT_ONCE = 64                    # rows that are continued at once
PROMPT_LENGTHS = (32, 512)           # tokens, drawn evenly
AUX_LAYERS = (1, 3, 5)               # of the 6 layers: EAGLE-3 reads the inputs of these


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that is drafted for, in float32."""

    model: str              # a folder
    spec: DecoderSpec
    params: dict[str, Any]
    tokenizer: Any


def load_target(model: str) -> Target:
    """Load a model folder."""
    loaded = load_model(EngineConfig(model=model, dtype="float32"))
    tokenizer = Tokenizer.from_file(str(pathlib.Path(model) / "tokenizer.json"))
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), loaded.params)
    return Target(model, loaded.spec, params, tokenizer)


def continue_texts(
    model: str, prompts: Sequence[np.ndarray], temperatures: Sequence[float], length: int, seed: int
) -> np.ndarray:
    """Continue each prompt with jpaged up to `length` tokens. Returns int32[prompts, length].

    temperatures: one per prompt; 0 = greedy.
    """
    from jpaged import LLM, SamplingParams  # imported late: starts the engine's modules

    llm = LLM(model=model, max_num_seqs=ROWS_AT_ONCE, dtype="float32")
    params = [
        SamplingParams(temperature=each, max_tokens=length - len(prompt), ignore_eos=True, seed=seed + i)
        for i, (prompt, each) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in prompts], params, use_tqdm=True)
    texts = [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(prompts, outputs, strict=True)]
    return np.array(texts, np.int32)


def prompts_from(stream: Stream, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return windows that begin at openings, int32[rows, length]."""
    openings = stream.openings[stream.openings + length < len(stream.ids)]
    return stream.ids[rng.choice(openings, rows)[:, None] + np.arange(length)]


def training_rows(target: Target, stream: Stream, seed: int) -> np.ndarray:
    """Return int32[ROWS, ROW_LENGTH] in random order: windows of the text, and continuations by the model."""
    rng = np.random.default_rng(seed)
    windows = stream.spread(np.arange(ROWS - GENERATED_ROWS), ROW_LENGTH - 1, rng.random())
    starts = rng.integers(*PROMPT_LENGTHS, GENERATED_ROWS, endpoint=True)
    prompts = prompts_from(stream, GENERATED_ROWS, PROMPT_LENGTHS[1], rng)
    prompts = [prompt[:start] for prompt, start in zip(prompts, starts, strict=True)]
    temperatures = np.resize(TEMPERATURES, GENERATED_ROWS).tolist()
    generated = continue_texts(target.model, prompts, temperatures, ROW_LENGTH, seed)
    return rng.permutation(np.concatenate([windows, generated]))


def target_states(target: Target, ids: Int[Array, "batch length"], attend: decoder.Attend) -> tuple[Array, ...]:
    """Return the states of AUX_LAYERS, then the last layer's output, each [batch, length, hidden]."""
    batch, length = ids.shape
    last, _, _, *captured = decoder.decode(
        target.spec, target.params, ids.reshape(-1), jnp.tile(jnp.arange(length), batch),
        [None] * target.spec.num_layers, ids, attend, capture=AUX_LAYERS,
    )  # fmt: skip
    return tuple(state.reshape(batch, length, -1) for state in (*captured, last))


def cache_states(target: Target, stream: Stream, work: pathlib.Path, seed: int, attend: decoder.Attend) -> "Rows":
    """Make the rows and their states in `work`, or read those of an earlier call with the same seed."""
    work.mkdir(parents=True, exist_ok=True)
    ids_path, states_path = work / f"rows_{seed}.npy", work / f"states_{seed}.npy"
    if not ids_path.exists():
        np.save(work / "partial.npy", training_rows(target, stream, seed))
        (work / "partial.npy").rename(ids_path)
    ids = np.load(ids_path)
    shape = (len(AUX_LAYERS) + 1, *ids.shape, target.spec.hidden_size)
    if not states_path.exists():
        states = np.lib.format.open_memmap(work / "partial.npy", "w+", np.uint16, shape)
        compute = jax.jit(functools.partial(target_states, target, attend=attend))
        for first in tqdm(range(0, len(ids), 8), desc="hidden states", unit="rows", unit_scale=8):
            for i, state in enumerate(compute(jnp.asarray(ids[first : first + 8]))):
                states[i, first : first + 8] = np.asarray(state).astype(ml_dtypes.bfloat16).view(np.uint16)
        states.flush()
        (work / "partial.npy").rename(states_path)
    return Rows(ids, np.load(states_path, mmap_mode="r"))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of tokens and the target's hidden states."""

    ids: np.ndarray     # int32[rows, ROW_LENGTH]
    states: np.ndarray  # bfloat16 as uint16 [states, rows, ROW_LENGTH, hidden]: of AUX_LAYERS, then the last layer's

    def batch(self, step: int, size: int, which: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and states (those of `which`) of a step's rows. Each pass over the rows has another order."""
        per_epoch = len(self.ids) // size
        order = np.random.default_rng(step // per_epoch).permutation(len(self.ids))
        chosen = np.sort(order[step % per_epoch * size :][:size])
        return self.ids[chosen], self.states[which, chosen].view(ml_dtypes.bfloat16)
