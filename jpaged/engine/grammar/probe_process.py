"""The child process in which a grammar is compiled first: it is killed when a compile takes too long."""

import json
import logging
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

import llguidance

from jpaged.errors import EngineError

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("probe.py")
_START_SECONDS = 60.0  # importing takes 0.3 s; a machine that starts up is slow


class ProbeTimeout(Exception):
    """A compile took too long, and its process has been killed."""


class ProbeProcess:
    """Compiles grammars in a process of its own, started when it is needed. One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def compile(
        self, grammar: str, *, context_free: bool, limits: dict[str, Any], seconds: float
    ) -> tuple[str, str]:
        """(the grammar as the compiler reads it, why it cannot be compiled or "").

        context_free: it is Lark or GBNF as the request wrote it. limits: of LLParserLimits.

        Raises ProbeTimeout after `seconds`, EngineError when no process can be started.
        """
        asked = {"grammar": grammar, "context_free": context_free, "limits": limits, "seconds": seconds}
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._line(process, seconds))
        except TimeoutError:  # an OSError too, so it comes first
            self.close()
            raise ProbeTimeout from None
        except (OSError, EOFError):
            self.close()
            return grammar, "it needs too much memory or too deep a stack"
        return answer["grammar"], answer["error"]

    def close(self) -> None:
        """Kill the process; another is started when it is needed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # The package may lie where only this process's path finds it.
        command = [sys.executable, str(_PROGRAM)]
        path = os.pathsep.join(filter(None, [str(Path(llguidance.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the process that waits for this one
            )
            self._line(process, _START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise EngineError(f"{_PROGRAM.name}, which compiles grammars, cannot be started: {error!r}") from error
        return process

    @staticmethod
    def _line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
        """Raises TimeoutError, or EOFError when the process has ended."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line
