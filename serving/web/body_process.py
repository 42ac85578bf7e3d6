"""Runs `body_worker.py` as a child process, which checks large bodies. It is killed when a check takes too long."""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from jpaged.child_process import ChildEnded, ChildProcess
from jpaged.errors import CapacityError, RequestError

SHORT_BYTES = 2**21  # larger bodies use the other lane
SECONDS = 10.0  # of one check; 16 MiB take 0.3 s


class BodyProcess(ChildProcess):
    """Checks bodies in a child process, which starts on first use. Used by one thread at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # jpaged may be on this process's import path only
        super().__init__(["-m", "jpaged.serving.web.body_worker"], path, "check large bodies")

    def check(self, raw: bytes, schema: str, seconds: float = SECONDS) -> list[str]:
        """Check a body. Raises the RequestError that `decode_body` raises for it, or one after `seconds`.

        schema: name of the struct, for `body_schema`. Returns the body's `ignored_fields`. Raises CapacityError if a
        process cannot be started now or is killed, EngineError if it never can be started.
        """
        answer = self._answer(raw, schema, seconds)
        if isinstance(answer, list):
            return answer
        raise RequestError(answer["parameter"], _AsShown(answer["value"]), answer["accepted"])

    def _answer(self, raw: bytes, schema: str, seconds: float) -> dict[str, str] | list[str]:
        for _ in range(2):  # another process may have killed the child
            try:
                return json.loads(self.ask(f"{schema} {len(raw)}\n".encode(), raw, seconds=seconds))
            except TimeoutError:
                raise RequestError("body", f"{len(raw):,} bytes", "takes too much time to read: send less") from None
            except ChildEnded:
                continue
        raise CapacityError("the process that checks large bodies was killed twice: try again later")


class _AsShown:
    """A value that the child process has shortened for the error message."""

    def __init__(self, shown: str):
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


class _Lane:
    """A child process with its thread, which only waits for the child."""

    def __init__(self) -> None:
        self.process = BodyProcess()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jpaged-body")


# Two lanes, so that bodies of a few hundred kilobytes do not wait for bodies of up to 16 MiB.
_LANES = {"short": _Lane(), "long": _Lane()}


async def check_in_process(raw: bytes, schema: str) -> list[str]:
    """Check a body in a child process, after earlier bodies of its lane. As `BodyProcess.check`."""
    lane = _LANES["short" if len(raw) <= SHORT_BYTES else "long"]
    return await asyncio.get_running_loop().run_in_executor(lane.thread, lane.process.check, raw, schema)


def kill_children() -> None:
    """End the checks that still run, and the child processes. The next check starts another."""
    for lane in _LANES.values():
        lane.process.kill()
