"""The front door for batches: `LLM`, and `generate` for use from JAX code."""

import atexit
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np

from jpaged.answers.definitions import checked_tool_choice, checked_tools
from jpaged.build import build_engine, refuse_tracing
from jpaged.chat.prompt import RenderOptions
from jpaged.chat.turn import ChatFormats, chat_turn
from jpaged.engine.engine import Engine, Output
from jpaged.engine.input_processor import Prompt, as_array
from jpaged.engine.inspect import EngineCapture
from jpaged.engine.pooling import check_task
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.interrupts import DeferredInterrupt, call_at_exit
from jpaged.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    EngineStats,
    PoolingRequestOutput,
    RequestOutput,
    ScoreOutput,
)
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.snapshot import EngineSnapshot

Message = Mapping[str, Any]  # role and content
Params = SamplingParams | PoolingParams
T = TypeVar("T")
REFRESH_SECONDS = 0.2  # of the progress bar's figures
INSPECT_SECONDS = 0.05  # how soon `inspect` sees that a call beside it has ended without an answer for it


class LLM:
    """A model, ready to generate; or with runner="pooling", and of sequence classifiers, to embed or classify.

    model:  folder, Hugging Face hub id, .gguf file, or "demo". With `params` also a Hugging Face config, its dict or a
            DecoderSpec.
    params: live arrays (the tree of `jpaged.models.spec.param_shapes`), used as they are, without a copy.
    layout: a `jpaged.models.spec.WeightLayout`: how live arrays are stored, where their shapes do not tell.
    engine_options: fields of `jpaged.EngineConfig`, e.g. dtype, max_model_len, max_num_seqs.

    Raises ModelLoadError when the model cannot be loaded, RequestError for an unknown option. Use it as a context
    manager, or call `close`, to give the device memory back. Calls from several threads run one after another.
    """

    def __init__(self, model: Any, *, params: Any = None, layout: Any = None, **engine_options: Any):
        built = build_engine(model, params, engine_options, layout=layout, progress=True)
        self.config = built.config
        self.spec = built.spec
        self.default_sampling_params = built.default_sampling_params
        self._tokenizer = built.tokenizer
        self._engine: Engine | None = built.engine
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that last had a call of `generate`
        self._inspections: deque[Future[EngineCapture]] = deque()  # asked for by other threads while a call runs
        self._num_requests = 0
        self._interpreter_ends = False
        self._exit_hook = call_at_exit(self._close_at_exit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one output each, in their order.

        prompts: a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids; or a list of these.
        sampling_params: one for all, or a list with one each. None: the model's generation_config.json.
        use_tqdm: show progress; or what to call for a progress bar instead of `tqdm.tqdm`.
        priority: lower ones start first, with scheduling_policy="priority": one for all, or a list with one each.

        All prompts are checked first: RequestError for the first bad one is raised before any runs. EngineError when
        the device fails; the next call is served as if nothing had happened.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        return cast(list[RequestOutput], self._answer(prompts, "sampling_params", params, use_tqdm, priority))

    def _pool(
        self, task: str, prompts: Any, pooling_params: Any, use_tqdm: bool | Callable[..., Any]
    ) -> Sequence[Output]:
        given = PoolingParams() if pooling_params is None else pooling_params
        each = given if isinstance(given, Sequence) else [given]
        for params in each:
            if not isinstance(params, PoolingParams):
                raise RequestError("pooling_params", params, "must be a jpaged.PoolingParams")
        wishes = [dataclasses.replace(params, task=task) for params in each]
        return self._answer(prompts, "pooling_params", wishes if isinstance(given, Sequence) else wishes[0], use_tqdm)

    def _answer(
        self,
        prompts: Any,
        name: str,
        params: Params | Sequence[Params],
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None = None,
    ) -> list[Output]:
        """Run prompts to their ends. name: of the parameters, as the caller knows them."""
        refuse_tracing()
        each = _prompt_list(prompts)
        params = _one_each(name, params, len(each))
        priorities = _one_each("priority", 0 if priority is None else priority, len(each))
        with self._lock, DeferredInterrupt() as interrupt:
            self._caller = threading.get_ident()
            engine = self._live_engine
            for one in params[:1]:
                check_task(engine.inputs.limits.pooling, one)  # or each prompt would be blamed for it
            requests = [
                self._request(engine, index, prompt, param, len(each), priority)
                for index, (prompt, param, priority) in enumerate(zip(each, params, priorities, strict=True))
            ]
            ids = {request.request_id for request in requests}
            for index, request in enumerate(requests):
                _await_grammar(request, index, len(requests))
            try:
                for request in requests:
                    engine.add(request)
                finals = self._run(engine, ids, _progress_bar(use_tqdm, len(requests)), interrupt)
            except BaseException:
                engine.start_over()  # an interrupt may have come from anywhere, in the middle of anything
                raise
        return [finals[request.request_id] for request in requests]

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[ScoreOutput]:
        """How likely the model finds each token of texts, behind those before it; one output each, in their order.

        The model's own log-probabilities, whatever sampling would do to them, computed as in generation: in float32 on
        CPU they are those of `generate` to the bit. A text has at most max_model_len - 1 tokens. Errors as of
        `generate`.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = []
        for output in self.generate(prompts, params, use_tqdm=use_tqdm):
            pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
            told = [entries[token_id] for token_id, entries in pairs if entries is not None]
            scores = [entry.logprob for entry in told], [entry.rank or 0 for entry in told]
            outputs.append(ScoreOutput(output.prompt_token_ids, *scores))
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeddings of prompts: `outputs.embedding`, one output each, in their order.

        An embedding is the hidden state of the prompt's last token after the final norm, of length 1 unless the pooling
        parameters say otherwise; a list of float32 numbers. The tokenizer's own end token is part of the prompt. Needs
        an engine with runner="pooling". prompts, use_tqdm and errors as of `generate`.
        """
        return cast(list[PoolingRequestOutput[EmbeddingOutput]], self._pool("embed", prompts, pooling_params, use_tqdm))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """What a sequence classifier says of prompts: `outputs.probs`, a number a label; one output each, in order.

        Probabilities are made as Transformers' pipeline makes them: the softmax over the labels, with one label or
        problem_type multi_label_classification the sigmoid of each. Otherwise as `embed`.
        """
        outputs = self._pool("classify", prompts, pooling_params, use_tqdm)
        return cast(list[PoolingRequestOutput[ClassificationOutput]], outputs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        reasoning_tags: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them; rendered by the tokenizer's chat template, or by another one.

        messages: dicts with role and content; an assistant's may have tool_calls, a tool's answer has the role tool.
        tools: functions that the model may call, as OpenAI's API defines them.
        tool_choice: none, auto, required, or {"type": "function", "function": {"name": ...}}. Default: auto with tools.
        chat_template: its text.
        chat_template_kwargs: further variables of the template, such as enable_thinking.
        tool_call_parser, reasoning_parser: how the model writes calls and reasoning, by vLLM's names: hermes,
            llama3_json, mistral, pythonic, json; deepseek_r1, qwen3. Calls are read as the template tells by default.
        reasoning_tags: (start, end), for models that no reasoning_parser names.

        With tools or a reasoning parser each answer has a `message`: its content, reasoning and tool calls. Raises as
        `generate` does.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        one = not is_list or (bool(messages) and isinstance(messages[0], Mapping))
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        formats = ChatFormats.named(chat_template, tool_call_parser, reasoning_parser, reasoning_tags)
        choice = checked_tool_choice(tool_choice)
        options = RenderOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        turns = [
            chat_turn(
                self._tokenizer,
                conversation,
                formats,
                tools=checked_tools(tools or ()),
                tool_choice=choice,
                options=options,
            )
            for conversation in conversations
        ]
        given = self.default_sampling_params if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(turns))
        outputs = self.generate(
            [turn.prompt for turn in turns],
            [turn.sampling_params(one) for turn, one in zip(turns, params, strict=True)],
            use_tqdm=use_tqdm,
        )
        if tools or formats.reasoning:
            for turn, output in zip(turns, outputs, strict=True):
                for answer in output.outputs:
                    answer.message = turn.reader.parse(answer.text)
        return outputs

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), or None if it has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no sampling parameters are given."""
        return self.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self._live_engine.runner.max_model_len

    def stats(self) -> EngineStats:
        """The engine's figures since the start or the last `reset_stats`."""
        return self._live_engine.stats()

    def inspect(self) -> EngineSnapshot:
        """Who owns which block of the KV pool, who runs, who waits: all at one moment, between two steps.

        From another thread it sees a call that runs there, and does not wait for its end. Prompts are not in it.
        """
        if self._lock.locked() and self._caller == threading.get_ident():
            raise EngineError("inspect was called from inside a call of this LLM: call it from another thread")
        answer: Future[EngineCapture] = Future()
        self._inspections.append(answer)
        while not answer.done():
            if self._lock.acquire(timeout=INSPECT_SECONDS):
                try:
                    self._answer_inspections(self._live_engine)
                finally:
                    self._lock.release()
        return answer.result().snapshot()

    def reset_stats(self) -> None:
        """Begin counters and peaks anew."""
        self._live_engine.reset_stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that was kept for reuse."""
        with self._lock:
            return self._live_engine.reset_prefix_cache()

    def close(self) -> None:
        """Give the device memory back. The object cannot be used after this; closing twice does nothing."""
        atexit.unregister(self._exit_hook)
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed: make a new one")
        return self._engine

    def _request(
        self, engine: Engine, index: int, prompt: Prompt, params: Params, count: int, priority: int
    ) -> RequestGroup:
        request_id = str(self._num_requests)
        self._num_requests += 1
        try:
            group = engine.inputs.process(request_id, prompt, params, priority=priority)
            engine.check_fits(group)
            return group
        except RequestError as error:
            raise _of_prompt(error, index, count) from None

    def _run(
        self, engine: Engine, ids: set[str], bar: Any | None, interrupt: DeferredInterrupt
    ) -> dict[str, Output]:
        """Step until the requests of these ids have ended; their last outputs by id."""
        finals: dict[str, Output] = {}
        began = shown = time.monotonic()
        tokens_before = _tokens(engine)
        try:
            while len(finals) < len(ids):
                interrupt.check()
                self._answer_inspections(engine)
                if self._interpreter_ends:
                    raise EngineError("the program ends while this call runs in a daemon thread")
                outputs = [output for output in engine.step() if output.request_id in ids]
                for output in outputs:
                    finals[output.request_id] = output
                now = time.monotonic()
                if bar is None:
                    continue
                if now - shown > REFRESH_SECONDS or len(finals) == len(ids):
                    stats = engine.stats()
                    rate = (_tokens(engine) - tokens_before) / max(now - began, 1e-9)
                    kv_use = stats.used_blocks / stats.num_blocks
                    bar.set_postfix_str(f"{rate:.1f} tokens/s, KV {kv_use:.0%}")
                    shown = now
                bar.update(len(outputs))
        finally:
            if bar is not None:
                bar.close()
        return finals

    def _answer_inspections(self, engine: Engine) -> None:
        while self._inspections:
            engine.inspect(self._inspections.popleft())

    def _close_at_exit(self) -> None:
        """End a call that still runs in a daemon thread, after its step."""
        self._interpreter_ends = True
        self.close()


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    use_tqdm: bool | Callable[..., Any] = True,
    **engine_options: Any,
) -> list[RequestOutput]:
    """Complete prompts with a model, in one call.

    model: a folder, a hub id, a .gguf file, an `LLM`, or (config, params) with live JAX arrays, which are used without
        a copy (docs/live_arrays.md has the tree); for texts as prompts they need tokenizer=, a folder, a hub id or a
        .gguf file.
    engine_options: as of `LLM`; an `LLM` has its own already. Whoever calls this often keeps an `LLM` instead: an
    engine is built, its programs taken from the compile cache, and closed again each time.
    """
    if isinstance(model, LLM):
        for name, value in engine_options.items():
            raise RequestError(name, value, "the LLM has its options already: give them where it is made")
        return model.generate(prompts, sampling_params, use_tqdm=use_tqdm)
    params = None
    if isinstance(model, tuple):
        if len(model) != 2:
            raise RequestError("model", f"a tuple of {len(model)}", "a tuple must be (config, params)")
        model, params = model
        if not isinstance(model, str) and engine_options.get("tokenizer") is None:
            for prompt in _prompt_list(prompts):  # told before a model is compiled for it
                if isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
                    raise RequestError("prompts", prompt, "live arrays come without a tokenizer: name one (tokenizer=)")
    with LLM(model, params=params, **engine_options) as llm:
        return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)


def _await_grammar(group: RequestGroup, index: int, count: int) -> None:
    """Wait for what a prompt's answer must match to be compiled. Raises RequestError where it cannot be."""
    if group.grammar is not None:
        try:
            group.grammar.result()
        except RequestError as error:
            raise _of_prompt(error, index, count) from None


def _of_prompt(error: RequestError, index: int, count: int) -> RequestError:
    """An error that says whose it is."""
    if count == 1:
        return error
    return RequestError(error.parameter, error.value, f"{error.accepted} (prompt {index} of {count})")


def _tokens(engine: Engine) -> int:
    """What the progress bar counts: new tokens, of a pooling engine those of prompts."""
    return engine.generated_tokens if engine.inputs.limits.pooling is None else engine.stats().prompt_tokens


def _one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """The value of a parameter for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        accepted = f"{len(given)} of them for {count} prompts: give one, or one for each prompt"
        raise RequestError(name, f"a list of {len(given)}", accepted)
    return given


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of integers is one prompt of token ids, a 2-D array is one a row."""
    if hasattr(prompts, "__array__"):
        prompts = as_array("prompts", prompts)
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        return [cast(Prompt, prompts)]
    if prompts and all(isinstance(part, (int, np.integer)) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any | None:
    if not use_tqdm or not total:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total)
    from tqdm import tqdm

    return tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True)
