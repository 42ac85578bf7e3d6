"""`TunixRollout`: generation for tunix (google/tunix, tunix/rl/rollout/base_rollout.py) in the trainer's process.

    import functools
    from tunix.rl import rl_cluster
    from jpaged.rl.tunix import TunixRollout

    rl_cluster.ClusterConfig(rollout_engine=functools.partial(TunixRollout, config="Qwen/Qwen3-0.6B"), ...)

Called by: tunix's RLCluster.
Owns: a `Rollout`, which serves the arrays of the rollout model.
Never: needs tunix to be imported. If tunix is installed, the class counts as a subclass of its BaseRollout.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.rl.rollout import Rollout


@dataclasses.dataclass
class RolloutOutput:
    """Result of `TunixRollout.generate`, with the fields of tunix's class. tunix's own is used if it is installed."""

    text: list[str]
    logits: list[Any] | None
    tokens: list[np.ndarray]                # int32, without padding
    left_padded_prompt_tokens: np.ndarray   # int32[prompts, max_prompt_length]
    logprobs: list[np.ndarray] | None       # float32, of tokens


_Output: Any = RolloutOutput


class TunixRollout:
    """A rollout worker of tunix. It serves the arrays of the rollout model, also after a trainer has changed them.

    rollout_actor: the nnx module whose weights are served. Where trainer and rollout share it, nothing is copied.
    tokenizer:     tunix's tokenizer: encode, decode, pad_id(), eos_id(), and bos_id() if it has a begin token.
    mesh:          the rollout's mesh. Only with several devices it reaches the engine.
    rollout_config: tunix's RolloutConfig.
    config:        Hugging Face config, its dictionary, or a folder or hub id of the model.
    engine_options: as for `LLM`. Defaults: max_model_len from the rollout_config; no tokenizer.
    """

    def __init__(
        self, rollout_actor: Any, tokenizer: Any, mesh: Any = None, rollout_config: Any = None, *, config: Any,
        **engine_options: Any,
    ):  # fmt: skip
        self._model, self._tokenizer, self.mesh = rollout_actor, tokenizer, mesh
        if rollout_config is not None:
            length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate + 1
            engine_options = {"max_model_len": length} | engine_options
        engine_options = {"skip_tokenizer_init": True} | engine_options
        several = mesh is not None and mesh.size > 1
        self._rollout = Rollout(config, mesh=mesh if several else None, **engine_options)

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Answer prompts, as tunix's RolloutConfig says. Returns tunix's RolloutOutput, without logits.

        Prompts longer than max_prompt_length lose their beginning, as in tunix.
        """
        longest, pad_id = rollout_config.max_prompt_length, self.pad_id()
        ids = [self._tokens(prompt)[-longest:] for prompt in prompts]
        rollouts = self._rollout.generate(self._weights(), ids, self._sampling_params(rollout_config, len(ids)))
        padded = rollouts.padded(pad_id, prompt_length=longest)
        return _Output(
            text=[self._tokenizer.decode(tokens.tolist()) for tokens in rollouts.token_ids],
            logits=None,
            tokens=rollouts.token_ids,
            left_padded_prompt_tokens=padded.prompt_ids,
            logprobs=rollouts.logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "batch prompt"], completion_tokens: Int[Array, "batch length"]
    ) -> Float[Array, "batch length"]:
        """Log-probability of each completion's tokens, with the model's weights. 0 for padding.

        prompt_tokens have padding on the left, completion_tokens on the right.
        """
        prompts = [_without(row, self.pad_id(), left=True) for row in np.asarray(prompt_tokens)]
        answers = [_without(row, self.pad_id(), left=False) for row in np.asarray(completion_tokens)]
        scores = self._rollout.score(self._weights(), prompts, answers)
        out = np.zeros(completion_tokens.shape, np.float32)
        for row, score in zip(out, scores, strict=True):
            row[: len(score)] = score
        return jnp.asarray(out)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the rollout model new parameters; the next call serves them. Raises RequestError for LoRA parameters."""
        if filter_types is not None and any(issubclass(kind, nnx.LoRAParam) for kind in filter_types):
            raise RequestError("filter_types", filter_types, "LoRA parameters must be merged into the weights first")
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """Id of the padding token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Id of the end token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> Any:
        """The nnx module whose weights are served."""
        return self._model

    def close(self) -> None:
        """Free the engine."""
        self._rollout.close()

    def _weights(self) -> Any:
        return nnx.state(self._model, nnx.Param)

    def _tokens(self, prompt: str) -> list[int]:
        """Ids of a prompt, after one begin token if the tokenizer has one. tunix's samplers do the same."""
        ids = [int(token) for token in self._tokenizer.encode(prompt)]
        begin = self._tokenizer.bos_id() if hasattr(self._tokenizer, "bos_id") else None
        return [int(begin), *ids] if begin and ids[:1] != [begin] else ids

    def _sampling_params(self, config: Any, count: int) -> list[SamplingParams]:
        """One a prompt. Their seeds differ, because trainers repeat a prompt to get several answers to it."""
        ends = [self.eos_id()] if config.eos_tokens is None else list(config.eos_tokens)
        seed = None
        if config.seed is not None:
            words = config.seed if jnp.issubdtype(config.seed.dtype, jnp.integer) else jax.random.key_data(config.seed)
            seed = int(np.asarray(words).ravel()[-1])
        params = SamplingParams(
            temperature=config.temperature, top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k, max_tokens=config.max_tokens_to_generate,
            stop_token_ids=ends, detokenize=False,
        )  # fmt: skip
        if seed is None:
            return [params] * count
        return [dataclasses.replace(params, seed=seed + index) for index in range(count)]


def _without(row: np.ndarray, pad_id: int, *, left: bool) -> Sequence[int]:
    """A row without the padding at its beginning or end."""
    real = np.flatnonzero(row != pad_id)
    if not len(real):
        return []
    return row[real[0] :].tolist() if left else row[: real[-1] + 1].tolist()


with contextlib.suppress(ImportError):
    from tunix.rl.rollout import base_rollout  # ty: ignore[import-not-found]

    base_rollout.BaseRollout.register(TunixRollout)
    _Output = base_rollout.RolloutOutput
