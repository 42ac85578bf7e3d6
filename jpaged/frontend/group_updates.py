"""Updates of the weights of an engine of several processes.

1. The caller's thread checks the update on node 0. The files of a path are checked on all nodes.
2. Between two steps, node 0 checks the files of a path again, on all nodes. Until here, the old weights stay.
3. All nodes replace their weights, leaf by leaf. For a path, each node reads its own files. Arrays are on node 0, which
   sends each node its part (`runtime/parallel/weight_stream.py`).
4. Node 0 waits for all nodes. If one has failed, the engine has no weights until an update succeeds.

Imported late: JAX and all that uses it.
"""

import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.config import EngineConfig
from jpaged.errors import JPagedError, ModelLoadError
from jpaged.loading import LoadedModel, checkpoint_fingerprint
from jpaged.loading.updates import EngineWeights, prepare, sample
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.shard_weights import ShardedQuantizer
from jpaged.models.spec import WeightLayout
from jpaged.runtime.parallel.process_group import ProcessGroup
from jpaged.runtime.parallel.question import Question
from jpaged.runtime.parallel.weight_stream import LeafSender, received_leaves

if TYPE_CHECKING:
    from jpaged.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

CHECK, READ, RECEIVE = "check_weights", "read_weights", "receive_weights"  # commands of node 0


class LeaderUpdates:
    """Node 0: prepares updates for all nodes."""

    def __init__(self, engine: EngineWeights, group: ProcessGroup):
        """engine: the weights of node 0."""
        self._engine, self._group = engine, group
        assert isinstance(engine.placer, ShardedQuantizer), "an engine of several processes splits its weights"
        self._sender = LeafSender.of(engine.placer, group)

    def prepare(self, weights: Any, layout: WeightLayout | None) -> Callable[[], Iterable[NewLeaf]]:
        """Check new weights. Returns a function that returns the leaves of node 0.

        The other nodes replace their weights while node 0's leaves are read. Raises as `loading.updates.prepare`, and
        ModelLoadError if a path does not fit on another node.
        """
        if not isinstance(weights, (str, os.PathLike)):
            of_arrays = prepare(weights, dataclasses.replace(self._engine, placer=self._sender), layout)
            return lambda: self._with_others(_of_model(of_arrays()), lambda: self._group.ask(RECEIVE))
        of_files = prepare(weights, self._engine, layout)
        path = os.path.abspath(Path(weights).expanduser())
        self._check(path)

        def begin() -> Question:
            self._check(path)
            return self._group.ask(READ, path)

        return lambda: self._with_others(_of_model(of_files()), begin)

    def _with_others(self, leaves: Iterable[NewLeaf], begin: Callable[[], Question]) -> Iterator[NewLeaf]:
        """Yield the leaves, while the other nodes replace theirs. begin: checks, and makes the other nodes begin."""
        later = iter(leaves)
        first = list(itertools.islice(later, 1))  # errors that come before it leave the old weights
        others = begin()
        for leaf in itertools.chain(first, later):
            _refuse(others.early_problem())
            yield dataclasses.replace(leaf, owned=True)
        self._group.send("end_of_weights")
        _refuse(others.problem())

    def _check(self, path: str) -> None:
        """Raise ModelLoadError if another node has other files, or none."""
        try:
            fingerprint = _fingerprint(self._engine.config, path)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        _refuse(self._group.ask(CHECK, path, fingerprint).problem())


class FollowerUpdates:
    """Another node: carries out what node 0 asks."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, runner: "ModelRunner", group: ProcessGroup):
        """loaded: its params are not kept."""
        self._engine = EngineWeights.of(loaded, config, runner.weight_slots, runner.first_device)
        self._runner, self._group = runner, group

    def commands(self) -> Mapping[str, Callable[..., None]]:
        """Functions of node 0's commands, by name."""
        nothing: dict[str, Callable[..., None]] = dict.fromkeys(("end_of_weights", "abandon_weights"), lambda: None)
        return {CHECK: self._check, READ: self._read, RECEIVE: self._receive, **nothing}

    def _check(self, number: int, path: str, fingerprint: str) -> None:
        """Check the files of a path in a thread, because steps go on."""
        work = lambda: self._answer(number, lambda: self._check_files(path, fingerprint))  # noqa: E731
        threading.Thread(target=work, name="jpaged-check-weights", daemon=True).start()

    def _check_files(self, path: str, fingerprint: str) -> None:
        prepare(path, self._engine)
        if _fingerprint(self._engine.config, path) != fingerprint:
            raise ModelLoadError(f"{path} has other files than on node 0: copy the same checkpoint to all nodes")

    def _read(self, number: int, path: str) -> None:
        self._answer(number, lambda: self._replace(_of_model(prepare(path, self._engine)())))

    def _receive(self, number: int) -> None:
        leaves = received_leaves(self._group, self._engine.placer, {CHECK: self._check})
        if self._answer(number, lambda: self._replace(map(self._engine.on_device, leaves))):
            return
        try:
            for _ in leaves:  # node 0 may send until it has read the answer
                pass
        except ModelLoadError as error:
            logger.info("%s", error)

    def _replace(self, leaves: Iterable[NewLeaf]) -> None:
        replaced = self._runner.update_params(leaves)
        logger.info("node %d has new weights: %d leaves", self._group.rank, replaced.num_leaves)

    def _answer(self, number: int, work: Callable[[], None]) -> bool:
        """Do some work, and answer node 0. Returns False if it has failed."""
        problem = ""
        try:
            work()
        except Exception as error:  # node 0 raises it
            problem = str(error) if isinstance(error, JPagedError) else f"{type(error).__name__}: {error}"
            logger.warning("node %d refuses an update of the weights, or has failed: %s", self._group.rank, problem)
        self._group.answer(number, problem)
        return not problem


def _of_model(leaves: Iterable[NewLeaf | NewDrafter]) -> Iterator[NewLeaf]:
    """The leaves of the model. An engine of several processes replaces no MTP layer: `EngineWeights.mtp` is None."""
    for leaf in leaves:
        assert isinstance(leaf, NewLeaf)
        yield leaf


def _fingerprint(config: EngineConfig, path: str) -> str:
    """Names and sizes of the files of a path, and a sample of their weights. An old copy has the same sizes."""
    files = checkpoint_fingerprint(dataclasses.replace(config, model=path, load_format="auto", revision=None))
    return f"{files} {sample(path)}"


def _refuse(problem: str) -> None:
    if problem:
        raise ModelLoadError(problem)
