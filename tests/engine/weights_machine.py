"""Updates of the weights for the random users of EngineMachine: at every moment, complete, half done, and deleted.

The weights decide the tokens. So a token shows which weights have computed it.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from jpaged.engine.engine import Engine, EngineOptions, StepError
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.strategies.beam import BeamStrategy
from jpaged.errors import EngineError
from jpaged.outputs import RequestOutput
from jpaged.params.sampling import SamplingParams
from tests.engine.engine_machine import EngineMachine

MOMENTS = ("a prompt in parts", "steps in flight", "requests that wait", "answers of one group", "preempted requests")


class WeightsMachine(EngineMachine):
    """Every answer has the tokens of the weights that it claims, and it claims them from the right token on."""

    def drafting(self, number: int, budget: int) -> dict[str, Any]:
        self.rng = random.Random(number)
        self.labels: dict[int | str, int] = {0: 0}  # version -> number of the weights
        self.changes: dict[tuple[str, int], list[tuple[int, int]]] = {}  # by request id and index of the answer
        return {"weighs": True}

    def new_engine(self, options: EngineOptions) -> Engine:
        engine = super().new_engine(options)
        add = engine.add

        def noted(request_group: RequestGroup) -> None:
            add(request_group)
            for request in request_group.requests:
                self.changes[request.request_id, request.index] = [(0, self.runner.weights)]

        engine.add = noted  # ty: ignore[invalid-assignment]
        return engine

    def weights_of(self, request_id: str, index: int) -> Sequence[tuple[int, int]]:
        return self.changes[request_id, index]

    def replace_weights(self, recompute: bool) -> None:
        self.note_moment()
        number = self.runner.weights + 1
        version = self.rng.choice((None, -number, f"step {number}"))
        update = self.engine.update_weights([number, number], version=version, recompute=recompute)
        assert update.version == self.engine.weight_version == (number if version is None else version)
        self.labels[update.version] = number
        for request_group in self.engine._outputs.request_groups.values():
            for request in request_group.requests:
                count = request.num_output_tokens
                if isinstance(request_group.strategy, BeamStrategy):
                    count = request_group.strategy.search.num_tokens
                changes = self.changes[request.request_id, request.index]
                if not request.schedule.status.is_end:
                    changes[:] = [*(change for change in changes if change[0] < count), (count, number)]
        if recompute:
            assert not self.engine.scheduler.running
            self.reached["recomputed"] += len(self.engine._outputs.request_groups)

    def note_moment(self) -> None:
        """Count what the live requests do."""
        scheduler, groups = self.engine.scheduler, list(self.engine._outputs.request_groups.values())
        live = [request for group in groups for request in group.requests]
        computed = [(request.schedule.num_computed, request.prompt_len) for request in scheduler.running]
        self.reached["a prompt in parts"] += any(0 < done < whole for done, whole in computed)
        self.reached["requests that wait"] += bool(scheduler.num_waiting)
        self.reached["answers of one group"] += any(len(group.requests) > 1 for group in groups)
        self.reached["preempted requests"] += any(request.schedule.num_lost for request in live)

    @rule()
    @precondition(lambda self: self.asked.keys() - self.ended)
    def abort_all_and_update(self) -> None:
        """The fourth way: running requests end."""
        self.flush()
        for output in self.engine.abort(sorted(self.asked.keys() - self.ended)):
            self.judge(output, aborted=True)
        self.replace_weights(False)
        self.runner.oldest_kv = self.runner.weights

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8))
    def recompute_while_requests_run(self, seed: int, count: int) -> None:
        """By chance alone, hardly any request runs when its KV is recomputed."""
        self.crowd(seed, 3)
        self.steps(count)
        self.flush()
        self.replace_weights(True)
        self.runner.oldest_kv = self.runner.weights

    @rule(count=st.integers(0, 8))
    @precondition(lambda self: self.asked)
    def update_and_ask_again(self, count: int) -> None:
        """The same prompts before and after an update: their KV of the old weights must not be found."""
        before = sorted(self.asked)[-3:]
        self.steps(count)
        self.flush()
        self.replace_weights(False)
        for request_id in before:
            self.ask(request_id, self.asked[request_id][0])
        self.steps(count)

    def ask(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request with the salt of another one."""
        again, salt = str(len(self.salts)), self.salts[request_id]
        self.salts[again] = salt
        prompt, params = list(token_ids)[: self.runner.max_model_len - 1], SamplingParams(temperature=0, max_tokens=2)
        self.engine.add_request(again, {"prompt_token_ids": prompt, "cache_salt": salt}, params)
        self.asked[again] = prompt, params

    @rule(deleted=st.booleans())
    def lose_weights(self, deleted: bool) -> None:
        """Half an update, or arrays that the caller deletes. All requests end. New ones are refused until an update."""
        self.reached["steps in flight"] += self.engine.pipeline.has_steps
        if deleted:
            self.runner.problem = "the weights were deleted"
        else:
            self.flush()
            self.fail_in_the_middle()
        live = self.asked.keys() - self.ended
        if live:
            self.step()
            assert live <= self.ended, "a request goes on"
        self.flush()  # a step of requests that had ended before may be in flight
        assert not self.engine.has_work
        with pytest.raises(EngineError, match=self.runner.problem):
            self.engine.add_request("refused", [1], SamplingParams())
        self.replace_weights(False)
        self.runner.oldest_kv = self.runner.weights

    def fail_in_the_middle(self) -> None:
        number = self.runner.weights + 1

        def leaves() -> Iterator[int]:
            yield number
            raise OSError("the trainer is gone")

        with pytest.raises(OSError, match="the trainer is gone"):
            self.engine.update_weights(leaves())

    def end_failed(self, error: StepError) -> None:
        if self.runner.problem is None:
            super().end_failed(error)
        else:
            assert isinstance(error.__cause__ or error, EngineError)
            assert self.runner.problem in str(error) or not self.engine.has_work
            self.ended |= set(error.request_ids)

    def judge(self, output: RequestOutput, aborted: bool = False) -> None:
        super().judge(output, aborted)
        params = self.asked[output.request_id][1]
        for answer in output.outputs:
            changes = tuple((first, self.labels[version]) for first, version in answer.weight_changes)
            assert self.labels[answer.weight_version] == changes[-1][1]
            count = len(answer.token_ids)
            indices = range(params.num_sequences) if params.chooses else [0 if params.use_beam_search else answer.index]
            known = [
                tuple(change for change in self.changes[output.request_id, index] if change[0] < max(count, 1))
                for index in indices
            ]
            assert changes in known, "weights that have not computed the answer"
