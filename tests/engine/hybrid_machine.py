"""The state machine of `engine_machine` for a model with recurrent layers."""

from jpaged.engine.step_plan import RecurrentSizes
from tests.engine.engine_machine import EngineMachine


class HybridMachine(EngineMachine):
    """A KV group without a window, one pipeline stage, and any number of snapshots."""

    def kinds(self, windows: tuple[int | None, ...], stages: int) -> tuple[tuple[int | None, ...], int]:
        """Windows of the KV groups, and the number of pipeline stages."""
        return (windows if None in windows else (None, *windows)), 1

    def recurrent_sizes(self, rows: int, number: int) -> RecurrentSizes | None:
        """Slots of recurrent state. number: decides them."""
        return RecurrentSizes(rows, num_snapshots=(0, 1, 3, 8, 40)[number % 5], interval=1 + number // 5 % 3)
