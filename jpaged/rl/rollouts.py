"""`Rollouts`: answers to a batch of prompts, with the arrays that a trainer needs. numpy only."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jpaged.errors import RequestError
from jpaged.outputs import RequestOutput


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedRollouts:
    """Rollouts as rectangles: prompts end at the same column, and answers begin at the next one."""

    prompt_ids: Int[np.ndarray, "answers prompt"]     # int32, padding on the left
    prompt_mask: Bool[np.ndarray, "answers prompt"]   # True for tokens of the prompt
    token_ids: Int[np.ndarray, "answers length"]      # int32, padding on the right
    mask: Bool[np.ndarray, "answers length"]          # True for tokens of the answer
    logprobs: Float[np.ndarray, "answers length"]     # float32, of token_ids; 0 for padding


@dataclasses.dataclass(frozen=True, slots=True)
class Rollouts:
    """All answers to the prompts of one call: `n` to each prompt, side by side, in the order of the prompts."""

    outputs: list[RequestOutput]
    prompt_indices: Int[np.ndarray, " answers"]  # int32: index of the answer's prompt
    prompt_ids: list[Int[np.ndarray, " _"]]      # int32, of each answer's prompt
    token_ids: list[Int[np.ndarray, " _"]]       # int32, of each answer
    logprobs: list[Float[np.ndarray, " _"]]      # float32, of each answer's tokens, as they were sampled
    texts: list[str]                             # empty without a tokenizer
    finish_reasons: list[str | None]
    weight_version: int | str                    # of the weights that computed all of them

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, outputs: list[RequestOutput], weight_version: int | str) -> "Rollouts":
        """Rollouts of the outputs of `LLM.generate`, whose sampling parameters asked for log-probabilities."""
        answers = [(index, answer) for index, output in enumerate(outputs) for answer in output.outputs]
        tokens = [np.asarray(answer.token_ids, np.int32) for _, answer in answers]
        logprobs = [
            np.asarray([entry[token].logprob for token, entry in zip(ids.tolist(), answer.logprobs or (), strict=True)],
                       np.float32)
            for ids, (_, answer) in zip(tokens, answers, strict=True)
        ]  # fmt: skip
        return cls(
            outputs=outputs,
            prompt_indices=np.asarray([index for index, _ in answers], np.int32),
            prompt_ids=[np.asarray(outputs[index].prompt_token_ids, np.int32) for index, _ in answers],
            token_ids=tokens,
            logprobs=logprobs,
            texts=[answer.text for _, answer in answers],
            finish_reasons=[answer.finish_reason for _, answer in answers],
            weight_version=weight_version,
        )

    def padded(
        self, pad_id: int = 0, *, prompt_length: int | None = None, length: int | None = None
    ) -> PaddedRollouts:
        """Return rectangles. prompt_length, length: number of columns; None: the longest. Equal sizes compile once.

        Raises RequestError if a prompt or an answer is longer.
        """
        prompts = _rectangle("prompt_length", self.prompt_ids, prompt_length, pad_id, left=True)
        tokens = _rectangle("length", self.token_ids, length, pad_id)
        logprobs = np.zeros(tokens[0].shape, np.float32)
        for row, values in zip(logprobs, self.logprobs, strict=True):
            row[: len(values)] = values
        return PaddedRollouts(*prompts, *tokens, logprobs)


def _rectangle(
    name: str, rows: Sequence[np.ndarray], length: int | None, pad_id: int, *, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one array, and a mask of the ids that are no padding."""
    longest = max(itertools.chain((len(row) for row in rows), (1,)))
    if length is not None and length < longest:
        raise RequestError(name, length, f"must be at least {longest}, the longest")
    ids = np.full((len(rows), length or longest), pad_id, np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, row in enumerate(rows):
        place = slice(ids.shape[1] - len(row), None) if left else slice(len(row))
        ids[i, place], mask[i, place] = row, True
    return ids, mask
