"""Compiles grammars beside the engine's loop, and keeps the last ones.

A compile is tried in a child process first, which is killed when its time is over (`probe.py` says why), and then done
here. Two lanes: what takes longer than QUICK_SECONDS starts again in the slow one, so that usual grammars (a medium
schema takes 4 ms) never wait behind hostile ones. At most two children, both with low priority.
"""

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jpaged.engine.grammar.limits import GRAMMAR_STEP_LIMITS, STEP_LIMITS, GrammarLimits
from jpaged.engine.grammar.matcher import GrammarMatcher, first_line
from jpaged.engine.grammar.probe_process import ProbeProcess, ProbeTimeout
from jpaged.engine.grammar.reasoning_prefix import ReasoningPrefix
from jpaged.engine.grammar.translate import Source
from jpaged.engine.grammar.vocabulary import grammar_tokenizer
from jpaged.engine.step_plan import mask_words
from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

QUICK_SECONDS = 0.5
RENEW_SECONDS = 0.1  # what takes longer to compile is not compiled in the engine's thread, where all requests wait
MAX_SLOW = 8  # compiles that wait in the slow lane

_Key = tuple[StructuredOutputsParams, ReasoningPrefix | None]


class Grammar:
    """A compiled grammar, shared by all requests that ask for the same."""

    def __init__(self, make: Callable[[], LLMatcher], vocab_size: int, source: Source):
        """make: compiles it. Raises RequestError where that fails."""
        self._make, self._vocab_size, self._source = make, vocab_size, source
        began = time.monotonic()
        self._matcher = make()
        self._seconds = time.monotonic() - began
        self._generation = 0

    def matcher(self) -> GrammarMatcher:
        """For one answer, at its beginning. A copy takes 42 us, and begins with what others have computed."""
        parameter, value = self._source.parameter, self._source.value
        copied = self._matcher.deep_copy()
        return GrammarMatcher(copied, self._vocab_size, parameter, value, self._renewed, self._generation)

    @property
    def is_stale(self) -> bool:
        """Whether those who ask for it from now on need it compiled anew."""
        return self._generation < 0

    def _renewed(self, generation: int) -> tuple[LLMatcher, int] | None:
        """For an answer whose matcher of this generation has failed. Called by the engine's thread only."""
        if generation == self._generation:
            if self._seconds > RENEW_SECONDS:
                self._generation = -1
            else:
                self._matcher = self._make()
                self._generation += 1
        return None if self._generation < 0 else (self._matcher.deep_copy(), self._generation)


class _Lane:
    """One worker thread with its child process."""

    def __init__(self, name: str):
        self.probe = ProbeProcess()
        self.executor = ThreadPoolExecutor(1, f"jpaged-grammar-{name}")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        # A thread of its own kills the child: another may be reading from it, and then meets its end.
        process = self.probe._process
        if process is not None:
            process.kill()


class GrammarCompiler:
    """Compiles what requests ask for. `submit` may be called from any thread."""

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
        self._special_ids: dict[str, int] = {}
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[_Key, Grammar] = collections.OrderedDict()
        self._under_way: dict[_Key, Future[Grammar]] = {}
        self._lanes: dict[str, _Lane] = {}
        self._num_slow = 0
        self._closed = False

    def submit(self, params: StructuredOutputsParams, reasoning: ReasoningPrefix | None = None) -> "Future[Grammar]":
        """Begin to compile, unless it is known or under way. Returns at once. thought: what may stand before it.

        Raises RequestError, within 50 ms, for what is beyond the limits or not supported. The future's exception is a
        RequestError for what shows in compiling, also when it takes longer than grammar_compile_timeout, or a
        CapacityError when too many slow ones wait. Nobody may cancel it: others can wait for the same.
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
            if key in self._under_way:
                return self._under_way[key]
        source = Source(params, self.limits, reasoning)
        with self._lock:
            if key in self._under_way:
                return self._under_way[key]
            future: Future[Grammar] = Future()
            future.set_running_or_notify_cancel()
            self._under_way[key] = future
            self._start("quick", key, source, future)
        return future

    def warm_up(self) -> "Future[None]":
        """Begin to read the tokenizer, which the first compile would otherwise do.

        It holds Python's lock for most of its time (2.5 of 3.5 s for 150,000 tokens): a server, whose streams would
        stand still meanwhile, does it before it is ready. The future's exception says why there can be no grammars.
        """
        with self._lock:
            lane = self._lane("quick")
        return lane.executor.submit(self._read_tokenizer)

    def close(self) -> None:
        """End all workers. Compiles under way fail with EngineError."""
        with self._lock:
            self._closed = True
            under_way, self._under_way = self._under_way, {}
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        for future in under_way.values():
            _fail(future, EngineError("the engine is closed"))

    # -- in the workers ------------------------------------------------------------------------------------------

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            self._lanes[name] = _Lane(name)
        return self._lanes[name]

    def _start(self, name: str, key: _Key, source: Source, future: "Future[Grammar]") -> None:
        lane = self._lane(name)
        lane.executor.submit(self._work, lane, name == "quick", key, source, future)

    def _work(
        self, lane: _Lane, quick: bool, key: _Key, source: Source, future: "Future[Grammar]"
    ) -> None:
        # Half of the time is the probe's: what it has compiled is compiled again here, in about the same time.
        allowed = self.limits.grammar_compile_timeout / 2
        try:
            self._read_tokenizer()
            seconds = min(QUICK_SECONDS, allowed) if quick else allowed
            grammar = self._compile(lane.probe, source, seconds)
        except ProbeTimeout:
            if quick and allowed > QUICK_SECONDS:
                self._go_on_slowly(key, source, future)
                return
            limit = self.limits.grammar_compile_timeout
            accepted = f"takes too long to compile within {limit:g} s (grammar_compile_timeout): make it simpler"
            error: Exception = RequestError(source.parameter, source.value, accepted)
            self._end(key, future, quick, error)
        except Exception as cause:
            self._end(key, future, quick, cause)
        except BaseException as cause:  # a panic of the compiler: the request that waits for it must hear of it
            self._end(key, future, quick, EngineError(f"compiling a grammar failed: {cause!r}"))
        else:
            self._end(key, future, quick, grammar)

    def _go_on_slowly(self, key: _Key, source: Source, future: "Future[Grammar]") -> None:
        with self._lock:
            full = self._num_slow >= MAX_SLOW
            if not full and not self._closed:
                self._num_slow += 1
                self._start("slow", key, source, future)
        if full:
            seconds = self.limits.grammar_compile_timeout
            self._end(key, future, True, CapacityError("too many grammars that take long to compile", seconds))

    def _end(
        self, key: _Key, future: "Future[Grammar]", quick: bool, result: Grammar | Exception
    ) -> None:
        with self._lock:
            self._num_slow -= not quick
            self._under_way.pop(key, None)
            if isinstance(result, Grammar):
                self._cache[key] = result
                while len(self._cache) > self.limits.grammar_cache_size:
                    self._cache.popitem(last=False)
        if isinstance(result, Grammar):
            if not future.done():
                future.set_result(result)
        else:
            _fail(future, result)

    def _compile(self, probe: ProbeProcess, source: Source, seconds: float) -> Grammar:
        limits = GRAMMAR_STEP_LIMITS if source.is_context_free else STEP_LIMITS
        text, error = probe.compile(
            source.text(), context_free=source.is_context_free, limits=limits, seconds=seconds
        )
        if error:
            raise _not_compiled(source, error)
        if not source.is_context_free:
            text = source.text(self._special_ids.get)
        if source.reasoning is not None:
            text = source.reasoning.prepend_to(text, self._special_ids.get)
        return Grammar(functools.partial(self._make, source, text, limits), self.vocab_size, source)

    def _make(self, source: Source, text: str, limits: dict[str, Any]) -> LLMatcher:
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, text, limits=LLParserLimits(**limits), log_level=0)
        if not matcher.is_error():
            words = np.zeros(mask_words(self.vocab_size), np.uint32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _not_compiled(source, matcher.get_error())
        return matcher

    def _read_tokenizer(self) -> None:
        with self._tokenizer_lock:
            if self._tokenizer is not None:
                return
            began = time.monotonic()
            self._tokenizer = grammar_tokenizer(self._tokenizer_of_model, self.vocab_size, self._eos_token_ids)
            added = self._tokenizer_of_model.backend_tokenizer.get_added_tokens_decoder()
            self._special_ids = {
                token.content: token_id
                for token_id, token in added.items()
                if token.special and token_id < self.vocab_size
            }
            logger.info("read the tokenizer for grammars in %.1f s", time.monotonic() - began)


def _not_compiled(source: Source, error: str) -> RequestError:
    if "NoExtension" in error:
        error = "nothing matches it, or only what never ends (a reference to itself)"
    if "coerce_one_of" in error:
        error = "oneOf whose branches may overlap is not supported: write anyOf"
    return RequestError(source.parameter, source.value, f"cannot be compiled: {first_line(error)}")


def _fail(future: "Future[Grammar]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
