"""A program that checks large request bodies in a process that its parent can kill. It imports no jax.

Each request is a line `SCHEMA LENGTH`, then LENGTH bytes of JSON. Each answer is a line. For a valid body it is the
list that `ignored_fields` returns. Else it is `{"parameter": text, "value": text, "accepted": text}`: the fields of a
RequestError.
"""

import json
import math
import os
import signal
import sys

from jpaged.errors import RequestError, shown
from jpaged.serving.schemas.bodies import body_schema
from jpaged.serving.schemas.ignored_fields import ignored_fields
from jpaged.serving.web.body import decode_body
from jpaged.serving.web.body_process import SECONDS

MEMORY = 2 * 2**30  # bytes of address space


def main() -> None:
    """Answer requests until the input ends."""
    os.nice(5)
    if sys.platform == "linux":  # other systems ignore this limit
        import resource  # Windows lacks it

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, answers = sys.stdin.buffer, sys.stdout
    print("ready", file=answers, flush=True)
    while line := source.readline():
        name, length = line.split()
        raw = source.read(int(length))
        signal.alarm(math.ceil(SECONDS) + 1)  # in case the parent is gone and cannot kill this process
        answer: object = None
        try:
            schema = body_schema(name.decode(), raw)
            decode_body(raw, schema)
            answer = ignored_fields(raw, schema)
        except RequestError as error:
            answer = {"parameter": error.parameter, "value": shown(error.value), "accepted": error.accepted[:2_000]}
        except MemoryError:
            answer = {"parameter": "body", "value": f"{len(raw):,} bytes", "accepted": "needs too much memory"}
        signal.alarm(0)
        del raw
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
