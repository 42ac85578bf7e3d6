"""Hostile grammars: beyond the limits they raise before anything runs, within the limits they end in time."""

import concurrent.futures
import json
import re
import signal
import threading
import time

import pytest

from jpaged.child_process import ChildProcess
from jpaged.config import EngineConfig
from jpaged.engine.grammar import GrammarCompiler, GrammarLimits
from jpaged.engine.grammar.compiler import MAX_SLOW
from jpaged.engine.grammar.queue import Job, JobQueue
from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.requester import Requester
from tests.structured import corpus, sampling
from tests.structured.grammar_model import SECONDS, Model
from tests.support.hostile_grammars import ENDLESS, HEAVY, NOT_COMPILED, REFUSED, nested


def small_compiler(**limits: float) -> tuple[GrammarCompiler, sampling.Tokenizer]:
    """Return a compiler for a small byte-level tokenizer."""
    backend = sampling.byte_level()
    return GrammarCompiler(sampling.Wrapped(backend), 600, (0,), GrammarLimits(**limits)), backend  # ty: ignore


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_beyond_the_limits_raises(demo: Model, name: str):
    fields, why = REFUSED[name]
    params = StructuredOutputsParams(**fields)
    with pytest.raises(RequestError, match=why) as caught:
        demo.compiler.submit(params)
    assert caught.value.parameter.startswith("structured_outputs.")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("keyword", corpus.REFUSED)
def test_keywords_that_cannot_be_enforced_raise(demo: Model, keyword: str):
    for schema in (corpus.REFUSED[keyword], corpus.obj({"inside": corpus.arr(corpus.REFUSED[keyword])})):
        with pytest.raises(RequestError) as caught:
            demo.compiler.submit(StructuredOutputsParams(json=schema))
        assert keyword in caught.value.value


def test_a_property_may_have_the_name_of_a_refused_keyword(demo: Model):
    named = corpus.obj(dict.fromkeys(corpus.REFUSED, corpus.N)) | {"default": {"not": 1}, "const": None}
    del named["const"]
    demo.matcher(json=named)
    demo.matcher(json={"enum": [{"uniqueItems": True}, {"$ref": "https://example.com"}]})
    demo.matcher(json={"type": "array", "uniqueItems": False})


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_a_grammar_that_cannot_be_compiled_raises(demo: Model, name: str):
    fields, why = NOT_COMPILED[name]
    future = demo.compiler.submit(StructuredOutputsParams(**fields))
    if why is None:
        future.result(SECONDS)  # it compiles, and an answer ends at max_tokens
        return
    with pytest.raises(RequestError, match=why) as caught:
        future.result(SECONDS)
    assert "\n" not in caught.value.accepted
    assert "cannot be compiled" in caught.value.accepted


@pytest.mark.parametrize("name", HEAVY)
def test_an_expensive_grammar_ends(demo: Model, name: str):
    """The answer finishes, reaches max_tokens, or ends with an error."""
    for seed in range(1 if name == "1,200 optional properties" else 2):
        try:
            demo.write(demo.matcher(**HEAVY[name]), seed, strength=-2.0, max_tokens=64)
        except RequestError as caught:
            error = caught
        else:
            continue
        assert re.match(r"cannot continue after \d+ tokens: .|cannot be compiled: .*(limit|too many)", error.accepted)
        assert "\n" not in error.accepted


@pytest.mark.slow
def test_endless_compiles_end_and_do_not_delay_other_requests():
    """Each endless compile ends with its own error, and an ordinary grammar is ready before them."""
    compiler, _ = small_compiler(grammar_compile_timeout=3.0)
    try:
        compiler.submit(StructuredOutputsParams(regex="warm")).result(SECONDS)
        futures = [compiler.submit(StructuredOutputsParams(json=schema)) for schema in ENDLESS.values()]
        again = compiler.submit(StructuredOutputsParams(json=ENDLESS["multiples"]))
        assert again in futures  # the same grammar is compiled once
        usual = compiler.submit(StructuredOutputsParams(json=corpus.EVERYDAY[0]))
        usual.result(SECONDS)
        assert not all(future.done() for future in futures)
        for future in futures:
            with pytest.raises(RequestError, match="grammar_compile_timeout"):
                future.result(SECONDS)
        compiler.submit(StructuredOutputsParams(regex="still [a-z]+")).result(SECONDS)
    finally:
        compiler.close()


def endless(number: int) -> StructuredOutputsParams:
    """One of many different schemas that do not end to compile."""
    return StructuredOutputsParams(json=ENDLESS["multiples"] | {"title": f"{number}"})


def test_grammars_of_requests_that_have_left_are_dropped():
    """Also the one that compiles. A second request for the same grammar keeps it."""
    compiler, _ = small_compiler(grammar_compile_timeout=100.0)
    try:
        left = threading.Event()
        leaving = [compiler.submit(endless(i), requester=Requester("a", left.is_set)) for i in range(20)]
        staying = compiler.submit(endless(7), requester=Requester("b"))
        assert staying is leaving[7]
        left.set()
        compiler.submit(StructuredOutputsParams(regex="[a-z]+"), requester=Requester("c")).result(SECONDS)
        for number, future in enumerate(leaving):
            if number != 7:
                with pytest.raises(EngineError, match="no request waits"):
                    future.result(SECONDS)
        assert not staying.done()
        again = compiler.submit(endless(3))
        assert again is not leaving[3]
    finally:
        compiler.close()


def test_clients_take_turns():
    def job(client: str, number: int) -> Job:
        return Job((client, number), None, concurrent.futures.Future(), [Requester(client)])  # ty: ignore

    queue = JobQueue()
    for number in range(6):
        queue.put(job("a", number))
    queue.put(job("b", 0))
    queue.put(job("c", 0))
    queue.put(job("b", 1))
    assert [queue.take().key for _ in range(4)] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert queue.remove_surplus("a") is None  # it has the most itself
    assert queue.remove_surplus("c").key == ("a", 5)
    assert [queue.take().key for _ in range(len(queue))] == [("b", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert queue.take() is None


def test_a_client_that_fills_the_slow_queue_makes_room_for_another(monkeypatch):
    monkeypatch.setattr("jpaged.engine.grammar.compiler.QUICK_SECONDS", 0.01)
    compiler, _ = small_compiler(grammar_compile_timeout=100.0)
    busy = threading.Event()
    try:
        lane = compiler._lane("slow")
        lane.executor.submit(busy.wait)
        filling = [compiler.submit(endless(i), requester=Requester("a")) for i in range(MAX_SLOW)]
        while len(lane.queue) < MAX_SLOW:
            time.sleep(0.01)
        with pytest.raises(CapacityError, match="slow to compile"):
            compiler.submit(endless(100), requester=Requester("a")).result(SECONDS)
        other = compiler.submit(endless(101), requester=Requester("b"))
        with pytest.raises(CapacityError, match="slow to compile"):
            filling[-1].result(SECONDS)
        assert not other.done()
    finally:
        compiler.close()
        busy.set()


def children(compiler: GrammarCompiler) -> dict[str, ChildProcess | None]:
    """The child processes of a compiler, by lane."""
    return {name: lane.probe._process for name, lane in compiler._lanes.items()}


def test_close_ends_unfinished_compiles():
    compiler, _ = small_compiler(grammar_compile_timeout=100.0)
    compiler.submit(StructuredOutputsParams(regex="warm")).result(SECONDS)
    future = compiler.submit(StructuredOutputsParams(json=ENDLESS["patterns"]))
    processes = children(compiler).values()
    compiler.close()
    with pytest.raises(EngineError, match="closed"):
        future.result(SECONDS)
    with pytest.raises(EngineError, match="closed"):
        compiler.submit(StructuredOutputsParams(regex="a"))
    deadline = time.monotonic() + SECONDS
    while any(process is not None and process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_that_dies_is_replaced():
    compiler, _ = small_compiler()
    try:
        compiler.submit(StructuredOutputsParams(regex="warm")).result(SECONDS)
        process = children(compiler)["quick"]
        assert process is not None
        process.kill()
        process.wait()
        compiler.submit(StructuredOutputsParams(regex="after")).result(SECONDS)
        assert children(compiler)["quick"] is not process
    finally:
        compiler.close()


def test_a_compile_whose_child_is_killed_is_repeated_once():
    compiler, _ = small_compiler()
    try:
        compiler.submit(StructuredOutputsParams(regex="warm")).result(SECONDS)
        for times in (1, 2):
            process = children(compiler)["quick"]
            assert process is not None
            process.send_signal(signal.SIGSTOP)  # it does not answer
            future = compiler.submit(StructuredOutputsParams(regex="again" * times))
            time.sleep(0.05)  # until the request is sent
            process.kill()
            if times == 1:
                future.result(SECONDS)
                assert children(compiler)["quick"] is not process
                continue
            while (other := children(compiler)["quick"]) in (None, process):
                time.sleep(0.001)
            other.kill()
            with pytest.raises(CapacityError, match="killed"):
                future.result(SECONDS)
        compiler.submit(StructuredOutputsParams(regex="after")).result(SECONDS)
    finally:
        compiler.close()


def test_compiled_grammars_are_shared_and_the_cache_is_bounded():
    compiler, _ = small_compiler(grammar_cache_size=2)
    try:
        first = compiler.submit(StructuredOutputsParams(json={"type": "integer"})).result(SECONDS)
        assert compiler.submit(StructuredOutputsParams(json='{"type":"integer"}')).result(0) is first
        evicted = compiler.submit(StructuredOutputsParams(regex="b")).result(SECONDS)
        assert compiler.submit(StructuredOutputsParams(json={"type": "integer"})).result(0) is first
        compiler.submit(StructuredOutputsParams(regex="c")).result(SECONDS)  # evicts b
        assert compiler.submit(StructuredOutputsParams(json={"type": "integer"})).result(0) is first
        one, other = first.matcher(), first.matcher()
        assert one.accept(next(i for i in range(600) if first.matcher().accept(i)))
        assert (len(one), len(other), len(first.matcher())) == (1, 0, 0)
        assert compiler.submit(StructuredOutputsParams(regex="b")).result(SECONDS) is not evicted
    finally:
        compiler.close()


def test_many_threads_may_submit():
    compiler, _ = small_compiler()
    params = [StructuredOutputsParams(regex=f"a{{{i % 5 + 1}}}") for i in range(40)]
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            grammars = list(pool.map(lambda one: compiler.submit(one).result(SECONDS), params))
        assert len(set(map(id, grammars))) == 5
    finally:
        compiler.close()


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_a_model_without_a_fast_tokenizer_raises(tokenizer: object):
    compiler = GrammarCompiler(tokenizer, 100, (0,))
    try:
        with pytest.raises(RequestError, match="fast tokenizer"):
            compiler.submit(StructuredOutputsParams(regex="a")).result(SECONDS)
    finally:
        compiler.close()


def test_limits_come_from_the_engine_options():
    config = EngineConfig(model="demo", max_grammar_depth=7, grammar_compile_timeout=1.5)
    assert GrammarLimits.from_options(config) == GrammarLimits(max_grammar_depth=7, grammar_compile_timeout=1.5)
    assert GrammarLimits.from_options(EngineConfig(model="demo")) == GrammarLimits()
    for name, value in (("max_grammar_bytes", 0), ("max_regex_bytes", 1.5), ("grammar_compile_timeout", float("nan"))):
        with pytest.raises(RequestError) as caught:
            GrammarLimits(**{name: value})
        assert caught.value.parameter == name


def test_smaller_limits_are_enforced():
    compiler, _ = small_compiler(max_grammar_bytes=100, max_grammar_depth=2, max_grammar_enum=3, max_regex_bytes=10)
    try:
        for fields in (
            {"json": nested(3)}, {"json": {"enum": [1, 2, 3, 4]}}, {"regex": "a" * 11}, {"choice": list("abcd")},
            {"grammar": "start: /a/ // " + "a" * 100}, {"json": json.dumps({"title": "a" * 100})},
        ):  # fmt: skip
            with pytest.raises(RequestError):
                compiler.submit(StructuredOutputsParams(**fields))
    finally:
        compiler.close()
