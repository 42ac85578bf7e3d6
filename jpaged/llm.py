"""`LLM`: runs batches of prompts. `generate`: one batch in one call, for use from JAX code.

Called by: the user's code, and `jpaged bench`; one call at a time, guarded by a lock.
Owns: the engines, which the caller's thread steps; one thread for each with data_parallel_size.
Never: calls JAX, or keeps a request after the call.
"""

import contextlib
import dataclasses
import math
import operator
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack, cast, overload

from jpaged.chat.prompt import RenderOptions
from jpaged.chat.turn import ChatFormats, chat_turn
from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.engine import Engine, Output
from jpaged.engine.input.input_processor import Prompt
from jpaged.engine.kv_cache.handover import KVHandover
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.strategies.pooled_outputs import check_task
from jpaged.engine_arguments import EngineArguments
from jpaged.errors import EngineError, RequestError
from jpaged.frontend.build import build_engine, weights_name
from jpaged.frontend.engine_access import EngineAccess, as_lora_request
from jpaged.frontend.engines_run import run_engines
from jpaged.frontend.interrupts import DeferredInterrupt
from jpaged.frontend.pausing import WAKE_TAGS, check_level, wake_tags
from jpaged.frontend.progress import Progress, UseTqdm
from jpaged.frontend.prompts import one_each, prompt_list, with_prompt_index
from jpaged.frontend.traced_calls import refuse_tracing
from jpaged.lifetime import call_at_exit, close_when_collected, end_thread, using_device
from jpaged.lora.request import LoRARequest
from jpaged.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoreOutput,
    ScoringOutput,
    WeightUpdate,
    WeightVersion,
    joined_updates,
)
from jpaged.params.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.params.scoring import ScoringParams
from jpaged.parsers.definitions import checked_tool_choice, checked_tools
from jpaged.phases import told_start
from jpaged.routing import ROUTERS, prefix_names
from jpaged.snapshot import EngineSnapshot
from jpaged.text.pairs import check_scores, pair_prompt, text_pairs

Message = Mapping[str, Any]  # role and content
Params = SamplingParams | PoolingParams | ScoringParams
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
INSPECT_SECONDS = 0.05  # interval at which `inspect` tries to answer itself, if no call of another thread does


class LLM(EngineAccess):
    """A model that is ready to generate. With runner="pooling", or a sequence classifier: to embed or classify.

    model:  folder, Hugging Face hub id, .gguf file, or "demo". With `params` also a Hugging Face config, its dict, or a
            DecoderSpec.
    params: live arrays (the tree of `jpaged.models.spec.param_shapes`), used without a copy where they are placed like
            the engine's (docs/live_arrays.md).
            A trainer's tree is accepted too, with the names of flax nnx or linen, tunix, MaxText or EasyDeL.
    layout: a `jpaged.models.spec.WeightLayout`, for live arrays with shapes that do not determine their layout.
    mesh:   a `jax.sharding.Mesh` with the engine's devices. None: those of the live arrays, or JAX's first ones.
    engine_options: fields of `jpaged.EngineConfig`, e.g. dtype, max_model_len, max_num_seqs.

    Raises ModelLoadError when the model cannot be loaded, RequestError for a bad option. `close`, or a `with` block's
    end, frees the device memory; garbage collection does too. Calls from several threads run one after another.
    With data_parallel_size, an engine gets at most ceil(prompts / engines) of a call's prompts.
    """

    @using_device()
    def __init__(
        self, model: Any, *, params: Any = None, layout: Any = None, mesh: Any = None,
        **engine_options: Unpack[EngineArguments],
    ):  # fmt: skip
        if count := engine_options.get("prefill_engines"):
            known = "is for AsyncLLM and the server: leave it out, or use one of them"
            raise RequestError("prefill_engines", count, known)
        with told_start():
            built = build_engine(
                model, params, engine_options, layout=layout, mesh=mesh, progress=True, background=True
            )
        super().__init__(built)
        self._is_live = params is not None
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread whose call holds the lock
        # requested by other threads while a call runs, by engine
        self._inspections: list[deque[Future[EngineCapture]]] = [deque() for _ in range(self.num_engines)]
        self._router = ROUTERS[self.config.data_parallel_routing]()
        self._num_requests = 0
        self._asleep: frozenset[str] = frozenset()  # tags of `wake_up` that sleep
        self._interpreter_ends = False
        self._collected = close_when_collected(self, partial(_close, self.engines))
        self._forget_exit = call_at_exit(self._close_at_exit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts. Returns one output per prompt, in the same order.

        prompts: a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids; or a list of these.
        sampling_params: one for all prompts, or a list with one each. None: the model's generation_config.json.
        use_tqdm: show a progress bar, on a terminal or in a notebook; or a callable to use instead of `tqdm.tqdm`.
        lora_request: LoRA adapter of all prompts, or a list with one each; None: the base model. Needs enable_lora.
        priority: one for all prompts, or a list with one each. With scheduling_policy="priority", lower starts first.

        Raises RequestError for the first bad prompt, before any prompt runs. Raises EngineError when the device fails;
        the next call runs normally.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        outputs = self._answer(prompts, "sampling_params", params, use_tqdm, priority, lora_request)
        return cast(list[RequestOutput], outputs)

    @overload
    def score(
        self, prompts: str | Sequence[str], sampling_params: str | Sequence[str], *, instruction: str | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]: ...  # fmt: skip

    @overload
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        num_prompt_tokens: int | Sequence[int] = 1,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[ScoreOutput]: ...

    def score(
        self, prompts: Any, sampling_params: Any = None, *, num_prompt_tokens: int | Sequence[int] = 1,
        use_tqdm: UseTqdm = True, lora_request: LoRARequests = None, instruction: str | None = None,
    ) -> Any:  # fmt: skip
        """Score texts: `score(query, documents)` with a pooling engine, else `score(texts, sampling_params)`.

        score(query, documents): how well each document fits the query, or its own query of a list. One output per
        document, in order, with `outputs.score`: a cross-encoder's probability, or the cosine of two embeddings.
        instruction: of Qwen3-Reranker, what a document must meet.

        score(texts, sampling_params): how likely the tokens of each text are, given the tokens before them. One output
        per text, in order. They are the log-probabilities that `generate` returns for an answer, and in float32 on CPU
        equal bit for bit.

        prompts:           a prompt and its answer, as one list of token ids; or a text, as for `generate`. At most
            max_model_len - 1 tokens.
        sampling_params:   with logprobs_mode="processed_logprobs" or "processed_logits": the parameters that the answer
            was sampled with, one for all texts or a list with one each. None, and in other modes: the model's own
            distribution. A beam search is refused.
        num_prompt_tokens: tokens before the first scored one, for all texts or a list with one each. The prefix cache
            supplies the KV of these tokens, but not of the last one.

        Raises the errors of `generate`.
        """
        if self.pooling is not None:
            return self._score_pairs(prompts, sampling_params, instruction, use_tqdm)
        each = prompt_list(prompts)
        given = one_each("sampling_params", sampling_params, len(each))
        counts = one_each("num_prompt_tokens", num_prompt_tokens, len(each))
        params = [ScoringParams(*one) for one in zip(given, counts, strict=True)]
        outputs = cast(list[RequestOutput], self._answer(each, "sampling_params", params, use_tqdm, None, lora_request))
        scores = [output.score for output in outputs if output.score is not None]
        if len(scores) < len(outputs):
            raise EngineError("a text could not be scored: the log says why")
        return scores

    def take_kv(self, prompt: Prompt) -> bytes:
        """Compute a prompt, and return the KV of its full blocks, for `put_kv` of another engine or process.

        The bytes have a checksum, and 2 * layers * KV heads * head_dim numbers of the KV type per token. Needs
        kv_handover=True and data_parallel_size=1. Raises the errors of `generate`.
        """
        engine = self._handover_engine("take_kv")
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self.generate(prompt, params, use_tqdm=False)
        with self._exclusive("take_kv"):
            handover = engine.take_kv(self._request_group(engine, 0, prompt, params, 1, 0))
        return dataclasses.replace(handover, layout=f"{self._weights_name()}, {handover.layout}").to_bytes()

    def put_kv(self, data: bytes) -> int:
        """Add the KV of `take_kv` to the prefix cache. Returns the number of new blocks.

        The next request with that prompt computes only the rest. Its answer does not change. Needs kv_handover=True and
        data_parallel_size=1. Raises RequestError for damaged bytes, or another model, block size or KV type.
        """
        engine = self._handover_engine("put_kv")
        handover, own = KVHandover.from_bytes(data), self._weights_name()
        model, _, layout = handover.layout.partition(", ")
        if model != own:
            raise RequestError("data", model, f"is from another model: this engine has {own}")
        with self._exclusive("put_kv"):
            return engine.put_kv(dataclasses.replace(handover, layout=layout))

    def _weights_name(self) -> str:
        return weights_name(self.config, live=self._is_live, version=self.weight_version)

    def _handover_engine(self, method: str) -> Engine:
        engine = self.engine
        if self._others:
            raise EngineError(f"{method} is for one engine, and data_parallel_size={self.num_engines}")
        return engine

    def add_lora(
        self, adapter: LoRARequest | str, arrays: Mapping[str, Any] | None = None, *, lora_alpha: float | None = None,
        use_rslora: bool = False,
    ) -> bool:  # fmt: skip
        """Read a LoRA adapter before it is needed, or add one of live arrays. Waits until it is in host memory.

        adapter:    a `LoRARequest`. With `arrays`: one without a path, or only the name, which gets the next free
            number. If the name is in use, later calls get the new arrays.
        arrays:     arrays [rank, in] and [out, rank] by PEFT's names, such as
            "model.layers.0.self_attn.q_proj.lora_A.weight". They are copied.
        lora_alpha: with `arrays`: B (A x) is multiplied by lora_alpha / rank, or lora_alpha / sqrt(rank) with
            `use_rslora`.

        Raises RequestError and ModelLoadError as `generate`. Returns True.
        """
        self._added_adapter(adapter, arrays, lora_alpha, use_rslora=use_rslora).result()
        return True

    def remove_lora(self, adapter: str | int) -> bool:
        """Forget a LoRA adapter, by name or lora_int_id. Running requests keep it. False if there is none."""
        return self.adapters.remove(adapter)

    def list_loras(self) -> set[int]:
        """Return the lora_int_id of each LoRA adapter that the engine knows."""
        return {known.int_id for known in self.adapters.known()}

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """Find the most likely answers to prompts. Returns one output per prompt, in order, each with its sequences.

        This is `generate` with `use_beam_search`, with vLLM's signature. Raises the errors of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError("params", params, "must be a jpaged.BeamSearchParams")
        found = []
        sampling_params = params.sampling_params()
        for output in self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request):
            prompt = output.prompt
            if prompt is None and self._tokenizer is not None:
                prompt = self._tokenizer.decode(output.prompt_token_ids)
            found.append(BeamSearchOutput([_sequence(output.prompt_token_ids, prompt, one) for one in output.outputs]))
        return found

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Pool prompts. Returns one output per prompt, in order. Raises the errors of `generate`.

        pooling_task: "embed", "classify", or "token_embed" or "token_classify" for a vector of each token:
            `outputs.data`, float32[tokens, size]. None: the task in `pooling_params`, else the model's. On CPU, a
            token's vector has the bits of the vector of a prompt that ends there. Per-token tasks use no cached KV.
        """
        return cast(list[PoolingRequestOutput[Any]], self._pool(pooling_task, prompts, pooling_params, use_tqdm))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embed prompts. Returns one output per prompt, in the same order, each with `outputs.embedding`.

        An embedding is a list of float32 numbers: the hidden state of the prompt's last token after the final norm,
        scaled to length 1 unless the pooling parameters say otherwise. The prompt ends with the end token that the
        tokenizer adds. Needs an engine with runner="pooling". Arguments and errors as for `generate`.
        """
        return cast(list[PoolingRequestOutput[EmbeddingOutput]], self._pool("embed", prompts, pooling_params, use_tqdm))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classify prompts. Returns one output per prompt, in order, each with `outputs.probs`: one number per label.

        Probabilities are those of Transformers' pipeline: the softmax over the labels. With one label, or problem_type
        multi_label_classification, the sigmoid of each. Otherwise as `embed`.
        """
        outputs = self._pool("classify", prompts, pooling_params, use_tqdm)
        return cast(list[PoolingRequestOutput[ClassificationOutput]], outputs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
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
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, rendered by a chat template.

        messages: dicts with role and content. An assistant's message may have tool_calls; a tool's answer has the role
            tool.
        chat_template: text of a template, in place of the tokenizer's.
        tools: functions that the model may call, as OpenAI's API defines them.
        tool_choice: none, auto, required, or {"type": "function", "function": {"name": ...}}. Default: auto with tools.
        chat_template_kwargs: more variables of the template, such as enable_thinking.
        tool_call_parser: how the model writes tool calls, such as hermes or qwen3_coder (docs/tools.md). Default:
            derived from the template.
        reasoning_parser: how the model writes reasoning, such as qwen3 or kimi_k2 (docs/tools.md).
        reasoning_tags: (start, end), for a model that no reasoning_parser fits.
        lora_request: as for `generate`.

        With tools or a reasoning parser, each answer has a `message`: its content, reasoning and tool calls. Raises the
        errors of `generate`.
        """
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
            for conversation in _conversations(messages)
        ]
        given = self.default_sampling_params if sampling_params is None else sampling_params
        params = one_each("sampling_params", given, len(turns))
        outputs = self.generate(
            [turn.prompt for turn in turns],
            [turn.sampling_params(one) for turn, one in zip(turns, params, strict=True)],
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        if tools or formats.reasoning or any(turn.reader.tool_format for turn in turns):
            for turn, output in zip(turns, outputs, strict=True):
                for answer in output.outputs:
                    answer.message = turn.reader.parse(answer.text, answer.special_offsets)
        return outputs

    def inspect(self, engine: int = 0) -> EngineSnapshot:
        """Return the state of the KV pool, the request table and the queue, all at one moment between two steps.

        engine: index of the engine, with data_parallel_size.
        During a call of another thread, it returns that call's requests and does not wait for its end. The snapshot
        contains no prompts. Raises EngineError when the LLM is closed.
        """
        self._refuse_nested("inspect")
        self._engine_at(engine)
        answer: Future[EngineCapture] = Future()
        self._inspections[engine].append(answer)
        while not answer.done():
            if self._lock.acquire(timeout=INSPECT_SECONDS):
                try:
                    self._answer_inspections(engine)
                finally:
                    self._lock.release()
        return dataclasses.replace(answer.result().snapshot(), engine=engine, num_engines=self.num_engines)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Waits until no call runs; returns True."""
        with self._exclusive("reset_prefix_cache"):
            self._router.forget()
            for engine in self.engines:
                engine.reset_prefix_cache()  # no request runs
            return True

    def update_weights(
        self, weights: Any, *, version: WeightVersion | None = None, layout: Any = None
    ) -> WeightUpdate:
        """Replace all weights, without a compile. Waits until no call runs. Later calls use the new weights.

        weights: a tree of live arrays, as for `LLM(config, params=...)`, in any layout. Or a dictionary, or an iterator
            of pairs, from Hugging Face's names to jax or numpy arrays; an iterator is read between two steps. Or the
            path of a checkpoint folder, a folder of `jpaged convert`, or a GGUF file. An array that has the shape,
            dtype, devices and memory layout of the engine's leaf is used without a copy. Others are copied, converted,
            split and quantised as at the start, leaf by leaf, with memory for at most one leaf more.
        version: label of the weights, in every output: `CompletionOutput.weight_version`. None: the number of updates.
        layout:  of a tree, as for `LLM`.

        KV of the old weights is not reused. LoRA adapters stay. Raises ModelLoadError for weights that do not fit, and
        RequestError for a bad argument, before anything is replaced. Raises EngineError while the weights sleep. After
        an error in the middle, such as an iterator that ends early, requests are refused until an update succeeds. They
        are also refused after the caller has deleted (donated) an array. With several processes, all of them must see
        a path. Arrays are this process's, and each other process is sent its part.
        """
        # An interrupt after the last leaf would leave KV of the old weights, or another engine with the old weights.
        with self._exclusive("update_weights"), DeferredInterrupt() as interrupt:
            leaves = self._prepared(weights, layout, version)
            self._router.forget()
            updates: list[WeightUpdate] = []
            for engine, of_engine in zip(self.engines, leaves, strict=True):
                engine.flush()
                new = of_engine() if updates else interrupt.between(of_engine())
                updates.append(engine.update_weights(new, version=version))
            return joined_updates(updates)

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake_up`. Waits until no call runs. Later calls that generate raise EngineError.

        level: 0: free nothing. 1: free the KV pool, and move the weights to the host. Live arrays (`params`) stay on
            the device: only their owner may delete them. On CPU the weights stay too. 2: free the KV pool, and discard
            the weights. Of live arrays, the references are dropped. They are not copied: `update_weights` gives new
            ones, before or after `wake_up`.
        """
        check_level(level)
        with self._exclusive("sleep"):
            for engine in self.engines if level > 0 else ():
                self._router.forget()
                engine.sleep(discard_weights=level > 1)
            self._asleep = frozenset(WAKE_TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed. Compiles nothing, and does not change answers.

        tags: 'weights' or 'kv_cache', to wake up one part only. Both must be awake to generate. After level 2, calls
            that generate raise NoWeightsError until `update_weights`.
        Raises EngineError if the device has too little free memory; it may be called again.
        """
        waking = wake_tags(tags)
        with self._exclusive("wake_up"):
            for engine in self.engines:
                engine.wake_up(weights="weights" in waking, kv_cache="kv_cache" in waking)
            self._asleep -= waking

    def is_sleeping(self) -> bool:
        """Return True if the LLM, or a part of it, sleeps."""
        return bool(self._asleep)

    def close(self) -> None:
        """Free the device memory; the LLM cannot be used afterwards. No effect if closed, or in a forked process."""
        if self._made_in.is_another:
            return
        with self._exclusive("close"):
            if self._engine is not None:
                self._collected.detach()
                self._forget_exit()
                _close(self.engines)
                if self._adapters is not None:
                    self._adapters.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _exclusive(self, method: str) -> Iterator[None]:
        """Hold the lock during a call. Raises EngineError inside a call of this thread, and in a forked process."""
        self._made_in.check()
        self._refuse_nested(method)
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _refuse_nested(self, method: str) -> None:
        """Raise EngineError inside a call of this thread, such as in a callback: the lock would never be released."""
        if self._caller == threading.get_ident():
            raise EngineError(
                f"{method} was called from inside a call of this LLM, and would wait forever: call it after that call "
                "has returned, or from another thread"
            )

    def _pool(
        self,
        task: str | None,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: UseTqdm,
    ) -> list[Output]:
        given = PoolingParams() if pooling_params is None else pooling_params
        each = given if isinstance(given, Sequence) else [given]
        for params in each:
            if not isinstance(params, PoolingParams):
                raise RequestError("pooling_params", params, "must be a jpaged.PoolingParams")
            if task is not None and params.task not in (None, task):
                raise RequestError("task", params.task, f"must be {task!r} or None in this call")
        pooling = self.engine.inputs.limits.pooling
        own = "embed" if pooling is None else pooling.task
        tasks = [dataclasses.replace(params, task=task or params.task or own) for params in each]
        return self._answer(prompts, "pooling_params", tasks if isinstance(given, Sequence) else tasks[0], use_tqdm)

    def _score_pairs(
        self, query: Any, documents: Any, instruction: str | None, use_tqdm: UseTqdm
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """`score` of a pooling engine."""
        assert self.pooling is not None
        check_scores(self.pooling, instruction)
        if documents is None:
            raise RequestError("documents", None, "is missing: a pooling engine scores with score(query, documents)")
        queries, others = text_pairs(query, documents)
        if self.pooling.task == "embed":
            distinct = list(dict.fromkeys((*queries, *others)))
            by_text = dict(zip(distinct, self.embed(distinct, use_tqdm=use_tqdm), strict=True))
            return [_cosine(by_text[one], by_text[other]) for one, other in zip(queries, others, strict=True)]
        if self._tokenizer is None:
            raise RequestError("query", query, "the model has no tokenizer: start with the option tokenizer")
        prompts = [
            pair_prompt(self._tokenizer, self.pooling.pairs, one, other, instruction)
            for one, other in zip(queries, others, strict=True)
        ]
        outputs = self.classify(prompts, use_tqdm=use_tqdm)
        return [_scored(each, None if each.outputs is None else each.outputs.probs[0]) for each in outputs]

    def _answer(
        self,
        prompts: Prompt | Sequence[Prompt],
        name: str,
        params: Params | Sequence[Params],
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[Output]:
        """Run prompts to their end. Returns their last outputs, in order. name: name of `params` in error messages."""
        refuse_tracing()
        each = prompt_list(prompts)
        params = one_each(name, params, len(each))
        priorities = one_each("priority", 0 if priority is None else priority, len(each))
        if isinstance(lora_request, str):  # a sequence, and no list of requests
            as_lora_request(lora_request)
        lora_requests = one_each("lora_request", lora_request, len(each))
        for one in lora_requests:
            if one is not None:
                as_lora_request(one)  # before they are keys: another kind of value may have no hash
        with self._exclusive("generate"), DeferredInterrupt() as interrupt:
            engine = self.engine
            if self._asleep:
                raise EngineError(f"the LLM sleeps ({', '.join(sorted(self._asleep))}): call wake_up() first")
            for one in self.engines:
                one.require_weights()
            for one in params[:1]:
                check_task(engine.inputs.limits.pooling, one)  # here, so that the error names no prompt
            adapters = {one: self._adapter_of(one) for one in dict.fromkeys(lora_requests)}  # each is read once
            request_groups = [
                self._request_group(engine, index, prompt, param, len(each), priority, adapters[lora])
                for index, (prompt, param, priority, lora) in enumerate(
                    zip(each, params, priorities, lora_requests, strict=True)
                )
            ]
            ids = {group.request_id for group in request_groups}
            for index, group in enumerate(request_groups):
                _await_parts(group, index, len(request_groups))
            reads = not any(isinstance(param, SamplingParams) and param.max_tokens != 1 for param in params)
            progress = Progress(use_tqdm, len(ids), self.stats, counts_prompts=reads)
            try:
                if self._others:
                    finals = self._run_several(request_groups, progress, interrupt)
                else:
                    for group in request_groups:
                        engine.add(group)
                    finals = self._run(engine, ids, progress, interrupt)
            except BaseException:
                for engine in self.engines:
                    engine.start_over()  # an interrupt may have left its state inconsistent
                raise
        return [finals[group.request_id] for group in request_groups]

    def _request_group(
        self, engine: Engine, index: int, prompt: Prompt, params: Params, count: int, priority: int,
        adapter: Future[LoadedAdapter] | None = None,
    ) -> RequestGroup:  # fmt: skip
        request_id = str(self._num_requests)
        self._num_requests += 1
        try:
            group = engine.inputs.process(request_id, prompt, params, priority=priority, adapter=adapter)
            engine.admission.check_fits(group)
            return group
        except RequestError as error:
            raise with_prompt_index(error, index, count) from None

    def _run(
        self, engine: Engine, ids: set[str], progress: Progress, interrupt: DeferredInterrupt
    ) -> dict[str, Output]:
        """Step until the requests of these ids have ended. Returns their last outputs by id."""
        finals: dict[str, Output] = {}
        try:
            while len(finals) < len(ids):
                self._check_interrupts(interrupt)
                self._answer_inspections(0)
                outputs = {output.request_id: output for output in engine.step() if output.request_id in ids}
                finals |= outputs
                progress.update(len(outputs))
        finally:
            progress.close()
        return finals

    def _run_several(
        self, request_groups: list[RequestGroup], progress: Progress, interrupt: DeferredInterrupt
    ) -> dict[str, Output]:
        """Divide requests among the engines, and run all to their end. Returns their last outputs by id."""
        engines, finals = self.engines, dict[str, Output]()
        ids: list[set[str]] = [set() for _ in engines]
        last = math.ceil(len(request_groups) / len(engines)) - 1  # an engine with more requests has its full share
        for group in request_groups:
            prefixes = prefix_names(group.prompt_token_ids, engines[0].runner.block_size, group.prefix_salt)
            index = self._router.choose(prefixes, [len(each) for each in ids], bound=last)
            engines[index].add(group)
            ids[index].add(group.request_id)

        def note(outputs: list[Output]) -> None:
            finals.update((output.request_id, output) for output in outputs)
            progress.update(len(outputs))

        turns = [engine.step for engine in engines]
        try:
            run_engines(turns, self._answer_inspections, ids, note, lambda: self._check_interrupts(interrupt))
        finally:
            progress.close()
        return finals

    def _check_interrupts(self, interrupt: DeferredInterrupt) -> None:
        """Raise KeyboardInterrupt after Ctrl-C, and SystemExit if the program ends."""
        interrupt.check()
        if self._interpreter_ends:
            end_thread()

    def _answer_inspections(self, index: int) -> None:
        inspections = self._inspections[index]
        while inspections:
            self._engine_at(index).inspect(inspections.popleft())

    def _close_at_exit(self) -> None:
        """End a call that still runs in a daemon thread, after its current step."""
        self._interpreter_ends = True
        self.close()


def _close(engines: tuple[Engine, ...]) -> None:
    """End the engines of an LLM, which may be gone."""
    for engine in engines:
        engine.close()


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    use_tqdm: UseTqdm = True,
    **engine_options: Unpack[EngineArguments],
) -> list[RequestOutput]:
    """Complete prompts with a model, in one call.

    model: a folder, a hub id, a .gguf file, an `LLM`, or (config, params) with live JAX arrays, which are used without
        a copy (docs/live_arrays.md has the tree). For text prompts, live arrays need tokenizer=: a folder, a hub id or
        a .gguf file.
    engine_options: as for `LLM`; none if `model` is an `LLM`.

    Each call builds an engine, with programs from the compile cache, and closes it. For many calls, make an `LLM`.
    """
    if isinstance(model, LLM):
        for name, value in engine_options.items():
            raise RequestError(name, value, "cannot be changed for an existing LLM: pass it when the LLM is made")
        return model.generate(prompts, sampling_params, use_tqdm=use_tqdm)
    params = None
    if isinstance(model, tuple):
        if len(model) != 2:
            raise RequestError("model", f"a tuple of {len(model)}", "a tuple must be (config, params)")
        model, params = model
        if not isinstance(model, str) and engine_options.get("tokenizer") is None:
            for prompt in prompt_list(prompts):  # checked before any program compiles
                if isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
                    raise RequestError("prompts", prompt, "live arrays come without a tokenizer: name one (tokenizer=)")
    with LLM(model, params=params, **engine_options) as llm:
        return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)


def _cosine(
    query: PoolingRequestOutput[EmbeddingOutput], document: PoolingRequestOutput[EmbeddingOutput]
) -> PoolingRequestOutput[ScoringOutput]:
    """The score of a pair of embeddings of length 1."""
    score = None
    if query.outputs is not None and document.outputs is not None:
        score = math.fsum(map(operator.mul, query.outputs.embedding, document.outputs.embedding))
    ids, error = query.prompt_token_ids + document.prompt_token_ids, document.error or query.error
    return _scored(dataclasses.replace(document, prompt_token_ids=ids, error=error), score)


def _scored(output: PoolingRequestOutput[Any], score: float | None) -> PoolingRequestOutput[ScoringOutput]:
    """The output of a pair of texts. score: None if one of them has no result."""
    return cast(Any, dataclasses.replace(output, outputs=None if score is None else ScoringOutput(score)))


def _sequence(prompt_token_ids: list[int], prompt: str | None, answer: CompletionOutput) -> BeamSearchSequence:
    """Return an answer of a beam search in vLLM's form, which begins with the prompt."""
    return BeamSearchSequence(
        prompt_token_ids + answer.token_ids,
        list(answer.logprobs or ()),
        answer.cumulative_logprob or 0.0,
        None if prompt is None else prompt + answer.text,
        answer.finish_reason,
        answer.stop_reason,
    )


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """Return a list of conversations; one conversation becomes a list of one."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    is_one = not is_list or (bool(messages) and isinstance(messages[0], Mapping))
    return cast(Sequence[Sequence[Message]], [messages] if is_one else messages)


def _await_parts(group: RequestGroup, index: int, count: int) -> None:
    """Wait until the grammar of a prompt's answer is compiled, and its adapter is in memory.

    Raises RequestError for the grammar, and ModelLoadError for the adapter.
    """
    if group.grammar is not None:
        try:
            group.grammar.result()
        except RequestError as error:
            raise with_prompt_index(error, index, count) from None
    if group.adapter is not None:
        group.adapter.result()
