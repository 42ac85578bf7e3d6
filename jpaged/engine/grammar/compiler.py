"""Compiles grammars in worker threads, and caches the grammars used last.

Each grammar is first compiled in a child process, which is killed when it exceeds its time limit (see `probe.py`).
Then this process compiles it again. There are two lanes, each with one worker thread and one child of low priority.
A compile that takes longer than QUICK_SECONDS starts again in the slow lane. So an ordinary grammar (a medium schema
takes 4 ms) never waits for a hostile one. In each lane clients take turns (`queue.py`). A grammar is dropped when all
its requests have left, also while the child compiles it.
"""

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jpaged.engine.grammar.limits import GRAMMAR_STEP_LIMITS, STEP_LIMITS, GrammarLimits
from jpaged.engine.grammar.matcher import GrammarMatcher, first_line
from jpaged.engine.grammar.probe_process import ProbeCancelled, ProbeProcess, ProbeTimeout
from jpaged.engine.grammar.queue import Job, JobQueue
from jpaged.engine.grammar.reasoning_prefix import ReasoningPrefix
from jpaged.engine.grammar.special_text import SpecialTokens
from jpaged.engine.grammar.translate import Source
from jpaged.engine.grammar.vocabulary import grammar_tokenizer, special_tokens
from jpaged.engine.step_plan import mask_words
from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.requester import ANYONE, Requester

logger = logging.getLogger(__name__)

QUICK_SECONDS = 0.5
RENEW_SECONDS = 0.1  # slower grammars are not recompiled in the engine's thread: all requests would wait
MAX_SLOW = 8  # compiles queued in the slow lane

_Key = tuple[StructuredOutputsParams, ReasoningPrefix | None]


class Grammar:
    """A compiled grammar, shared by all requests with the same parameters."""

    def __init__(
        self, compile_matcher: Callable[[], LLMatcher], vocab_size: int, source: Source, end_ids: Set[int] = frozenset()
    ):
        """Compile the grammar with `compile_matcher`. Raises RequestError if that fails."""
        self._compile_matcher, self._vocab_size, self._source = compile_matcher, vocab_size, source
        self._end_ids = end_ids  # end-of-sequence tokens of the model
        began = time.monotonic()
        self._matcher = compile_matcher()
        self._seconds = time.monotonic() - began
        self._generation = 0  # recompiles so far; -1: failed, and too slow to recompile here

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for a new answer. The copy takes 42 us and shares the lexer states computed so far."""
        parameter, value = self._source.parameter, self._source.value
        copied = self._matcher.deep_copy()
        return GrammarMatcher(
            copied, self._vocab_size, parameter, value, self._renew, self._generation, self._end_ids
        )

    @property
    def is_stale(self) -> bool:
        """True if the grammar must be compiled again before a new request may use it."""
        return self._generation < 0

    def _renew(self, generation: int) -> tuple[LLMatcher, int] | None:
        """Return a fresh matcher and its generation, for an answer whose matcher failed.

        Recompiles if the failed matcher is of the current generation. None if that would take longer than
        RENEW_SECONDS. Only the engine's thread calls this.
        """
        if generation == self._generation:
            if self._seconds > RENEW_SECONDS:
                self._generation = -1
            else:
                self._matcher = self._compile_matcher()
                self._generation += 1
        return None if self._generation < 0 else (self._matcher.deep_copy(), self._generation)


class _Lane:
    """One worker thread with its child process. A turn of the thread takes the next job of the queue."""

    def __init__(self, name: str, probe: ProbeProcess):
        self.probe = probe
        self.queue = JobQueue()
        self.executor = ThreadPoolExecutor(1, f"jpaged-grammar-{name}")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.probe.kill()  # a worker that reads from the child gets the end of the stream


class GrammarCompiler:
    """Compiles the grammars of requests. `submit` may be called from any thread."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ):
        self.limits = limits or GrammarLimits()
        self.vocab_size = vocab_size
        self._tokenizer_of_model = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._special = SpecialTokens(special_tokens(tokenizer, vocab_size), frozenset(eos_token_ids))
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[_Key, Grammar] = collections.OrderedDict()
        self._unfinished: dict[_Key, Job] = {}
        self._lanes: dict[str, _Lane] = {}
        self._closed = False

    def submit(
        self,
        params: StructuredOutputsParams,
        reasoning: ReasoningPrefix | None = None,
        requester: Requester = ANYONE,
    ) -> "Future[Grammar]":
        """Start to compile a grammar, unless it is cached or being compiled. Returns at once.

        reasoning: text that may come before the answer.
        requester: the request that waits for it. The compile ends when all such requests have left.

        Raises RequestError, within 50 ms, for parameters beyond the limits or not supported. The future's exception is
        a RequestError if the compile fails or takes longer than `grammar_compile_timeout`. It is a CapacityError if
        MAX_SLOW slow compiles are queued: the client with the most of them loses its last. Do not cancel the future,
        because other requests may wait for it.
        """
        key = params, reasoning
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            if key in self._cache and self._cache[key].is_stale:
                del self._cache[key]
            if key in self._cache:
                self._cache.move_to_end(key)
                done: Future[Grammar] = Future()
                done.set_result(self._cache[key])
                return done
            if key in self._unfinished:
                return self._join(self._unfinished[key], requester)
        source = Source(params, self.limits, reasoning)
        with self._lock:
            if key in self._unfinished:
                return self._join(self._unfinished[key], requester)
            future: Future[Grammar] = Future()
            future.set_running_or_notify_cancel()
            self._unfinished[key] = job = Job(key, source, future, [requester])
            self._start("quick", job)
        return future

    @staticmethod
    def _join(job: Job, requester: Requester) -> "Future[Grammar]":
        job.requesters.append(requester)
        return job.future

    def warm_up(self) -> "Future[None]":
        """Start to read the tokenizer. Otherwise the first compile does it.

        Reading holds Python's interpreter lock for 2.5 of its 3.5 s (150,000 tokens), and all streams stop during that
        time. A server therefore calls this before it is ready. If the model's tokenizer cannot be used for grammars,
        the future's exception says why.
        """
        with self._lock:
            lane = self._lane("quick")
        return lane.executor.submit(self._read_tokenizer)

    def close(self) -> None:
        """End all workers. Unfinished compiles fail with EngineError."""
        with self._lock:
            self._closed = True
            unfinished, self._unfinished = self._unfinished, {}
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        for job in unfinished.values():
            _fail(job.future, EngineError("the engine is closed"))

    # -- run by the workers ---------------------------------------------------------------------------------------

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, ProbeProcess(self.vocab_size, list(self._special.ids)))
        return self._lanes[name]

    def _start(self, name: str, job: Job) -> None:
        lane = self._lane(name)
        lane.queue.put(job)
        lane.executor.submit(self._work_on_next, lane, name == "quick")

    def _work_on_next(self, lane: _Lane, quick: bool) -> None:
        with self._lock:
            self._drop_unwanted(lane)
            job = lane.queue.take()
        if job is not None:
            self._work(lane, quick, job)

    def _drop_unwanted(self, lane: _Lane) -> None:
        for job in lane.queue.remove_unwanted():
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """End a job that no request waits for. A later request for the same grammar starts a new one."""
        if self._unfinished.get(job.key) is job:
            del self._unfinished[job.key]
        _fail(job.future, EngineError("no request waits for this grammar"))

    def _ends_unwanted(self, job: Job) -> bool:
        """Drop a running job if no request waits for it. Returns True if it was dropped."""
        if job.is_wanted:
            return False
        with self._lock:
            unwanted = not job.is_wanted
            if unwanted:
                self._drop(job)
        return unwanted

    def _work(self, lane: _Lane, quick: bool, job: Job) -> None:
        # Half of the time is for the probe: this process compiles the grammar again, in about the same time.
        allowed = self.limits.grammar_compile_timeout / 2
        try:
            self._read_tokenizer()
            seconds = min(QUICK_SECONDS, allowed) if quick else allowed
            grammar = self._compile(lane.probe, job.source, seconds, functools.partial(self._ends_unwanted, job))
        except ProbeCancelled:
            pass  # `_ends_unwanted` has ended the job
        except ProbeTimeout:
            if quick and allowed > QUICK_SECONDS:
                self._retry_in_slow_lane(job)
                return
            limit = self.limits.grammar_compile_timeout
            accepted = f"takes more than {limit:g} s to compile (grammar_compile_timeout): make it simpler"
            self._end(job, RequestError(job.source.parameter, job.source.value, accepted))
        except Exception as cause:
            self._end(job, cause)
        except BaseException as cause:  # llguidance panicked (Rust): the waiting request must get an error
            self._end(job, EngineError(f"compiling a grammar failed: {cause!r}"))
        else:
            self._end(job, grammar)

    def _retry_in_slow_lane(self, job: Job) -> None:
        refused = None
        with self._lock:
            if self._closed:
                return
            lane = self._lane("slow")
            self._drop_unwanted(lane)
            if len(lane.queue) >= MAX_SLOW:
                refused = lane.queue.remove_surplus(job.client) or job
            if refused is not job:
                self._start("slow", job)
        if refused is not None:
            seconds = self.limits.grammar_compile_timeout
            self._end(refused, CapacityError("too many grammars that are slow to compile", seconds))

    def _end(self, job: Job, result: Grammar | Exception) -> None:
        with self._lock:
            if self._unfinished.get(job.key) is job:
                del self._unfinished[job.key]
            if isinstance(result, Grammar):
                self._cache[job.key] = result
                while len(self._cache) > self.limits.grammar_cache_size:
                    self._cache.popitem(last=False)
        if isinstance(result, Grammar):
            if not job.future.done():
                job.future.set_result(result)
        else:
            _fail(job.future, result)

    def _compile(
        self, probe: ProbeProcess, source: Source, seconds: float, cancelled: Callable[[], bool]
    ) -> Grammar:
        limits = GRAMMAR_STEP_LIMITS if source.is_context_free else STEP_LIMITS
        text, error = probe.compile(
            source.text(self._special),
            context_free=source.is_context_free,
            limits=limits,
            seconds=seconds,
            cancelled=cancelled,
        )
        if error:
            raise _compile_error(source, error)
        if source.reasoning is not None:
            text = source.reasoning.prepend_to(text, self._special)
        compile_matcher = functools.partial(self._compile_matcher, source, text, limits)
        return Grammar(compile_matcher, self.vocab_size, source, self._special.end_ids)

    def _compile_matcher(self, source: Source, text: str, limits: dict[str, Any]) -> LLMatcher:
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, text, limits=LLParserLimits(**limits), log_level=0)
        if not matcher.is_error():
            words = np.zeros(mask_words(self.vocab_size), np.uint32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _compile_error(source, matcher.get_error())
        return matcher

    def _read_tokenizer(self) -> None:
        with self._tokenizer_lock:
            if self._tokenizer is not None:
                return
            began = time.monotonic()
            self._tokenizer = grammar_tokenizer(self._tokenizer_of_model, self.vocab_size, self._eos_token_ids)
            logger.info("read the tokenizer for grammars in %.1f s", time.monotonic() - began)


def _compile_error(source: Source, error: str) -> RequestError:
    if "NoExtension" in error:
        error = "nothing matches it, or only infinite text (a schema that requires itself)"
    if "Current row has" in error or "Too many items" in error:
        error = "too many alternatives at one place (an enum may have 2,000 objects, an object 400 optional properties)"
    if "coerce_one_of" in error:
        error = "oneOf with branches that may overlap is not supported: write anyOf"
    return RequestError(source.parameter, source.value, f"cannot be compiled: {first_line(error)}")


def _fail(future: "Future[Grammar]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
