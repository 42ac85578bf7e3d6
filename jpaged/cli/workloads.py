"""The requests of a benchmark: prompts as token ids, each with the number of tokens to generate."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jpaged.cli.flags import one_line_help
from jpaged.errors import RequestError

# vLLM's sizes of the random dataset, and its limits on conversations, in tokens.
RANDOM_INPUT_LEN, RANDOM_OUTPUT_LEN = 1024, 128
SHAREGPT_MIN_LEN, SHAREGPT_MAX_PROMPT_LEN, SHAREGPT_MAX_TOTAL_LEN = 4, 1024, 2048

OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    prompt_token_ids: list[int]
    output_len: int  # tokens to generate, past any end-of-sequence token


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """The flags that choose a workload."""

    dataset_name: Annotated[
        Literal["random", "random-total", "sharegpt"] | None,
        tyro.conf.arg(metavar="{random,random-total,sharegpt}", help_behavior_hint=""),
    ] = None
    """random: random token ids, with lengths around --input-len and --output-len. random-total: random token ids, with
    a total length between --total-len-min and --total-len-max. sharegpt: conversations from the file --dataset-path.
    Default: sharegpt if --dataset-path is given, else random."""

    dataset_path: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """JSON file of conversations in ShareGPT's format."""

    num_prompts: int = 1000
    """Number of requests."""

    input_len: OptionalInt = None
    """Prompt tokens per request, with random. Default: 1024."""

    output_len: OptionalInt = None
    """Tokens to generate per request. Default: 128 with random; with sharegpt, the length of the recorded answer."""

    random_range_ratio: float = 0.0
    """With random, draw lengths uniformly between (1 - ratio) and (1 + ratio) times --input-len and --output-len."""

    prefix_len: int = 0
    """With random, length of a prefix shared by all prompts. It comes before the --input-len tokens of each prompt."""

    total_len_min: int = 256
    """With random-total, minimum number of tokens of a request, prompt and output together."""

    total_len_max: int = 1024
    """With random-total, maximum number of tokens of a request, prompt and output together."""

    output_len_min: int = 16
    """With random-total, minimum number of output tokens."""

    def requests(
        self, *, vocab_size: int, max_model_len: int, seed: int, encode: Callable[[str], list[int]] | None
    ) -> list[BenchRequest]:
        """Make the requests. encode: the model's tokenizer, which only sharegpt needs.

        Raises RequestError for flags that contradict each other or exceed the model's limits.
        """
        if self.num_prompts < 1:
            raise RequestError("num_prompts", self.num_prompts, "must be at least 1")
        rng = np.random.default_rng(seed)
        match self.dataset_name or ("sharegpt" if self.dataset_path else "random"):
            case "random":
                requests = self._random(rng, vocab_size)
            case "random-total":
                requests = self._random_total(rng, vocab_size)
            case _:
                return self._sharegpt(rng, max_model_len, encode)
        longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
        if longest > max_model_len:
            raise RequestError(
                "input_len",
                longest,
                f"prompt and output together are more than the model's {max_model_len} tokens: use a smaller "
                "--input-len, --output-len or --total-len-max",
            )
        return requests

    def _random(self, rng: np.random.Generator, vocab_size: int) -> list[BenchRequest]:
        if not 0 <= self.random_range_ratio < 1:
            raise RequestError("random_range_ratio", self.random_range_ratio, "must be in [0, 1)")
        if self.prefix_len < 0:
            raise RequestError("prefix_len", self.prefix_len, "must be at least 0")
        inputs = self._lengths(rng, "input_len", RANDOM_INPUT_LEN if self.input_len is None else self.input_len)
        outputs = self._lengths(rng, "output_len", RANDOM_OUTPUT_LEN if self.output_len is None else self.output_len)
        prefix = random_ids(rng, self.prefix_len, vocab_size)
        return [
            BenchRequest(prefix + random_ids(rng, prompt_len, vocab_size), output_len)
            for prompt_len, output_len in zip(inputs, outputs, strict=True)
        ]

    def _lengths(self, rng: np.random.Generator, name: str, length: int) -> list[int]:
        if length < 1:
            raise RequestError(name, length, "must be at least 1")
        low = max(1, int(np.floor(length * (1 - self.random_range_ratio))))
        high = int(np.ceil(length * (1 + self.random_range_ratio)))
        return rng.integers(low, high, endpoint=True, size=self.num_prompts).tolist()

    def _random_total(self, rng: np.random.Generator, vocab_size: int) -> list[BenchRequest]:
        if not 1 <= self.output_len_min < self.total_len_min <= self.total_len_max:
            raise RequestError(
                "total_len_min",
                self.total_len_min,
                f"must be more than --output-len-min {self.output_len_min} and at most "
                f"--total-len-max {self.total_len_max}",
            )
        requests = []
        for total in rng.integers(self.total_len_min, self.total_len_max, endpoint=True, size=self.num_prompts):
            output_len = int(rng.integers(self.output_len_min, total))  # leaves at least one token of prompt
            requests.append(BenchRequest(random_ids(rng, int(total) - output_len, vocab_size), output_len))
        return requests

    def _sharegpt(
        self, rng: np.random.Generator, max_model_len: int, encode: Callable[[str], list[int]] | None
    ) -> list[BenchRequest]:
        if self.dataset_path is None:
            raise RequestError("dataset_path", None, "sharegpt needs a JSON file of conversations")
        if encode is None:
            raise RequestError("dataset_name", "sharegpt", "needs a model with a tokenizer: use random")
        turns = _first_turns(self.dataset_path)
        requests: list[BenchRequest] = []
        for index in rng.permutation(len(turns)):
            question, answer = turns[index]
            prompt = encode(question)
            output_len = len(encode(answer)) if self.output_len is None else self.output_len
            if (
                min(len(prompt), output_len) >= SHAREGPT_MIN_LEN
                and len(prompt) <= SHAREGPT_MAX_PROMPT_LEN
                and len(prompt) + output_len <= min(SHAREGPT_MAX_TOTAL_LEN, max_model_len)
            ):
                requests.append(BenchRequest(prompt, output_len))
                if len(requests) == self.num_prompts:
                    return requests
        raise RequestError(
            "num_prompts", self.num_prompts, f"{self.dataset_path} has only {len(requests)} conversations that fit"
        )


def random_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Draw token ids uniformly from the vocabulary."""
    return rng.integers(0, vocab_size, size=count).tolist()


def _first_turns(path: pathlib.Path) -> Sequence[tuple[str, str]]:
    """Return the first question and answer of each conversation."""
    try:
        conversations: Any = json.loads(path.read_text(encoding="utf-8"))
        return [
            (entry["conversations"][0]["value"], entry["conversations"][1]["value"])
            for entry in conversations
            if len(entry.get("conversations", ())) >= 2
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError("dataset_path", str(path), f"is not a file of ShareGPT conversations: {error}") from None
