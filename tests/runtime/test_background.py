"""Programs compiled while the engine runs: answers are the same, nothing outlives the engine, failures are reported."""

import json
import os
import pathlib
import sys
import threading
import time

import jax
import pytest

from jpaged import SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import EngineError
from jpaged.runtime.compile import background, program_table
from jpaged.runtime.compile.background import THREAD_NAME
from jpaged.runtime.compile.program_table import Program, ProgramTable
from jpaged.runtime.compile.worker import CompileWorker
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step.output_programs import SampleShape, ScoreShape
from tests.runtime.plans import make_plan, shapes_of
from tests.support.tiny_engine import SPECS, bits, make_engine, make_runner, run

NOTHING = jax.jit(lambda: 0).lower().compile()
REQUESTS = [
    ([3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(max_tokens=8, temperature=0)),
    ([2, 7, 1, 8, 2, 8], SamplingParams(max_tokens=8, temperature=0.9, seed=3, logprobs=2, presence_penalty=0.5)),
    ([1, 4, 1, 4, 2], SamplingParams(max_tokens=8, temperature=0.7, seed=4, prompt_logprobs=1)),
]


def threads():
    """Threads of background compilers."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def children():
    """Process ids of compile workers of this process."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"compile.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def table_with(*first, **options):
    """A table in which only some programs exist, and a function that adds one."""
    shapes = shapes_of(32, 512, **options)
    chosen = [shape for shape in shapes if str(shape) in first]
    assert len(chosen) == len(first)
    missing = [shape for shape in shapes if shape not in chosen]
    return ProgramTable.compile(chosen, lambda shape: NOTHING, progress=False, missing=missing)


def test_a_larger_program_stands_in_for_a_missing_one():
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    assert str(table.forward(make_plan(3, 0)).shape) == "decode 32 rows"
    assert str(table.forward(make_plan(3, 10)).shape) == "mixed 512 tokens"
    assert str(table.sampler(2, SamplerVariant.GREEDY).shape) == "sample greedy 32 rows"
    for shape in table.missing:
        table.add(Program(shape, NOTHING, 0.0, 0))
    assert str(table.forward(make_plan(3, 0)).shape) == "decode 8 rows"
    assert str(table.forward(make_plan(3, 10)).shape) == "mixed 32 tokens"
    assert str(table.sampler(2, SamplerVariant.GREEDY).shape) == "sample greedy 8 rows"
    assert not table.missing
    table.wait_for_all()


def test_a_step_waits_for_the_first_program_of_a_kind():
    """It is compiled next, and no other kind is."""
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    assert not table.await_kind(SamplerVariant.RANDOM.name)
    assert table.await_kind(SamplerVariant.GREEDY.name)
    awaited = {str(shape) for shape in table.missing if table.is_awaited(shape)}
    assert awaited == {f"sample random {rows} rows" for rows in (8, 16, 24, 32)} & {str(s) for s in table.missing}
    found = []
    thread = threading.Thread(target=lambda: found.append(table.sampler(9, SamplerVariant.RANDOM)))
    thread.start()
    table.add(Program(ScoreShape(32), NOTHING, 0.0, 0))
    table.add(Program(SampleShape(8, SamplerVariant.RANDOM), NOTHING, 0.0, 0))  # too small
    time.sleep(0.05)
    assert not found
    table.add(Program(SampleShape(32, SamplerVariant.RANDOM), NOTHING, 0.0, 0))
    thread.join(10)
    assert found[0].shape.rows == 32


def test_a_long_wait_for_a_program_is_told_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(program_table, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    thread = threading.Thread(target=lambda: table.sampler(9, SamplerVariant.RANDOM))
    thread.start()
    time.sleep(0.05)
    table.add(Program(SampleShape(32, SamplerVariant.RANDOM), NOTHING, 0.0, 0))
    thread.join(10)
    assert capsys.readouterr().err == "jpaged: a request waits for a program that is being compiled (random)\n"


def test_waiting_for_all_programs_has_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr(program_table, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    missing, total = list(table.missing), len(table.missing)
    thread = threading.Thread(target=table.wait_for_all)
    thread.start()
    while thread.is_alive() and table.missing:
        time.sleep(0.05)
        table.add(Program(missing.pop(), NOTHING, 0.0, 0))
    thread.join(10)
    shown = capsys.readouterr().err
    assert "Compiling" in shown
    assert f"/{total}" in shown


def test_a_failure_reaches_who_waits():
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    table.fail(ValueError("no memory"))
    for wait in (table.wait_for_all, table.score, lambda: table.sampler(1, SamplerVariant.FULL)):
        with pytest.raises(EngineError, match="no memory"):
            wait()
    table.forward(make_plan(3, 0))  # what exists still runs


def test_programs_that_every_request_may_need_come_first():
    table = table_with("decode 32 rows", "mixed 512 tokens", "sample greedy 32 rows")
    order = [str(shape) for shape in background.in_order(table.missing)]
    assert sorted(order) == sorted(map(str, table.missing))
    kinds = {"sample random 32 rows", "sample full 32 rows", "score 32 tokens"}
    assert kinds < set(order[:5])


def answers(runner):
    """Bits of the answers, without a check of the state: it compiles programs."""
    outputs = run(make_engine(runner), REQUESTS, check=False)
    return [bits(outputs[str(number)]) for number in range(len(REQUESTS))]


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.usefixtures("own_programs")
def test_answers_do_not_depend_on_which_programs_exist(tmp_path):
    """Requests start with three programs, and the others come while they run. The cold start uses child processes."""
    options = {"row_buckets": (8, 32), "token_buckets": (16, 64), "swap_space": 0}
    runner = make_runner(SPECS["full"], **options)
    expected = answers(runner)
    count = len(runner.programs.programs)
    runner.close()
    for start in ("cold", "warm"):
        jax.clear_caches()
        runner = make_background_runner(**options, compilation_cache_dir=str(tmp_path))
        assert not runner.is_ready
        assert len(runner.programs.programs) < count
        assert answers(runner) == expected, start
        runner.wait_until_ready()
        assert runner.is_ready
        assert len(runner.programs.programs) == count
        assert runner.memory_plan.temp_bytes > 0
        assert answers(runner) == expected, start
        assert runner.compiles_after_ready == 0
        runner.close()
        assert not threads()
        assert not children()


def make_background_runner(**options):
    """A tiny runner whose programs are compiled in the background."""
    create = ModelRunner.create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "create", lambda *args, **named: create(*args, **named, background=True))
        return make_runner(SPECS["full"], **options)


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_close_ends_a_compile_at_once(tmp_path, monkeypatch):
    """A worker that never answers is killed, and the thread compiles nothing itself."""
    reached = threading.Event()
    os.mkfifo(tmp_path / "fifo")
    ask = CompileWorker.ask

    def stuck(self, *request, seconds):
        self._running()
        reached.set()
        return ask(self, json.dumps({"path": str(tmp_path / "fifo"), "donate": []}).encode() + b"\n", seconds=600)

    monkeypatch.setattr(CompileWorker, "ask", stuck)
    runner = make_background_runner(compilation_cache_dir=str(tmp_path), swap_space=0)
    assert reached.wait(60)
    assert children()
    compiles = []
    monkeypatch.setattr(background, "compiled", lambda *_: compiles.append(1))
    start = time.monotonic()
    runner.close()
    assert time.monotonic() - start < 2
    assert not threads()
    assert not children()
    assert not compiles
    with pytest.raises(EngineError, match="closed"):
        runner.wait_until_ready()


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_without_child_processes_the_engine_compiles(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    runner = make_background_runner(compilation_cache_dir=str(tmp_path), swap_space=0)
    runner.wait_until_ready()
    runner.close()
    assert caplog.text.count("its child process failed") == 1
