"""Grammars that wait to be compiled. Clients take turns, and a grammar that no request waits for is dropped."""

import collections
import dataclasses
from concurrent.futures import Future
from typing import Any

from jpaged.engine.grammar.translate import Source
from jpaged.requester import Requester


@dataclasses.dataclass(slots=True)
class Job:
    """One grammar to compile, for one or several requests."""

    key: Any
    source: Source
    future: "Future[Any]"
    requesters: list[Requester]

    @property
    def client(self) -> str:
        """The client of the first request. The job takes this client's turn."""
        return self.requesters[0].client

    @property
    def is_wanted(self) -> bool:
        """False if all of its requests have left."""
        return not all(requester.has_left() for requester in self.requesters)


class JobQueue:
    """Jobs in order of arrival for each client, and clients in turn. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: collections.OrderedDict[str, collections.deque[Job]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def put(self, job: Job) -> None:
        """Append a job."""
        self._jobs.setdefault(job.client, collections.deque()).append(job)

    def take(self) -> Job | None:
        """Remove and return the first job of the client whose turn it is. None if there is no job."""
        if not self._jobs:
            return None
        client, jobs = self._jobs.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._jobs[client] = jobs  # at the end: the other clients come first
        return job

    def remove_unwanted(self) -> list[Job]:
        """Remove and return the jobs that no request waits for."""
        removed = [job for jobs in self._jobs.values() for job in jobs if not job.is_wanted]
        for job in removed:
            self._remove(job)
        return removed

    def remove_surplus(self, client: str) -> Job | None:
        """Remove and return the last job of the client with most jobs; None if no client has two more than `client`."""
        largest = max(self._jobs.values(), key=len, default=None)
        if largest is None or len(largest) <= len(self._jobs.get(client, ())) + 1:
            return None
        job = largest[-1]
        self._remove(job)
        return job

    def _remove(self, job: Job) -> None:
        self._jobs[job.client].remove(job)
        if not self._jobs[job.client]:
            del self._jobs[job.client]
