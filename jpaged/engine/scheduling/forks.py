"""Forks: requests that start with the blocks and tokens of another request of their request group."""

from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.decode_scheduler import DecodeScheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerState


class Forks:
    """Makes forks. A fork without a free row waits, and later finds its parent's blocks by name."""

    def __init__(self, state: SchedulerState, decodes: DecodeScheduler):
        self._manager = state.manager
        self._waiting = state.waiting
        self._running = state.running
        self._decodes = decodes

    def fork(self, parent: Request, fork: Request, *, after_step: bool = False) -> None:
        """Let `fork` continue from where `parent` is. `fork` neither runs nor waits, and has the parent's token ids.

        If the parent has no blocks, or no row is free, the fork waits like a preempted request.
        after_step: the parent is where it is after the step that is being planned.
        """
        schedule = fork.schedule
        self._manager.names.inherit(fork, parent)
        schedule.num_cached_tokens = parent.schedule.num_cached_tokens
        schedule.num_computed = schedule.num_lost = 0
        if parent.schedule.status is RequestStatus.RUNNING and self._running.free_rows:
            self._manager.fork(parent, fork)
            schedule.num_computed = parent.schedule.num_computed
            self._running.enter(fork)
            if self._manager.states is not None:
                self._manager.states.fork(parent, fork, after_step=after_step)
        else:
            schedule.status = RequestStatus.PREEMPTED
            self._waiting.add(fork)

    def fork_at_prompt_end(self, parent: Request, follower: Request) -> bool:
        """Fork a follower from a request whose prompt ends in this step. Returns False if the follower has to wait.

        The plan samples for both requests from the parent's last hidden state.
        """
        parent.schedule.followers.remove(follower)
        headroom = (len(self._running.requests) + 1) * self._manager.num_kv_groups
        self._waiting.rank(follower)
        # A waiting request that comes before the follower gets the row and the blocks first.
        passes = bool(self._waiting) and self._waiting.head().schedule.rank < follower.schedule.rank
        if passes or not self._running.free_rows or self._manager.pool.num_free < headroom:
            self._manager.names.inherit(follower, parent)
            self._waiting.add(follower)
            return False
        self.fork(parent, follower, after_step=True)
        self._decodes.note_sampled(follower)
        parent.schedule.next_boundary = follower.schedule.next_boundary = 0  # both may share their last block now
        return True
