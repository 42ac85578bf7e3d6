"""The host side under random arrivals, forks, aborts and failures. Every request gets the same tokens as alone."""


import pytest
from hypothesis import settings

from tests.engine.adapter_machine import AdapterMachine
from tests.engine.engine_machine import EngineMachine
from tests.engine.hybrid_machine import (
    AdapterHybridMachine,
    HostHybridMachine,
    HybridMachine,
    SpeculatingHybridMachine,
    WeightsHybridMachine,
)
from tests.engine.speculating_machine import SpeculatingMachine
from tests.engine.weights_machine import WeightsMachine


class TestEngine(EngineMachine.TestCase):
    """15 examples. The gate runs TestEngineLonger too."""

    settings = settings(max_examples=15, stateful_step_count=40)


@pytest.mark.slow
class TestEngineLonger(EngineMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


class TestSpeculation(SpeculatingMachine.TestCase):
    """With verify steps. The gate runs TestSpeculationLonger too."""

    settings = settings(max_examples=8, stateful_step_count=30)


@pytest.mark.slow
class TestSpeculationLonger(SpeculatingMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)


class TestAdapters(AdapterMachine.TestCase):
    """With LoRA adapters. The gate runs TestAdaptersLonger too."""

    settings = settings(max_examples=5, stateful_step_count=30)


@pytest.mark.slow
class TestAdaptersLonger(AdapterMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


class TestHybrid(HybridMachine.TestCase):
    """With recurrent layers. The gate runs TestHybridLonger too."""

    settings = settings(max_examples=5, stateful_step_count=30)


@pytest.mark.slow
class TestHybridLonger(HybridMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.slow
class TestHostHybridLonger(HostHybridMachine.TestCase):
    """With recurrent layers whose snapshots go to the host tier and return."""

    settings = settings(max_examples=30, stateful_step_count=30)


class TestSpeculatingHybrid(SpeculatingHybridMachine.TestCase):
    """With recurrent layers and verify steps. The gate runs TestSpeculatingHybridLonger too."""

    settings = settings(max_examples=3, stateful_step_count=30)


class TestAdapterHybrid(AdapterHybridMachine.TestCase):
    """With recurrent layers and LoRA adapters. The gate runs TestAdapterHybridLonger too."""

    settings = settings(max_examples=2, stateful_step_count=25)


@pytest.mark.slow
class TestAdapterHybridLonger(AdapterHybridMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


class TestWeightsHybrid(WeightsHybridMachine.TestCase):
    """With recurrent layers and updates of the weights. The gate runs TestWeightsHybridLonger too."""

    settings = settings(max_examples=2, stateful_step_count=25)


@pytest.mark.slow
class TestWeightsHybridLonger(WeightsHybridMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
class TestSpeculatingHybridLonger(SpeculatingHybridMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)


class TestWeights(WeightsMachine.TestCase):
    """With updates of the weights. The gate runs TestWeightsLonger too."""

    settings = settings(max_examples=6, stateful_step_count=25)


@pytest.mark.slow
class TestWeightsLonger(WeightsMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)


def test_no_name_lies_when_weights_are_deleted_and_the_step_in_flight_fails() -> None:
    """Found by TestWeightsLonger: a step that is dropped and has failed has lost the pages."""
    machine = WeightsMachine()
    machine.setup(
        block_size=1, windows=(None,), model_len=4, longrope_switch_len=None, extra_blocks=0, rows=1, stages=1,
        extra_budget=5, caching=True, host_slots=0, costs=None, policy="fcfs", partial=1, target_ms=None,
        failures=frozenset([("dispatch", 0), ("collect", 2)]), crowd=0,
    )  # fmt: skip
    machine.abort_all_and_update()
    machine.update_and_ask_again(count=4)
    assert machine.engine.pipeline.has_steps
    machine.lose_weights(deleted=True)
    machine.sound()


# hypothesis shrinks a failing example for up to 300 s: the usual timeout would end the process before it is printed
pytestmark = pytest.mark.timeout(900)
