"""Jump-forward: forced tokens are appended without sampling if that is faster. The answer does not change."""

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.sampling_extras import SamplingExtras, pack_mask
from jpaged.engine.step_plan import RecurrentSizes
from tests.engine.fake_runner import FakeRunner, next_token

VOCAB = 97
FREE, FORCED = 5, 4  # lengths of alternating stretches: the model chooses, and the grammar forces
LENGTH = 27
PROMPTS = [[3, 10, 17], [5], [60, 61, 62], [1, 2], [90], [11, 7]]


def forced_at(place: int) -> int | None:
    """The forced token at index `place` of an answer; None: the model chooses."""
    turn, step = divmod(place, FREE + FORCED)
    return None if step < FREE else (7 * turn + step) % VOCAB


@dataclasses.dataclass
class Stretches:
    """A fake grammar, which is its own matcher."""

    taken: int = 0
    is_finished: bool = False

    def matcher(self) -> "Stretches":
        return Stretches()

    def forced_tokens(self) -> list[int]:
        tokens, place = [], self.taken
        while (token := forced_at(place)) is not None:
            tokens.append(token)
            place += 1
        return tokens

    def mask_into(self, words: np.ndarray) -> None:
        allowed = np.ones(VOCAB, bool)
        if (token := forced_at(self.taken)) is not None:
            allowed[:] = False
            allowed[token] = True
        words[:] = pack_mask(allowed)

    def accept(self, token_id: int) -> bool:
        self.taken += 1
        return forced_at(self.taken - 1) in (None, token_id)


def wanted(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for place in range(LENGTH):
        token = forced_at(place)
        tokens.append(next_token(tokens, VOCAB) if token is None else token)
    return tokens[len(prompt) :]


def run(prompts: list[list[int]], *, min_jump_per_request: float, jumps: bool = True, **options: Any) -> int:
    """Run prompts and check their answers. Returns the number of steps."""
    runner = FakeRunner(min_jump_per_request=min_jump_per_request, **options)
    engine = Engine(runner, options=EngineOptions(jump_forward=jumps))
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    follows = dataclasses.replace(params, structured_outputs={"json_object": True})
    for number, prompt in enumerate(prompts):
        request_group = engine.inputs.process(str(number), {"prompt_token_ids": prompt}, params)
        grammar: Any = Future()
        grammar.set_result(Stretches())
        for request in request_group.requests:
            request.extras = SamplingExtras(follows, VOCAB)
            request.__post_init__()
        engine.add(dataclasses.replace(request_group, grammar=grammar))
    done = {}
    while engine.has_work:
        done |= {int(output.request_id): output.outputs[0].token_ids for output in engine.step()}
        engine.check_integrity()
    assert done == {number: wanted(prompt) for number, prompt in enumerate(prompts)}
    return engine.stats().steps


HYBRID = {"recurrent_sizes": RecurrentSizes(4, num_snapshots=5, interval=1), "block_size": 2, "num_blocks": 18}


@pytest.mark.parametrize("options", [{}, {"num_blocks": 10, "max_model_len": 32}, HYBRID | {"max_model_len": 32}])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_answers_are_the_same(count, options):
    for min_jump_per_request in (0.0, 1.0):
        run(PROMPTS[:count], min_jump_per_request=min_jump_per_request, **options)


def test_it_saves_steps_if_a_jump_pays():
    alone, several = PROMPTS[:1], PROMPTS
    stepping = run(alone, min_jump_per_request=0.0, jumps=False)
    assert run(alone, min_jump_per_request=0.0) == run(alone, min_jump_per_request=1.0) < stepping
    assert run(alone, min_jump_per_request=FORCED - 1) == stepping  # a jump must be longer than this
    rows = {"max_num_seqs": 6, "max_num_batched_tokens": 64}
    together = run(several, min_jump_per_request=0.0, jumps=False, **rows)
    assert run(several, min_jump_per_request=0.0, **rows) < together
    # four forced tokens of one request do not pay for six running ones
    assert run(several, min_jump_per_request=1.0, **rows) == together
