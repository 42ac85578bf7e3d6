"""A child process that compiles stored programs while the engine serves.

XLA cannot interrupt a compile, and a large program takes seconds. But a process can be killed, so the engine's process
exits at once, and no thread outlives the engine. XLA's compile cache on disk has the result.

Run as `python -m jpaged.runtime.compile.worker FOLDER KERNEL...`. Prints a line when ready. Then it reads requests, one
JSON object a line, and prints a line after each.

Imported late: JAX and what uses it, in `main`: the parent imports this module for its class.
"""

import json
import os
import pathlib
import sys
from collections.abc import Sequence

from jpaged.child_process import ChildProcess
from jpaged.errors import CapacityError, EngineError

FAILURES = (OSError, EOFError, CapacityError, EngineError)  # errors of the process
_SECONDS = 1800.0  # time limit of one compile; only a stuck process takes longer
_NICE = 10  # the engine's threads have priority
_ROOT = pathlib.Path(__file__).parents[3]


class CompileWorker(ChildProcess):
    """The parent's handle of the child process, which starts on first use. For one thread at a time."""

    def __init__(self, cache_folder: pathlib.Path, kernels: Sequence[str]):
        """kernels: modules of the native kernels that the programs call."""
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        super().__init__(["-m", __name__, str(cache_folder), *kernels], path, "compile programs")

    def compile(self, path: pathlib.Path, donate: Sequence[int]) -> None:
        """Compile a stored program into XLA's compile cache. Raises one of FAILURES."""
        self.ask(json.dumps({"path": str(path), "donate": list(donate)}).encode() + b"\n", seconds=_SECONDS)


def main(folder: str, *kernels: str) -> None:
    """Compile the requested programs until stdin ends."""
    import jax
    from jax import export

    from jpaged.runtime.jax_settings import pinned
    from jpaged.runtime.placement import Placement
    from jpaged.runtime.store.cache import persistent_cache
    from jpaged.runtime.store.stored_programs import compile_exported
    from pallas_kernels.cpu_kernels import load_kernels
    from pallas_kernels.private_folder import read_file

    os.nice(_NICE)
    jax.config.update("jax_platforms", "cpu")
    placement = Placement.single(jax.devices()[0])
    load_kernels(kernels)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        data = read_file(pathlib.Path(request["path"]))
        if data is None:
            raise FileNotFoundError(request["path"])
        exported = export.deserialize(bytearray(data))
        arguments, _ = placement.shapes_of(jax.tree.unflatten(exported.in_tree, exported.in_avals))
        with pinned(), persistent_cache(folder):
            compile_exported(exported, arguments, request["donate"])
        print("compiled", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
