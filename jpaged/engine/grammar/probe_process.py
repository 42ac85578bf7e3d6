"""Runs `probe.py` as a child process, and kills it when a compile takes too long."""

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
_START_SECONDS = 60.0  # importing takes 0.3 s, but much longer on a machine that has just started


class ProbeTimeout(Exception):
    """The compile took too long, and the child process was killed."""


class ProbeProcess:
    """Compiles grammars in a child process, which starts on first use. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def compile(
        self, grammar: str, *, context_free: bool, limits: dict[str, Any], seconds: float
    ) -> tuple[str, str]:
        """Compile a grammar. Returns (the grammar in llguidance's form, the error or "").

        context_free: `grammar` is Lark or GBNF from the request. limits: fields of LLParserLimits.

        Raises ProbeTimeout after `seconds`, EngineError if no process can be started.
        """
        asked = {"grammar": grammar, "context_free": context_free, "limits": limits, "seconds": seconds}
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._read_line(process, seconds))
        except TimeoutError:  # a subclass of OSError, so it comes first
            self.close()
            raise ProbeTimeout from None
        except (OSError, EOFError):
            self.close()
            return grammar, "it needs too much memory or too deep a stack"
        return answer["grammar"], answer["error"]

    def close(self) -> None:
        """Kill the child and wait for its end. The next compile starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def kill(self) -> None:
        """Kill the child without waiting for its end. May be called from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # llguidance may be on this process's import path only.
        command = [sys.executable, str(_PROGRAM)]
        path = os.pathsep.join(filter(None, [str(Path(llguidance.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C must reach the parent only
            )
            self._read_line(process, _START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise EngineError(f"cannot start {_PROGRAM.name}, which compiles grammars: {error!r}") from error
        return process

    @staticmethod
    def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
        """Read a line. Raises TimeoutError after `seconds`, EOFError if the child has ended."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line
