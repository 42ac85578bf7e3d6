"""The engine's process starts the front ends, and starts them again when they die.

The engine's process is the parent, and its main thread does nothing else. Front ends share the address that it has
bound. They are in a process group of their own, so that Ctrl-C in a terminal reaches the parent only.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

from jpaged.errors import EngineError, RequestError
from jpaged.frontend.remote.board import HostBoard
from jpaged.frontend.remote.host import FrontEndLink
from jpaged.serving.front_end import BAD_FLAGS, FrontEndSettings
from jpaged.serving.web.log_format import say
from jpaged.serving.web.process import CLOSE_SECONDS

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM
    from jpaged.cli.serve import Serve

logger = logging.getLogger("jpaged.serving")

QUICK_SECONDS = 10.0  # a front end that dies sooner has not served anything
MAX_QUICK = 3         # such deaths in a row, after which the server ends
KILL_SECONDS = 5.0    # after a front end should have ended by itself


@dataclasses.dataclass(eq=False, slots=True)
class _FrontEnd:
    """A front end's process, and the engine's ends of its sockets."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    questions: socket.socket
    began: float
    link: FrontEndLink | None = None


class FrontEnds:
    """The front ends of one engine."""

    def __init__(self, serve: "Serve", count: int, address: socket.socket, metrics_address: socket.socket | None):
        """Start them. They wait for the engine. address, metrics_address: bound."""
        self._serve = serve
        self._address, self._metrics_address = address, metrics_address
        self._running: dict[int, _FrontEnd] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="jpaged-")  # only its owner may open it
        self._board = HostBoard()
        self._keeper_path, self._keeper_address = str(pathlib.Path(self._folder.name, "keeper")), None
        if count > 1:
            self._keeper_address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._keeper_address.bind(self._keeper_path)
        self._num_quick = 0
        self._num_signals = 0
        self._is_stopping = False
        self._is_clean = True  # all front ends have ended as they should
        self._failed: EngineError | None = None
        for index in range(count):
            self._start(index)

    def run(self, engine: "AsyncLLM") -> int:
        """Serve until SIGINT or SIGTERM. Returns the exit status: 0 after a signal, 1 if the engine has ended.

        It is 1, too, if a thread of a front end did not end in time.
        """
        # As in `process.serve`. Without, a full garbage collection stops every step, and the last one, at the end of
        # the process, takes a second.
        gc.collect()
        gc.freeze()
        try:
            asyncio.run(self._run(engine))
        finally:
            self.kill()
            self._remove_address()
        engine.close()
        return 1 if self._failed is not None or not self._is_clean else 0

    def kill(self) -> None:
        """End all front ends at once."""
        for each in self._running.values():
            each.process.kill()

    async def _run(self, engine: "AsyncLLM") -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)

        def fail(error: EngineError) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        engine.when_fatal(fail)
        watched = [asyncio.create_task(self._watch(engine, index)) for index in tuple(self._running)]
        await asyncio.gather(*watched)

    async def _watch(self, engine: "AsyncLLM", index: int) -> None:
        """Connect a front end, wait for its end, and start it again, until the server stops."""
        while True:
            each = self._running[index]
            each.link = FrontEndLink(
                engine, each.channel, each.questions, partial(_end_soon, each.process), self._board
            )  # fmt: skip
            await each.link.open()
            if self._failed is not None:
                each.link.tell_fatal(self._failed)
            status = await asyncio.to_thread(each.process.wait)
            each.link.close()
            if self._is_stopping or self._failed is not None:
                self._is_clean &= status in (0, -signal.SIGTERM)
                return
            quick = time.monotonic() - each.began < QUICK_SECONDS
            self._num_quick = self._num_quick + 1 if quick else 0
            if status == BAD_FLAGS:  # it has said what is wrong
                self._fail(EngineError("no front end can be started"))
                return
            if self._num_quick >= MAX_QUICK:
                logger.critical("a front end has ended %d times at once, with status %d", MAX_QUICK, status)
                self._fail(EngineError("no front end can be started"))
                return
            logger.error("front end %d has ended (status %d): it is started again", index, status)
            self._start(index)

    def _start(self, index: int) -> None:
        channel, channel_there = socket.socketpair()
        questions, questions_there = socket.socketpair()
        is_keeper = index == 0
        metrics, keeper = (self._metrics_address, self._keeper_address) if is_keeper else (None, None)
        settings = FrontEndSettings(
            serve=self._serve, channel=channel_there.fileno(), questions=questions_there.fileno(),
            address=self._address.fileno(), metrics_address=None if metrics is None else metrics.fileno(),
            keeper_address=None if keeper is None else keeper.fileno(),
            keeper=None if is_keeper else self._keeper_path,
            announces=index == 0 and index not in self._running,
        )  # fmt: skip
        fds = [channel_there, questions_there, self._address, *(each for each in (metrics, keeper) if each is not None)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jpaged.serving.front_end"],
                stdin=subprocess.PIPE,
                pass_fds=[each.fileno() for each in fds],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"cannot start a front end: {error}") from error
        for each in (channel_there, questions_there):
            each.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # one that has ended is started again
            pickle.dump(settings, pipe)
        self._running[index] = _FrontEnd(process, channel, questions, time.monotonic())

    def _stop(self) -> None:
        """Let the front ends answer their requests, and end. A second signal ends all at once."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.kill()
            say("stopped at once by a second signal")
            os._exit(1)
        self._end_all()

    def _end_all(self) -> None:
        """Let the front ends end. One that has been stopped (SIGSTOP) does not end by itself."""
        self._is_stopping = True
        seconds = self._serve.shutdown_timeout + CLOSE_SECONDS + KILL_SECONDS
        asyncio.get_running_loop().call_later(seconds, self.kill)
        self._address.close()  # new clients are refused
        for each in self._running.values():
            each.process.terminate()

    def _fail(self, error: EngineError) -> None:
        """The engine has ended by itself: tell the front ends, which tell their clients, and end."""
        if self._failed is None:
            self._failed = error
            for each in self._running.values():
                if each.link is not None:
                    each.link.tell_fatal(error)
            self._end_all()

    def _remove_address(self) -> None:
        self._folder.cleanup()
        path = self._serve.uds
        if path is not None:
            pathlib.Path(path).unlink(missing_ok=True)


def _end_soon(process: subprocess.Popen[bytes]) -> None:
    """End a front end that has lost its connection, and that does not end by itself."""
    asyncio.get_running_loop().call_later(KILL_SECONDS, process.kill)


def checked_count(count: int) -> int:
    """Return the number of front ends. Raises RequestError for less than 1; warns of more than processors."""
    if count < 1:
        raise RequestError("api_server_count", count, "must be at least 1: leave it out for one process")
    cores = os.cpu_count() or 1
    if count > cores:
        logger.warning("--api-server-count %d is more than the %d processors of this machine", count, cores)
    return count
