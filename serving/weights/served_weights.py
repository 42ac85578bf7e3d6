"""Replaces the weights of a running server by those of a checkpoint below the operator's folders."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from jpaged.errors import EngineError, ModelLoadError, shown
from jpaged.outputs import WeightUpdate
from jpaged.serving.engine_client import EngineClient
from jpaged.serving.web.error_responses import APIError
from jpaged.serving.web.operator_folders import OperatorFolders

logger = logging.getLogger("jpaged.serving")

PAUSES = {"wait": "wait", "keep": "keep", "recompute": "keep", "abort": "abort"}  # mode of an update -> of its pause


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateOrder:
    """An update that the operator wants. field: of the body, that has the path. mode: None: the route's default."""

    field: str
    path: str
    version: int | str | None
    mode: str
    keep_pause: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DoneUpdate:
    """A finished update. num_waiting: requests that waited for it."""

    result: WeightUpdate
    num_waiting: int


class ServedWeights:
    """Updates one after another. folders: checkpoints below them may be loaded. Empty: none may."""

    def __init__(self, engine: EngineClient, folders: Sequence[Path] = ()):
        """Raises RequestError for a path that is not a folder."""
        self._engine = engine
        self._folders = OperatorFolders("weights_dirs", folders)
        self._running = asyncio.Lock()

    async def update(self, order: UpdateOrder) -> DoneUpdate:
        """Replace the weights. Returns when the next step uses the new ones.

        Raises APIError and RequestError, after which the old weights serve, unless the message says otherwise. It goes
        on if the client disconnects.
        """
        path = await asyncio.to_thread(self._checked, order.field, order.path)
        return await asyncio.shield(asyncio.ensure_future(self._update(order, path)))

    async def _update(self, order: UpdateOrder, path: Path) -> DoneUpdate:
        async with self._running:
            mode, pauses = order.mode, order.keep_pause and not await self._engine.is_paused()
            if pauses:
                await self._engine.pause_generation(mode=PAUSES[mode], clear_cache=False)
                mode = "keep" if mode in ("wait", "abort") else mode  # no request runs
            stats = self._engine.stats()
            try:
                result = await self._engine.update_weights(str(path), version=order.version, mode=mode)
            except BaseException as error:
                if pauses:
                    with contextlib.suppress(EngineError):  # it has no weights
                        await self._engine.resume_generation()
                raise self._shown(error, order.field) from None
        logger.info(
            "the weights are those of %s, version %s: no step ran for %.3f s", path, result.version, result.seconds
        )
        return DoneUpdate(result, 0 if mode == "abort" else stats.num_running + stats.num_waiting)

    def _shown(self, error: BaseException, field: str) -> BaseException:
        """Return the error that the operator reads. field: of the body, that has the path."""
        problem = self._engine.weights_problem
        match error:
            case ModelLoadError() if problem is None:
                return APIError(HTTPStatus.BAD_REQUEST, str(error), param=field, code="bad_weights")
            case EngineError() if problem is None:
                return APIError(HTTPStatus.CONFLICT, str(error), code="engine_error")
            case ModelLoadError() | EngineError():
                message = f"{error}; {problem}"
                return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, param=field, code="no_weights")
        return error

    def _checked(self, field: str, path: str) -> Path:
        """A checkpoint below the operator's folders. Raises APIError."""
        found = self._folders.find(
            field, path, is_wanted=lambda found: found.is_dir() or (found.suffix == ".gguf" and found.is_file()),
            closed="weights cannot be replaced from files",
        )  # fmt: skip
        if found is None:
            message = f"{field}: no checkpoint found for {shown(path)}: must be a folder, or a .gguf file"
            raise APIError(HTTPStatus.NOT_FOUND, message, param=field, code="weights_not_found")
        return found
