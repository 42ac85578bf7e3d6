"""Runs `probe.py` as a child process, and kills it when a compile takes too long."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance

from jpaged.child_process import ChildEnded, ChildProcess
from jpaged.errors import CapacityError

_PROGRAM = Path(__file__).with_name("probe.py")


class ProbeTimeout(Exception):
    """The compile took too long, and the child process was killed."""


class ProbeCancelled(Exception):
    """The caller cancelled the compile, and the child process was killed."""


class ProbeProcess(ChildProcess):
    """Compiles grammars in a child process, which starts on first use. Used by one thread at a time."""

    def __init__(self, vocab_size: int, special_tokens: Sequence[str]) -> None:
        """vocab_size: number of ids that a grammar may name. special_tokens: names that a grammar may use."""
        vocabulary = {"vocab_size": vocab_size, "special_tokens": list(special_tokens)}
        # llguidance may be on this process's import path only.
        path = os.pathsep.join(filter(None, [str(Path(llguidance.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        super().__init__([str(_PROGRAM)], path, "compile the grammar", json.dumps(vocabulary).encode() + b"\n")

    def compile(
        self,
        grammar: str,
        *,
        context_free: bool,
        limits: dict[str, Any],
        seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[str, str]:
        """Compile a grammar. Returns (the grammar in llguidance's form, the error or "").

        context_free: `grammar` is Lark or GBNF from the request. limits: fields of LLParserLimits.
        cancelled:    called every 0.1 s while the child compiles.

        Raises ProbeTimeout after `seconds`, and ProbeCancelled when `cancelled` returns True. Raises CapacityError if
        no child can be started now, or if two were killed from outside. Raises EngineError if none can ever be started.
        """
        fields = {"grammar": grammar, "context_free": context_free, "limits": limits, "seconds": seconds}
        request = json.dumps(fields).encode() + b"\n"
        for _ in range(2):
            try:
                answer = json.loads(self.ask(request, seconds=seconds, cancelled=cancelled))
            except TimeoutError:
                raise ProbeTimeout from None
            except InterruptedError:
                raise ProbeCancelled from None
            except ChildEnded as ended:
                if ended.killed:
                    continue
                return grammar, "it needs too much memory or too deep a stack"
            return answer["grammar"], answer["error"]
        raise CapacityError("the process that compiles the grammar was killed twice: try again later")
