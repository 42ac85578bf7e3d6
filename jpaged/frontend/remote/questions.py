"""Questions of a front end that the engine's process answers at once: statistics, and the version of the weights.

The server reads them as properties, so the front end waits for the answer: 0.2 ms, and a few if the engine's thread has
Python's lock. They have a pair of sockets and a thread of their own.
"""

import itertools
import logging
import socket
import threading
from typing import Any

from jpaged.errors import EngineError, JPagedError
from jpaged.frontend.remote.hosted import Hosted
from jpaged.frontend.remote.messages import (
    Answer,
    Call,
    FrameReader,
    frame,
    message_of_engine,
    message_of_front_end,
    portable,
)
from jpaged.frontend.remote.welcome import QUESTIONS

logger = logging.getLogger(__name__)

SECONDS = 5.0  # longest wait for an answer


class Questions:
    """The front end's side. Any thread may ask."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(SECONDS)
        self._sock = sock
        self._frames = FrameReader()
        self._identities = itertools.count()
        self._lock = threading.Lock()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the engine's answer. Raises its error, and EngineError if there is none within SECONDS."""
        with self._lock:
            identity = next(self._identities)
            try:
                self._sock.sendall(frame(Call(identity, name, arguments)))
                answer = self._answer(identity)
            except OSError as error:
                raise EngineError(f"the engine's process does not answer ({name}: {error})") from None
        if answer.error is not None:
            raise answer.error
        return answer.value

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _answer(self, identity: int) -> Answer:
        while True:
            data = self._sock.recv(2**16)
            if not data:
                raise ConnectionError("it has ended")
            for _, content in self._frames.feed(data):
                answer = message_of_engine(content)
                if answer.identity == identity:  # else it comes after its SECONDS
                    return answer


def answer_questions(engine: Hosted, sock: socket.socket) -> None:
    """Answer in a thread, until the front end closes its side."""
    sock.setblocking(True)
    threading.Thread(target=_serve, args=(engine, sock), name="jpaged-questions", daemon=True).start()


def _serve(engine: Hosted, sock: socket.socket) -> None:
    frames = FrameReader()
    with sock:
        try:
            while data := sock.recv(2**16):
                for _, content in frames.feed(data):
                    sock.sendall(frame(_answer(engine, message_of_front_end(content))))
        except OSError:
            pass  # the front end is gone
        except Exception:
            logger.exception("a front end asked what cannot be read")


def _answer(engine: Hosted, call: Call) -> Answer:
    try:
        if call.name not in QUESTIONS:
            raise EngineError(f"a front end may not ask for {call.name}")
        found = getattr(engine, call.name)
        return Answer(call.identity, found(*call.arguments) if callable(found) else found)
    except Exception as error:
        return failed(call, error)


def failed(call: Call, error: Exception) -> Answer:
    """The answer to a call that raised an error."""
    if isinstance(error, JPagedError):
        return Answer(call.identity, error=portable(error))
    logger.error("%s failed", call.name, exc_info=error)
    return Answer(call.identity, error=EngineError(f"{call.name}: {type(error).__name__}: {error}"))
