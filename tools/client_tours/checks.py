"""Record of a tour's checks. Imports the standard library only: every client's environment can run it.

A tour script runs as `python tour_NAME.py RESULT_FILE`. `run.py` passes the servers' addresses in the environment.
"""

import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

BASE = os.environ.get("TOUR_BASE_URL", "")  # server of the demo model, without /v1
EMBEDDING_BASE = os.environ.get("TOUR_EMBEDDING_URL", "")  # the same model with --runner pooling
ENCODER_BASE = os.environ.get("TOUR_ENCODER_URL", "")  # tiny encoder with the model name "encoder"; see `WORDS`
RERANKER_BASE = os.environ.get("TOUR_RERANKER_URL", "")  # tiny cross-encoder with the same name
MODEL = "demo"
PROMPT = "def read_json(path):"
WORDS = ["w5 w60 w7", "w100 w200", "w8 w9 w10 w11"]  # texts for the encoders, which know w3 to w319
WEATHER = {
    "type": "object", "required": ["city", "unit"], "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"type": "string", "enum": ["C", "F"]}},
}  # fmt: skip


class Checks:
    """Passed checks by name, failed checks with their error, and verified limits of the client."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.limits: dict[str, str] = {}
        self.extra: dict[str, object] = {}  # additional results of this tour

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Record the block as passed, or as failed with the exception that it raised."""
        try:
            yield
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"[:1500]
        else:
            self.passed.append(name)

    @contextlib.contextmanager
    def limit(self, name: str, says: str, reason: str) -> Iterator[None]:
        """Record a limit of the client. The block must raise an error that contains `says`."""
        try:
            yield
        except Exception as error:
            if says in str(error):
                self.limits[name] = reason
            else:
                self.failed[name] = f"another error than {says!r}: {type(error).__name__}: {error}"[:1500]
        else:
            self.failed[name] = "no error: the client has lost this limit; make it a check"

    def write(self) -> None:
        """Write the result file that the command line names."""
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"passed": self.passed, "failed": self.failed, "limits": self.limits, **self.extra}, file)


def raises(kind: type[Exception], says: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function that must raise an error of this kind and text. Returns the error."""
    caught: Exception | None = None
    try:
        function(**arguments)
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__}"
    assert says in str(caught), str(caught)
    return caught


def scores(query: str, documents: list[str]) -> list[float]:
    """Return the scores of /score of the cross-encoder, without a client."""
    body = json.dumps({"model": "encoder", "text_1": query, "text_2": documents}).encode()
    request = urllib.request.Request(f"{RERANKER_BASE}/score", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [one["score"] for one in json.load(answer)["data"]]


def best_first(query: str, documents: list[str]) -> list[tuple[str, float]]:
    """Return the documents with their scores, the best one first."""
    pairs = zip(documents, scores(query, documents), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def wait_until_idle(seconds: float = 20.0) -> None:
    """Return when no request runs or waits on the server. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{BASE}/load", timeout=10) as answer:
            if json.load(answer)["server_load"] == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"requests still run after {seconds} s")
