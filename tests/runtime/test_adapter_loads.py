"""Adapters that are written into their slots when the device fails one of the writes."""

import types

import pytest

from jpaged.engine.step_plan import AdapterLoad
from jpaged.runtime.stage_runner import StageRunner


def test_steps_read_the_newest_pools_after_a_failed_write():
    """A write donates the pools, so the pools before it cannot be read."""
    stage, used = object.__new__(StageRunner), []

    def write(pools, slot, content):
        if content == "fails":
            raise MemoryError("out of memory")
        return f"{pools} {content}"

    stage.adapters, stage.params, stage._write_slot = "pools", {}, write
    stage._use = types.MethodType(lambda self, params: used.append(self.adapters), stage)
    with pytest.raises(MemoryError):
        stage.load_adapters([AdapterLoad(0, "a"), AdapterLoad(1, "fails")])
    assert used == ["pools a"]
