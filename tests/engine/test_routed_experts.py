"""`RoutedTokens` on its own. tests/end_to_end/test_routed_experts.py compares whole engines with a dense pass."""

import numpy as np

from jpaged.engine.output.routed_experts import RoutedTokens


def experts(*tokens):
    """One layer, two experts: the token's number, and the number after it."""
    return np.array([[[token, token + 1]] for token in tokens], np.int16).reshape(-1, 1, 2)


def test_tokens_are_at_their_positions():
    first = RoutedTokens()
    first.append(experts(0, 1, 2), 0)
    first.append(experts(3))
    follower = RoutedTokens(first)
    follower.append(experts(), 3)  # forks after three tokens
    follower.append(experts(30))
    follower.append(experts(40, 50))
    assert first.array(4)[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert follower.array(6)[:, 0, 0].tolist() == [0, 1, 2, 30, 40, 50]
    assert follower.array(5).dtype == np.int32
    assert follower.array(5)[:, 0, 1].tolist() == [1, 2, 3, 31, 41]


def test_a_row_that_starts_again_replaces_tokens():
    tokens = RoutedTokens()
    tokens.append(experts(0, 1, 2, 3), 0)
    tokens.append(experts(12, 13, 14), 2)  # computed again after two cached tokens
    assert tokens.array(9)[:, 0, 0].tolist() == [0, 1, 12, 13, 14]  # no more than were computed
    assert RoutedTokens().array(3) is None


def test_a_steps_array_is_not_kept():
    step, tokens = experts(0, 1, 2, 3), RoutedTokens()
    tokens.append(step[1:2], 0)
    step[:] = 9
    assert tokens.array(1).tolist() == [[[1, 2]]]
