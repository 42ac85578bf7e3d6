"""An engine without a model, with the interface that the server uses. Each answer repeats its prompt.

An answer grows by one token per step. Answer i begins at token i of the prompt. Answers with an odd index stop after
half of their tokens, so that the answers of a request end in different steps.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.lora.request import LoRARequest
from jpaged.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EngineStats,
    Logprob,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    WeightUpdate,
)
from jpaged.params.pooling import PooledModel, PoolingParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.requester import current_client
from jpaged.snapshot import BlockOwner, BlockSnapshot, EngineSnapshot, PoolSnapshot

VOCAB = 256


class ByteTokenizer:
    """A token is a byte of UTF-8. The arguments of the chat template are kept for tests to read."""

    chat_template: str | None = "{...}"
    seen_messages: list[dict[str, Any]]
    seen_options: dict[str, Any]

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())

    def __len__(self) -> int:
        return VOCAB

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(VOCAB)}

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        if messages[0]["content"] == "refuse me":
            raise ValueError("roles must alternate")
        self.seen_messages, self.seen_options = messages, options
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + "<assistant>" + self.opening

    opening = ""  # beginning of the answer that the template writes


@dataclasses.dataclass
class FakeEngine:
    """Counts its steps, so that tests can check how many run after a client disconnects."""

    step_seconds: float = 0.001
    dead: bool = False
    full: bool = False  # `generate` refuses all requests
    is_ready: bool = True
    num_engines: int = 1
    max_num_seqs: int = 8
    fails_at: int | None = None  # step at which `generate` raises EngineError
    max_model_len: int = 4096
    default_sampling_params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    tokenizer: ByteTokenizer = dataclasses.field(default_factory=ByteTokenizer)
    running: set[str] = dataclasses.field(default_factory=set)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    seen_params: list[SamplingParams] = dataclasses.field(default_factory=list)
    seen_prompts: list[list[int]] = dataclasses.field(default_factory=list)
    seen_salts: list[str | None] = dataclasses.field(default_factory=list)
    seen_predictions: list[str | None] = dataclasses.field(default_factory=list)
    seen_priorities: list[int] = dataclasses.field(default_factory=list)
    seen_adapters: list[LoRARequest | None] = dataclasses.field(default_factory=list)
    seen_clients: list[str] = dataclasses.field(default_factory=list)
    seen_pooling: list[PoolingParams] = dataclasses.field(default_factory=list)
    pooling: PooledModel | None = None
    aborts: bool = False  # `encode` returns aborted requests
    fails: str | None = None  # error of the requests that `encode` returns
    says: str | None = None  # text of every answer, instead of the prompt
    special_offsets: tuple[int, ...] = ()  # of `says`
    closed: bool = False
    paused: bool = False
    asleep: bool = False
    weight_version: int | str = 0
    weights_problem: str | None = None
    refuses: Exception | None = None  # error of `update_weights`
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  # of the admin routes

    async def generate(
        self,
        prompt: str | dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = self.token_ids(prompt, priority)
        self.seen_clients.append(current_client.get())
        self.seen_adapters.append(lora_request)
        if not ids:
            raise RequestError("prompt", prompt, "must not be empty")
        for token_id in ids:
            if not 0 <= token_id < VOCAB:
                raise RequestError("prompt_token_ids", token_id, f"ids run from 0 to {VOCAB - 1}")
        if self.full or ids == self.tokenizer.encode("full"):
            raise CapacityError("too many requests wait", retry_after=7)
        if refuse_cut and len(ids) + (sampling_params.max_tokens or 0) > self.max_model_len:
            raise RequestError("max_tokens", sampling_params.max_tokens, "is more than fits")
        if on_admitted is not None:
            on_admitted()
        self.seen_params.append(sampling_params)
        self.seen_prompts.append(ids)
        self.running.add(request_id)
        count = min(sampling_params.max_tokens or 10**9, self.max_model_len - len(ids))
        if self.says is not None:
            count = min(count, len(self.tokenizer.encode(self.says)))
        try:
            for step in range(1, count + 1):
                await asyncio.sleep(self.step_seconds)
                self.steps[request_id] = step
                if self.fails_at is not None and step > self.fails_at:
                    raise EngineError("secret detail of a device")
                whole = sampling_params.chooses or sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
                if step == count or not whole:
                    yield self._output(request_id, ids, step, count, sampling_params)
        finally:
            self.running.discard(request_id)

    def token_ids(self, prompt: str | dict[str, Any], priority: int) -> list[int]:
        """Return the tokens of a prompt. The other fields of the request are kept for tests to read."""
        parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
        assert set(parts) <= {"prompt", "prompt_token_ids", "cache_salt", "prediction"}
        self.seen_predictions.append(parts.get("prediction"))
        self.seen_salts.append(parts.get("cache_salt"))
        self.seen_priorities.append(priority)
        return parts["prompt_token_ids"] if "prompt_token_ids" in parts else self.tokenizer.encode(parts["prompt"])

    def stats(self) -> EngineStats:
        """Count the steps of all requests as generated tokens."""
        if self.closed:
            raise EngineError("closed")
        return EngineStats(
            num_blocks=100, block_size=16, used_blocks=len(self.running), peak_used_blocks=0,
            num_running=len(self.running), num_waiting=0, steps=0, prompt_tokens=sum(map(len, self.seen_prompts)),
            prefix_hit_tokens=0, generated_tokens=sum(self.steps.values()), finished_requests=0, preemptions=0,
            recomputed_tokens=0, kv_waste=0.0, compiles_after_ready=0,
        )  # fmt: skip

    def metrics(self, engine: int = 0) -> None:
        """No figures are collected."""
        if self.closed:
            raise EngineError("closed")

    async def encode(
        self, prompt: str | dict[str, Any], pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput[EmbeddingOutput | ClassificationOutput | None], None]:
        """The embedding of a prompt is its token ids plus one third."""
        ids = self.token_ids(prompt, priority)
        if not ids:
            raise RequestError("prompt", prompt, "must not be empty")
        if ids == self.tokenizer.encode("full"):
            raise CapacityError("too many requests wait", retry_after=7)
        self.seen_pooling.append(pooling_params)
        self.running.add(request_id)
        try:
            await asyncio.sleep(self.step_seconds / len(ids))  # the longest prompt finishes first
            values = np.float32(ids) + np.float32(1 / 3)
            output: EmbeddingOutput | ClassificationOutput | None = None
            if pooling_params.task == "classify":
                output = ClassificationOutput([1 / 4, 3 / 4][-len(self.pooling.labels if self.pooling else "ab") :])
            elif not self.aborts and self.fails is None:
                output = EmbeddingOutput(values[: pooling_params.dimensions].tolist())
            yield PoolingRequestOutput(request_id, None, ids, output, True, RequestMetrics(0.0), error=self.fails)
        finally:
            self.running.discard(request_id)

    def _logprobs(self, token_id: int, top: int, ids: tuple[int, ...] | None = None) -> dict[int, Logprob]:
        """The chosen token is the second most likely one. ids: those to return in place of the most likely ones."""
        if ids:
            return {token_id: Logprob(-0.5, 2, chr(token_id))} | {each: Logprob(-3.0, None, chr(each)) for each in ids}
        others = [other for other in range(97, 97 + top + 1) if other != token_id][:top]
        entries = {token_id: Logprob(-0.5, 2, chr(token_id) if token_id < 128 else "\ufffd")}
        for place, other in enumerate(others):
            rank = 1 if place == 0 else place + 2
            entries[other] = Logprob(-0.4 if rank == 1 else float("-inf"), rank, chr(other))
        return entries

    def _output(self, request_id: str, ids: list[int], step: int, count: int, params: SamplingParams) -> RequestOutput:
        """Return all answers after a step. With best_of > n, the last n generated answers are the best."""
        made = range(params.num_sequences)
        outputs = [
            self.answer(index, start, ids, step, count, params)
            for index, start in enumerate(reversed(made[-params.n :]) if params.chooses else made)
        ]
        if params.output_kind is RequestOutputKind.DELTA and step > 1:
            before = [self.answer(index, index, ids, step - 1, count, params) for index in made]
            outputs = [_new_part(*pair) for pair in zip(before, outputs, strict=True) if not pair[0].finished()]
        metrics = RequestMetrics(0.0, num_draft_tokens=3 * step, num_accepted_tokens=step)
        made = RequestOutput(request_id, None, ids, outputs, step == count, metrics, num_cached_tokens=2)
        if params.prompt_logprobs is not None:
            made.prompt_logprobs = [None, *(self._logprobs(token, params.prompt_logprobs) for token in ids[1:])]
        return made

    def answer(
        self, index: int, start: int, ids: list[int], step: int, count: int, params: SamplingParams
    ) -> CompletionOutput:
        said = self.tokenizer.encode(self.says or "")
        if said:
            ids, start = said, 0
        end = count // 2 or 1 if start % 2 else count
        tokens = [ids[(start + place) % len(ids)] for place in range(min(step, end))]
        logprobs = [self._logprobs(token, params.logprobs or 0, params.logprob_token_ids) for token in tokens]
        reason = "stop" if start % 2 or count == len(said) else "length"
        return CompletionOutput(
            index=index,
            text=bytes(tokens).decode(errors="ignore"),
            token_ids=tokens,
            cumulative_logprob=-0.5 * len(tokens),
            logprobs=None if params.logprobs is None else logprobs,
            finish_reason=reason if step >= end else None,
            text_offsets=[len(bytes(tokens[:place]).decode(errors="ignore")) for place in range(len(tokens))],
            special_offsets=None if params.skip_special_tokens else [i for i in self.special_offsets if i < step],
        )

    def get_tokenizer(self) -> ByteTokenizer:
        return self.tokenizer

    async def check_health(self) -> None:
        if self.dead:
            raise EngineError("the step thread has died")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.calls.append(("pause", mode, clear_cache))
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level, mode))
        self.paused = self.asleep = True

    async def wake_up(self, tags: Any = None) -> None:
        self.calls.append(("wake_up", tags))
        self.paused = self.asleep = False

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def update_weights(self, weights: str, *, version: Any = None, mode: str = "keep") -> WeightUpdate:
        self.calls.append(("update_weights", weights, version, mode))
        if self.refuses is not None:
            raise self.refuses
        self.weight_version = version if version is not None else 1
        return WeightUpdate(self.weight_version, 3, 0, 96, 0.25)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return not self.running or reset_running_requests

    def start_profile(self, folder: Any) -> None:
        self.calls.append(("start_profile", str(folder)))

    def stop_profile(self) -> None:
        raise EngineError("no profile is running")

    async def inspect(self, engine: int = 0) -> EngineSnapshot:
        """Return one block, owned by the last started request."""
        owners = tuple(BlockOwner(request_id, 0, 0, 0) for request_id in list(self.running)[-1:])
        block = BlockSnapshot(0, len(owners), owners, None, None, 0)
        pool = PoolSnapshot(1, 16, 1, len(owners), 0, 0, 1 - len(owners), 0, 0)
        return EngineSnapshot(7, pool, (block,), (), (), 8, 64, self.stats(), ())

    def close(self) -> None:
        self.closed = True


def _new_part(before: CompletionOutput, now: CompletionOutput) -> CompletionOutput:
    """Return what is new in an answer since the step before."""
    seen = len(before.token_ids)
    return dataclasses.replace(
        now,
        text=now.text[len(before.text) :],
        token_ids=now.token_ids[seen:],
        logprobs=None if now.logprobs is None else now.logprobs[seen:],
        text_offsets=None if now.text_offsets is None else now.text_offsets[seen:],
        special_offsets=now.special_offsets and now.special_offsets[len(before.special_offsets or ()) :],
    )
