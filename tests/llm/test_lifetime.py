"""An engine ends with its owner and with the interpreter, and cannot be used in a forked process."""

import contextlib
import gc
import os
import subprocess
import sys
import threading

import pytest

from jpaged.errors import EngineError
from jpaged.lifetime import (
    OwnProcess,
    _at_exit,
    _DeviceUsers,
    call_at_exit,
    close_when_collected,
    not_using_device,
    stop_if_ending,
    using_device,
)

BEGIN = """
import asyncio, os, sys, threading, time
import jpaged
GREEDY = jpaged.SamplingParams(max_tokens=4, temperature=0)
ENDLESS = jpaged.SamplingParams(max_tokens=None, ignore_eos=True)
def make(kind=jpaged.LLM):
    return kind("demo", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
"""
ASYNC = """
llm = make(jpaged.AsyncLLM)
async def first():
    async for output in llm.generate("x = ", ENDLESS):
        return
asyncio.run(first())
"""
DAEMON = """
llm = make()
threading.Thread(target=llm.generate, args=(["x = "] * 50, ENDLESS), daemon=True).start()
while not llm.stats().steps:
    time.sleep(0.01)
"""
BUILDING = """
from jpaged.runtime.compile.program_table import ProgramTable
began, compile = threading.Event(), ProgramTable.compile
def compiling(*args, **options):
    began.set()
    return compile(*args, **options)
ProgramTable.compile = compiling
threading.Thread(target=make, daemon=True).start()
began.wait()
"""
LOCAL = """
def main():
    llm = make()
    llm.generate("x = ", GREEDY, use_tqdm=False)
    sys.exit(3)
main()
"""
# The threads that compile in the background are inside XLA most of the time: they end with the last reference.
DELETED = """
llm = make()
llm.generate("x = ", GREEDY, use_tqdm=False)
del llm
assert not [thread for thread in threading.enumerate() if thread.name.startswith("jpaged")], threading.enumerate()
"""
FORKED = """
import multiprocessing
def child():
    try:
        llm.generate("x = ", GREEDY)
    except jpaged.EngineError as error:
        sys.exit(5 if "spawn" in str(error) else 6)
llm = make()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
llm.generate("x = ", GREEDY, use_tqdm=False)
sys.exit(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "status"), [
    pytest.param(ASYNC, 0, id="AsyncLLM"),
    pytest.param(DAEMON, 0, id="a call in a daemon thread"),
    pytest.param(BUILDING, 0, id="an engine made in a daemon thread"),
    pytest.param(LOCAL, 3, id="collected, then sys.exit(3)"),
    pytest.param(DELETED, 0, id="deleted"),
    pytest.param(FORKED, 5, id="forked"),
])  # fmt: skip
def test_a_script_that_does_not_close_its_engine_has_its_own_status(script: str, status: int):
    """A thread inside XLA at the interpreter's end would abort the process, with status 134."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", BEGIN + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert (done.returncode, "FATAL" in done.stderr) == (status, False), done.stderr
    assert "Traceback" not in done.stderr


class Owner:
    pass


def test_engines_end_before_finalizers_run():
    """JAX has a finalizer for each constant that a thread traces. The trace fails with a KeyError once it has run."""
    script = """
import weakref
from jpaged.lifetime import call_at_exit
class Engine:
    def close(self):
        print("closed")
engine = Engine()
forget = call_at_exit(engine.close)
weakref.finalize(engine, print, "finalized")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["closed", "finalized"]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_close_is_called_when_the_owner_is_collected(in_a_cycle: bool):
    owner, closed = Owner(), []
    close_when_collected(owner, lambda: closed.append(threading.current_thread().name))
    if in_a_cycle:
        owner.itself = owner  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert closed == ["jpaged-close"]


def test_close_is_not_called_twice():
    owner, closed = Owner(), []
    close_when_collected(owner, lambda: closed.append(0)).detach()
    del owner
    assert not closed


def test_a_collection_inside_a_lock_that_close_needs_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.lifetime.CLOSE_SECONDS", 0.05)
    owner, lock, closed = Owner(), threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    close_when_collected(owner, close)
    with lock:
        del owner
        assert not closed.is_set()
    assert closed.wait(10)


def test_a_forked_process_closes_nothing_and_gets_an_error(monkeypatch: pytest.MonkeyPatch):
    owner, closed, made_in = Owner(), [], OwnProcess()
    made_in.check()
    close_when_collected(owner, lambda: closed.append(0))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del owner
    assert not closed
    with pytest.raises(EngineError, match=r"this process was forked.*get_context\(\"spawn\"\)"):
        made_in.check()


def test_the_interpreter_waits_for_threads_that_use_the_device_and_ends_them(monkeypatch: pytest.MonkeyPatch):
    users = _DeviceUsers()
    monkeypatch.setattr("jpaged.lifetime._users", users)
    inside, go_on, order = threading.Event(), threading.Event(), []

    def use() -> None:
        with contextlib.suppress(SystemExit), using_device(), using_device():
            inside.set()
            go_on.wait(10)
            order.append("used")
            stop_if_ending()
            order.append("not reached")

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    inside.wait(10)
    ends = threading.Thread(target=lambda: (users.wait_for_end(), order.append("ended")))
    ends.start()
    ends.join(0.05)
    assert ends.is_alive()
    go_on.set()
    ends.join(10)
    thread.join(10)
    assert order == ["used", "ended"]
    with pytest.raises(SystemExit), using_device():
        raise AssertionError("not reached")


def test_an_engine_that_is_made_while_the_interpreter_ends_ends_too(monkeypatch: pytest.MonkeyPatch):
    """`atexit` does not call a hook that is registered while it calls the others."""
    users, closed, inside, ending = _DeviceUsers(), [], threading.Event(), threading.Event()
    monkeypatch.setattr("jpaged.lifetime._users", users)
    monkeypatch.setattr("jpaged.lifetime._hooks", {})

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name
            self.forget = call_at_exit(self.close)

        def close(self) -> None:
            closed.append(self.name)
            ending.set()

    def use() -> None:
        with contextlib.suppress(SystemExit), using_device():
            inside.set()
            ending.wait(10)
            made.append(Engine("late"))

    made = [Engine("first"), Engine("second"), Engine("closed before")]
    made.pop().forget()
    Engine("collected")
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    inside.wait(10)
    _at_exit()
    assert closed == ["second", "first", "late"]


def test_the_interpreter_does_not_wait_for_a_network(monkeypatch: pytest.MonkeyPatch):
    users = _DeviceUsers()
    monkeypatch.setattr("jpaged.lifetime._users", users)
    with contextlib.suppress(SystemExit), using_device(), not_using_device():
        ends = threading.Thread(target=users.wait_for_end)
        ends.start()
        ends.join(10)
    assert not ends.is_alive()
