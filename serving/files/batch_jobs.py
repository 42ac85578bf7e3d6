"""Runs the batches of /v1/batches, one after another. They go on after a restart of the server.

1. `create` writes the batch's record, `batches/ID.json`, and the worker takes the batches in their order.
2. Every line of the input file is checked. A wrong one ends the batch with the status `failed`.
3. Each answer is appended to `batches/ID.jsonl`, the record of what is done. After a restart only the other lines run.
4. At the end, its lines become the output file and the error file. The record has their ids from the beginning.

Requests of clients come first. A line starts only when no request waits for the engine. While requests of clients are
open, the lines have at most half of the engine's rows.
"""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette

from jpaged.errors import CapacityError, EngineError, RequestError, shown
from jpaged.serving.files.batch_files import (
    BatchFileError,
    BatchRequest,
    ResultFile,
    check_requests,
    open_results,
    read_requests,
    split_results,
)
from jpaged.serving.files.batch_run import answer, batch_urls, run_requests
from jpaged.serving.files.store import FileStore, disk_errors, is_full, load, new_id, save
from jpaged.serving.schemas.files import BatchError, BatchErrors, BatchObject, CreateBatch, RequestCounts
from jpaged.serving.server_state import Server
from jpaged.serving.web.error_responses import APIError
from jpaged.serving.web.intake import Intake

logger = logging.getLogger("jpaged.serving")

MAX_REQUESTS = 50_000    # lines of a batch, as in OpenAI's API
MAX_BATCHES = 1_000      # records. The oldest one that has ended is dropped for a new one
MAX_UNFINISHED = 100     # batches that run or wait
TURN_SECONDS = 0.02      # between two checks of the engine's queue
ATTEMPTS = 3             # of a line whose answer has a status of 500 or above
ATTEMPT_SECONDS = 1.0    # between two attempts
HEALTH_SECONDS = 60      # maximum wait for a healthy engine, before such an answer counts
RETRY_SECONDS = 10.0     # after an error of the engine, or on a full disk, until the batch goes on
ENDED = frozenset({"completed", "failed", "cancelled"})


class _Job(msgspec.Struct):
    """The record of a batch. owner: hash of its key in hexadecimal digits. output_id, error_id: of files to make."""

    owner: str
    batch: BatchObject
    output_id: str
    error_id: str


class _StorageFull(Exception):
    """The answers do not fit into the folder."""


class BatchJobs:
    """The batches of all keys. A key can use only its own batches."""

    def __init__(self, files: FileStore, app: Starlette, server: Server, intake: Intake):
        """app: runs the lines. It requires no keys."""
        self._files = files
        self._app = app
        self._server = server
        self._intake = intake
        loaded = load(files.batches, _Job)
        self._jobs = dict(sorted(loaded.items(), key=lambda one: one[1].batch.created_at))
        for path in files.batches.glob("batch_*.*"):  # left over from a kill
            job = self._jobs.get(path.stem)
            if path.suffix == ".tmp" or (path.suffix != ".json" and job is not None and job.batch.status in ENDED):
                path.unlink()
        self._inflight = 0  # lines
        self._closes = False
        self._saving, self._turns = asyncio.Lock(), asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None
        self._current: _Job | None = None
        self._answering: asyncio.Task[int] | None = None  # of the current job

    def start(self) -> None:
        """Run unfinished batches, in a task of the running event loop."""
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop, and close the folder. Unfinished batches go on when the server starts again."""
        self._closes = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._files.close()

    async def create(self, owner: bytes, body: CreateBatch) -> BatchObject:
        """Queue a new batch. Raises RequestError, CapacityError for too many batches, APIError if files do not fit."""
        if body.endpoint not in (urls := batch_urls(self._app)):
            raise RequestError("endpoint", body.endpoint, f"must be one of {', '.join(sorted(urls))}")
        try:
            self._files.find(owner, body.input_file_id)
        except APIError as error:
            raise RequestError("input_file_id", body.input_file_id, str(error)) from None
        if sum(job.batch.status not in ENDED for job in self._jobs.values()) >= MAX_UNFINISHED:
            raise CapacityError(f"{MAX_UNFINISHED} batches run or wait: send this one later", retry_after=60.0)
        self._files.check_number()
        batch = BatchObject(
            id=new_id("batch_"), endpoint=body.endpoint, input_file_id=body.input_file_id,
            completion_window=body.completion_window, created_at=int(time.time()), metadata=body.metadata,
            request_counts=RequestCounts(),
        )  # fmt: skip
        job = _Job(owner.hex(), batch, new_id("file-"), new_id("file-"))
        self._jobs[batch.id] = job
        try:
            with disk_errors():
                await self._save(job)
        except BaseException:
            del self._jobs[batch.id]
            raise
        self._drop_oldest()
        self.start()
        return batch

    def find(self, owner: bytes, batch_id: str) -> BatchObject:
        """Return a batch. Raises APIError 404 if this key has none of that id."""
        job = self._jobs.get(batch_id)
        if job is None or job.owner != owner.hex():
            message = f"no such batch: it was dropped for newer ones, or never made (id={shown(batch_id)})"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="batch_id", code="batch_not_found")
        return job.batch

    def of_owner(self, owner: bytes) -> list[BatchObject]:
        """Return the batches of a key, oldest first."""
        return [job.batch for job in self._jobs.values() if job.owner == owner.hex()]

    async def cancel(self, owner: bytes, batch_id: str) -> BatchObject:
        """Cancel a batch. Its finished answers become its output. Raises APIError 409 if it has ended."""
        batch = self.find(owner, batch_id)
        if batch.status in ENDED:
            message = f"the batch is {batch.status}: only one that has not ended can be cancelled"
            raise APIError(HTTPStatus.CONFLICT, message, param="batch_id", code="batch_ended")
        job = self._jobs[batch_id]
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            if job is self._current and self._answering is not None:
                self._answering.cancel()
            elif job is not self._current and not self._results_path(job).exists():
                batch.status, batch.cancelled_at = "cancelled", int(time.time())
            with disk_errors():
                await self._save(job)
        return batch

    def check_unused(self, file_id: str) -> None:
        """Raise APIError 409 if a batch that has not ended reads a file."""
        for job in self._jobs.values():
            if job.batch.input_file_id == file_id and job.batch.status not in ENDED:
                message = f"the file is the input of {job.batch.id}: cancel the batch first"
                raise APIError(HTTPStatus.CONFLICT, message, param="file_id", code="file_in_use")

    # -- run by the worker ----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while job := next((job for job in self._jobs.values() if job.batch.status not in ENDED), None):
            self._current = job
            try:
                await self._run(job)
            except Exception as error:
                if isinstance(error, EngineError) or (isinstance(error, OSError) and is_full(error)):
                    logger.warning("%s waits: %s", job.batch.id, error)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                logger.exception("%s failed", job.batch.id)
                with contextlib.suppress(OSError):  # of a full disk
                    await self._fail(job, BatchError("server_error", "the server failed on it; its log says why"))
            finally:
                self._current = self._answering = None

    async def _run(self, job: _Job) -> None:
        """Run a batch to its end. Raises EngineError if the engine is closed, OSError if the disk is full."""
        batch = job.batch
        source = self._files.path(batch.input_file_id)
        try:
            expected = await asyncio.to_thread(check_requests, source, url=batch.endpoint, most=MAX_REQUESTS)
        except BatchFileError as error:
            message = str(error).replace(str(source), "the input file")
            await self._fail(job, BatchError("invalid_input_file", message, error.line))
            return
        batch.request_counts.total = len(expected)
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await self._save(job)
        failure = None
        with contextlib.ExitStack() as stack:
            opened = open_results(self._results_path(job), expected)
            results = await asyncio.to_thread(opened.__enter__)
            stack.push(opened.__exit__)
            update = self._counter(batch, results)
            if batch.status != "cancelling":
                failure = await self._answer_lines(job, source, results, update)
        while True:
            try:
                await self._finish(job, failure)
                return
            except OSError as error:  # retried here, so that no line runs again
                if not is_full(error):
                    raise
                logger.warning("%s waits for room on the disk", batch.id)
                await asyncio.sleep(RETRY_SECONDS)

    async def _answer_lines(
        self, job: _Job, source: pathlib.Path, results: ResultFile, update: Callable[[int], None]
    ) -> BatchError | None:
        """Answer the lines without an answer. Returns the error of a failed batch, or None."""
        requests = read_requests(source, frozenset(results.done))
        work = run_requests(self._ask, requests, results, max_inflight=self._num_rows, update=update)
        self._answering = asyncio.create_task(work)
        try:
            await self._answering
        except asyncio.CancelledError:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
            if self._closes or job.batch.status != "cancelling":
                raise
        except (_StorageFull, BatchFileError) as error:
            logger.warning("%s: %s", job.batch.id, error)
            said = "the answers do not fit into the server's folder: delete files, and send the other requests again"
            return BatchError("storage_full", said)
        return None

    async def _ask(self, request: BatchRequest) -> tuple[int, str, bytes]:
        """Run a line when it may start, and again if the server failed on it."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(ATTEMPT_SECONDS)
            await self._turn()
            try:
                answered = await answer(self._app, request)
            finally:
                self._inflight -= 1
            if answered[0] < HTTPStatus.INTERNAL_SERVER_ERROR:
                break
        else:
            await self._healthy()
        return answered

    async def _healthy(self) -> None:
        """Wait up to HEALTH_SECONDS for a healthy engine. If it is dead, the process ends; a restart runs the line."""
        for _ in range(HEALTH_SECONDS):
            try:
                await self._server.engine.check_health()
                return
            except EngineError:
                await asyncio.sleep(1.0)

    async def _turn(self) -> None:
        """Wait until a line may start, and count it. Only one of the many lines checks the queue at a time."""
        async with self._turns:
            while self._must_wait():  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(TURN_SECONDS)
            self._inflight += 1

    def _must_wait(self) -> bool:
        if self._intake.draining or self._server.engine.stats().num_waiting:
            return True
        return self._intake.num_open > 0 and self._inflight >= max(1, self._num_rows // 2)

    @property
    def _num_rows(self) -> int:
        engine = self._server.engine
        return engine.max_num_seqs * engine.num_engines

    def _counter(self, batch: BatchObject, results: ResultFile) -> Callable[[int], None]:
        """Return a function that keeps the counts of a batch current. It raises _StorageFull."""

        def count(_: int = 0) -> None:
            batch.request_counts.failed = results.failed
            batch.request_counts.completed = len(results.done) - results.failed
            try:
                self._files.check_room(results.size)
            except APIError as error:
                raise _StorageFull(str(error)) from None

        with contextlib.suppress(_StorageFull):
            count()
        return count

    async def _finish(self, job: _Job, failure: BatchError | None) -> None:
        """Make the output files of a batch, and end it."""
        batch, path = job.batch, self._results_path(job)
        cancelled = batch.status == "cancelling"
        if not cancelled and failure is None:
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            await self._save(job)
        answers, errors = (path.with_suffix(suffix) for suffix in (".answers", ".errors"))
        counts = batch.request_counts
        try:
            await asyncio.to_thread(split_results, path, answers, errors)
        except OSError:  # no room for copies: the output file has all lines
            answers.unlink(missing_ok=True)
            errors.unlink(missing_ok=True)
            answers = path
            counts = RequestCounts(counts.total, counts.completed + counts.failed)
        if counts.completed:
            name = f"{batch.id}_output.jsonl"
            batch.output_file_id = (await self._files.add(job.owner, job.output_id, answers, name, "batch_output")).id
        if counts.failed:
            name = f"{batch.id}_error.jsonl"
            batch.error_file_id = (await self._files.add(job.owner, job.error_id, errors, name, "batch_output")).id
        now = int(time.time())
        if failure is not None:
            ended = msgspec.structs.replace(batch, status="failed", failed_at=now, errors=BatchErrors([failure]))
        elif cancelled:
            ended = msgspec.structs.replace(batch, status="cancelled", cancelled_at=now)
        else:
            ended = msgspec.structs.replace(batch, status="completed", completed_at=now)
        await self._save(msgspec.structs.replace(job, batch=ended))
        job.batch = ended  # after its record is saved, so that no client sees an end without one
        for made in (path, answers, errors):
            made.unlink(missing_ok=True)

    async def _fail(self, job: _Job, error: BatchError) -> None:
        batch = job.batch
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors([error])
        await self._save(job)

    async def _save(self, job: _Job) -> None:
        async with self._saving:
            await asyncio.to_thread(save, self._files.batches / f"{job.batch.id}.json", job)

    def _results_path(self, job: _Job) -> pathlib.Path:
        return self._files.batches / f"{job.batch.id}.jsonl"

    def _drop_oldest(self) -> None:
        if len(self._jobs) > MAX_BATCHES:
            oldest = next(one for one, job in self._jobs.items() if job.batch.status in ENDED)
            del self._jobs[oldest]
            (self._files.batches / f"{oldest}.json").unlink(missing_ok=True)
