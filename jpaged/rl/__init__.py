"""Generation inside a trainer's training loop: `Rollout`, and `jpaged.rl.tunix` for tunix."""

from jpaged.rl.rollout import Rollout
from jpaged.rl.rollouts import PaddedRollouts, Rollouts

__all__ = ["PaddedRollouts", "Rollout", "Rollouts"]
