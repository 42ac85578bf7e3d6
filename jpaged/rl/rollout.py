"""`Rollout`: one engine for all calls of a training loop. Each call serves the weights that it is given.

Called by: a trainer, between its steps.
Owns: an `LLM`, from the first call to `close`.
Never: copies weights that fit, or keeps a global engine.
"""

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import jax
import numpy as np
from jaxtyping import Float, Int

from jpaged.engine.input.input_processor import Prompt
from jpaged.engine_arguments import EngineArguments
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.progress import UseTqdm
from jpaged.frontend.prompts import one_each, prompt_list
from jpaged.llm import LLM
from jpaged.outputs import ScoreOutput, WeightUpdate
from jpaged.params.sampling import SamplingParams
from jpaged.rl.rollouts import Rollouts

TokenIds: TypeAlias = Sequence[int] | Int[np.ndarray, " _"]


class Rollout:
    """Generates and scores with a trainer's weights. Use it in a `with` block, or call `close`.

    config: Hugging Face config, its dictionary, a folder or hub id, or a DecoderSpec. With nnodes: a folder or hub id,
        as for the other processes.
    mesh:   `jax.sharding.Mesh` with the engine's devices. None: those of the weights.
    layout: as for `LLM`.
    engine_options: as for `LLM`: tokenizer, max_model_len, max_num_seqs, tensor_parallel_size, ...

    The first call builds the engine and compiles its programs. Later calls only replace the weights: by reference where
    arrays have the engine's shapes and placement. A call with the same arrays as the one before replaces nothing, and
    its prompts find the KV of earlier calls.
    """

    def __init__(
        self, config: Any, *, mesh: Any = None, layout: Any = None, **engine_options: Unpack[EngineArguments]
    ):
        self._config, self._layout = config, layout
        self._options: dict[str, Any] = dict(engine_options) | ({} if mesh is None else {"mesh": mesh})
        self._llm: LLM | None = None
        self._served: list[Any] = []  # arrays of the last update. A trainer may change the tree that had them
        self._closed = False

    @property
    def llm(self) -> LLM:
        """The engine. Raises EngineError before the first call, and after `close`."""
        if self._llm is None:
            why = "is closed" if self._closed else "has no engine before its first call"
            raise EngineError(f"the rollout {why}")
        return self._llm

    @property
    def weight_version(self) -> int | str:
        """Version of the weights that are served."""
        return self.llm.weight_version

    def update(self, params: Any, *, version: int | str | None = None) -> WeightUpdate | None:
        """Serve these weights from now on. None: they were served already.

        params:  as for `LLM(config, params=params)`. They may not be donated while they are served: requests then raise
            EngineError until the next update.
        version: label of the weights, in `Rollouts.weight_version`. None: the number of updates so far.
        """
        if self._closed:
            raise EngineError("the rollout is closed")
        update, leaves = None, jax.tree.leaves(params)
        if self._llm is None and self._options.get("nnodes", 1) > 1:  # the other processes load the folder, too
            self._llm = LLM(self._config, **self._options)
        if self._llm is None:
            self._llm = LLM(self._config, params=params, layout=self._layout, **self._options)
            if version is not None:
                update = self._llm.update_weights(params, version=version, layout=self._layout)
        elif version is not None or not _same(leaves, self._served):
            update = self._llm.update_weights(params, version=version, layout=self._layout)
        self._served = leaves
        return update

    def generate(
        self,
        params: Any,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        version: int | str | None = None,
        use_tqdm: UseTqdm = False,
    ) -> Rollouts:
        """Answer prompts with these weights. Each answer has the log-probability of each of its tokens.

        params, version: as for `update`. prompts, sampling_params: as for `LLM.generate`; `n` answers to each prompt.
        Raises RequestError for a bad prompt, ModelLoadError for weights that do not fit.
        """
        self.update(params, version=version)
        given = self.llm.default_sampling_params if sampling_params is None else sampling_params
        each = one_each("sampling_params", given, len(prompt_list(prompts)))
        with_logprobs = [one if one.logprobs is not None else dataclasses.replace(one, logprobs=0) for one in each]
        outputs = self.llm.generate(prompts, with_logprobs, use_tqdm=use_tqdm)
        return Rollouts.of(outputs, self.weight_version)

    def score(
        self,
        params: Any,
        prompts: Sequence[TokenIds],
        answers: Sequence[TokenIds],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        version: int | str | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[Float[np.ndarray, " _"]]:
        """Log-probability of each answer's tokens after its prompt, with these weights. float32, one array an answer.

        prompts, answers: token ids, one prompt for each answer.
        sampling_params:  as for `LLM.score`, one for all answers or a list with one each: with processed
            log-probabilities, those that the answers were sampled with. None: the model's own distribution.

        In float32 on CPU the results equal those of `generate` with the same weights bit for bit.
        """
        for name, texts in (("prompts", prompts), ("answers", answers)):
            if isinstance(texts, str) or any(isinstance(one, (str, int, np.integer)) for one in texts):
                raise RequestError(name, texts, "must be lists of token ids, one list for each answer")
        if len(prompts) != len(answers):
            raise RequestError("answers", len(answers), f"must be as many as prompts: {len(prompts)}")
        each = one_each("sampling_params", sampling_params, len(answers))
        self.update(params, version=version)
        asked = [(list(map(int, p)), list(map(int, a)), s) for p, a, s in zip(prompts, answers, each, strict=True)]
        full = [one for one in asked if one[1]]  # an empty answer has no token to score
        scored: list[ScoreOutput] = []
        if full:
            scored = self.llm.score(
                [prompt + answer for prompt, answer, _ in full], [given for *_, given in full],
                num_prompt_tokens=[len(prompt) for prompt, *_ in full], use_tqdm=use_tqdm,
            )  # fmt: skip
        scores = iter(scored)
        return [next(scores).logprobs if answer else np.zeros(0, np.float32) for _, answer, _ in asked]

    def close(self) -> None:
        """Free the engine and its references to the weights. No effect if it is closed."""
        self._closed = True
        if self._llm is not None:
            self._llm.close()
        self._llm, self._served = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _same(a: list[Any], b: list[Any]) -> bool:
    """True if two lists have the same arrays: an update from one to the other would change nothing."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
