"""Values that tunix gives to a rollout worker, and options of a small engine."""

import dataclasses
from typing import Any

SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "row_buckets": (8,), "token_buckets": (32,),
}  # fmt: skip


class Tokenizer:
    """Of tunix's kind: a token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 300 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + id_ % 26) for id_ in ids)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids


@dataclasses.dataclass
class RolloutConfig:
    """Fields of tunix's class that a rollout reads."""

    max_tokens_to_generate: int = 8
    max_prompt_length: int = 6
    temperature: float = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    eos_tokens: list[int] | None = None
    return_logprobs: bool = True
