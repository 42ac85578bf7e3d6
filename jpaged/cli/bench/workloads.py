"""Requests of a benchmark: prompts as token ids, and the number of tokens to generate for each."""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jpaged.cli.flags.engine import one_line_help
from jpaged.errors import RequestError

# vLLM's defaults for datasets, and its limits for ShareGPT conversations, in tokens.
RANDOM_INPUT_LEN, RANDOM_OUTPUT_LEN = 1024, 128
CUSTOM_OUTPUT_LEN = 256
PREFIX_LEN, SUFFIX_LEN, NUM_PREFIXES, REPETITION_OUTPUT_LEN = 256, 256, 10, 128  # of prefix_repetition
SHAREGPT_MIN_LEN, SHAREGPT_MAX_PROMPT_LEN, SHAREGPT_MAX_TOTAL_LEN = 4, 1024, 2048

DATASETS = ("random", "random-total", "sharegpt", "custom", "prefix_repetition", "burstgpt")
FROM_FILES = ("sharegpt", "custom", "burstgpt")

OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


# Each has vLLM's names of the flag as aliases.
InputLen = Annotated[OptionalInt, tyro.conf.arg(aliases=["--random-input-len"])]
OutputLen = Annotated[
    OptionalInt,
    tyro.conf.arg(
        aliases=[
            "--random-output-len", "--sharegpt-output-len", "--custom-output-len", "--prefix-repetition-output-len",
        ]
    ),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    prompt_token_ids: list[int]
    output_len: int  # tokens to generate; end-of-sequence tokens do not end the request
    text: str | None = None  # the prompt as text; None for a prompt of random ids


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """Flags that select a workload."""

    dataset_name: Annotated[
        Literal["random", "random-total", "sharegpt", "custom", "prefix_repetition", "burstgpt"] | None,
        tyro.conf.arg(metavar="{" + ",".join(DATASETS) + "}", help_behavior_hint=""),
    ] = None
    """random: random token ids, with lengths around --input-len and --output-len. random-total: random token ids, with
    a total length from --total-len-min to --total-len-max. prefix_repetition: random token ids after one of a few
    prefixes. burstgpt: random token ids, with the lengths in --dataset-path. sharegpt: conversations in --dataset-path.
    custom: prompts in --dataset-path. Default: sharegpt if --dataset-path is given, else random."""

    dataset_path: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """sharegpt: JSON file of conversations. custom: JSON lines with prompt and, optionally, output_tokens, which
    --output-len overrides. burstgpt: CSV file of the BurstGPT trace."""

    num_prompts: int = 1000
    """Number of requests."""

    input_len: InputLen = None
    """Prompt tokens per request, with random. Default: 1024."""

    output_len: OutputLen = None
    """Tokens to generate per request. Default: 128 with random and prefix_repetition, output_tokens or 256 with custom,
    the length of the recorded answer with sharegpt and burstgpt."""

    random_range_ratio: float = 0.0
    """With random, draw lengths uniformly between (1 - ratio) and (1 + ratio) times --input-len and --output-len."""

    prefix_len: Annotated[int, tyro.conf.arg(aliases=["--random-prefix-len"])] = 0
    """With random, length of a prefix that all prompts share, in addition to --input-len."""

    prefix_repetition_prefix_len: int = PREFIX_LEN
    """With prefix_repetition, length of each prefix."""

    prefix_repetition_suffix_len: int = SUFFIX_LEN
    """With prefix_repetition, tokens of each prompt after its prefix."""

    prefix_repetition_num_prefixes: int = NUM_PREFIXES
    """With prefix_repetition, number of prefixes. Prompts are divided equally among them."""

    total_len_min: int = 256
    """With random-total, minimum number of tokens of a request, prompt and output together."""

    total_len_max: int = 1024
    """With random-total, maximum number of tokens of a request, prompt and output together."""

    output_len_min: int = 16
    """With random-total, minimum number of output tokens."""

    def requests(
        self, *, vocab_size: int, max_model_len: int, seed: int, encode: Callable[[str], list[int]] | None
    ) -> list[BenchRequest]:
        """Make the requests. encode: needed by sharegpt and custom. Raises RequestError for bad flags and files."""
        if self.num_prompts < 1:
            raise RequestError("num_prompts", self.num_prompts, "must be at least 1")
        rng = np.random.default_rng(seed)
        match self.dataset_name or ("sharegpt" if self.dataset_path else "random"):
            case "random":
                requests = self._random(rng, vocab_size)
            case "random-total":
                requests = self._random_total(rng, vocab_size)
            case "prefix_repetition":
                requests = self._prefix_repetition(rng, vocab_size)
            case "custom":
                requests = self._custom(encode)
            case "burstgpt":
                requests = self._burstgpt(rng, vocab_size)
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

    def _prefix_repetition(self, rng: np.random.Generator, vocab_size: int) -> list[BenchRequest]:
        sizes = {
            "prefix_repetition_prefix_len": self.prefix_repetition_prefix_len,
            "prefix_repetition_suffix_len": self.prefix_repetition_suffix_len,
            "prefix_repetition_num_prefixes": self.prefix_repetition_num_prefixes,
        }
        for name, value in sizes.items():
            if value < 1:
                raise RequestError(name, value, "must be at least 1")
        prefix_len, suffix_len, count = sizes.values()
        prefixes = [random_ids(rng, prefix_len, vocab_size) for _ in range(count)]
        output_len = REPETITION_OUTPUT_LEN if self.output_len is None else self.output_len
        order = rng.permutation(np.arange(self.num_prompts) % count)
        return [BenchRequest(prefixes[i] + random_ids(rng, suffix_len, vocab_size), output_len) for i in order]

    def _custom(self, encode: Callable[[str], list[int]] | None) -> list[BenchRequest]:
        path, encode = self._file("custom", "a file of JSON lines, each with a prompt"), _needed(encode, "custom")
        length = CUSTOM_OUTPUT_LEN if self.output_len is None else self.output_len
        requests = []
        for prompt, own in custom_prompts(path)[: self.num_prompts]:
            output_len = length if self.output_len is not None or own is None else own
            requests.append(BenchRequest(encode(prompt), output_len, prompt))
        return self._enough(requests, path)

    def _burstgpt(self, rng: np.random.Generator, vocab_size: int) -> list[BenchRequest]:
        path = self._file("burstgpt", "the CSV file of the trace")
        pairs = burstgpt_lengths(path)
        requests = []
        for index in rng.permutation(len(pairs))[: self.num_prompts]:
            prompt, output = pairs[index]
            output = output if self.output_len is None else self.output_len
            requests.append(BenchRequest(random_ids(rng, prompt, vocab_size), output))
        return self._enough(requests, path)

    def _file(self, dataset: str, what: str) -> pathlib.Path:
        if self.dataset_path is None:
            raise RequestError("dataset_path", None, f"{dataset} needs {what}")
        return self.dataset_path

    def _enough(self, requests: list[BenchRequest], path: pathlib.Path) -> list[BenchRequest]:
        if len(requests) < self.num_prompts:
            raise RequestError("num_prompts", self.num_prompts, f"{path} has only {len(requests)} prompts")
        return requests

    def _sharegpt(
        self, rng: np.random.Generator, max_model_len: int, encode: Callable[[str], list[int]] | None
    ) -> list[BenchRequest]:
        path = self._file("sharegpt", "a JSON file of conversations")
        encode = _needed(encode, "sharegpt")
        turns = _first_turns(path)
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
                requests.append(BenchRequest(prompt, output_len, question))
                if len(requests) == self.num_prompts:
                    return requests
        raise RequestError("num_prompts", self.num_prompts, f"{path} has only {len(requests)} conversations that fit")


def random_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Draw `count` token ids uniformly from the vocabulary."""
    return rng.integers(0, vocab_size, size=count).tolist()


def _needed(encode: Callable[[str], list[int]] | None, dataset: str) -> Callable[[str], list[int]]:
    if encode is None:
        raise RequestError("dataset_name", dataset, "needs a tokenizer: name a model with one, or use random")
    return encode


def custom_prompts(path: pathlib.Path) -> list[tuple[str, int | None]]:
    """Read JSON lines: (prompt, output_tokens or None). Raises RequestError with the number of a bad line."""
    prompts: list[tuple[str, int | None]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("dataset_path", str(path), f"cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry: Any = json.loads(line) if line.strip() else None
            if entry is not None:
                own = entry.get("output_tokens")
                prompts.append((str(entry["prompt"]), None if own is None else int(own)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            accepted = f"line {number} is not a JSON object with a prompt ({error})"
            raise RequestError("dataset_path", str(path), accepted) from None
    return prompts


def burstgpt_lengths(path: pathlib.Path) -> list[tuple[int, int]]:
    """Read (prompt tokens, output tokens) of a trace's answered GPT-4 requests, as vLLM does. Raises RequestError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = [(row["Model"], int(row["Request tokens"]), int(row["Response tokens"]))
                    for row in csv.DictReader(lines)]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError("dataset_path", str(path), f"is not a CSV file of the BurstGPT trace: {error!r}") from None
    return [(prompt, output) for model, prompt, output in rows if model == "GPT-4" and prompt > 0 and output > 0]


def _first_turns(path: pathlib.Path) -> Sequence[tuple[str, str]]:
    """Return the first two messages of each conversation. Raises RequestError."""
    try:
        conversations: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        return [
            (entry["conversations"][0]["value"], entry["conversations"][1]["value"])
            for entry in conversations
            if len(entry.get("conversations", ())) >= 2
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError("dataset_path", str(path), f"is not a file of ShareGPT conversations: {error}") from None
