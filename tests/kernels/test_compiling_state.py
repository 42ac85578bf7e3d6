"""Kernels with a state lower for accelerators, and compile for an H200 and a v5e without the devices.

The states are updated in place: no operation of the compiled program makes an array of their size.
"""

import re

import pytest

from pallas_kernels.state_scan.chunk import FEW
from tests.kernels import lowered_state as lowered
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import compile_for, kernels_of, tool
from tests.support.deviceless import H200, V5E, compile_for_v5e, deviceless, on_v5e, page

BOTH_KINDS = pytest.mark.parametrize("max_query_len", [1, 400], ids=["decode", "mixed"])
DEFAULT = "qwen3-next-80b"  # the others take minutes to compile
SOME_SCANS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != DEFAULT)) for name in lowered.SCANS]
)
SOME_CONVOLUTIONS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * bool(i)) for i, name in enumerate(lowered.CONVOLUTIONS)]
)


@SOME_SCANS
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_kernels_lower(platform, name):
    """The kernel of the platform is chosen. A call without long rows, or by channel, has no kernel for chunks."""
    suffix = "_tpu" if platform == "tpu" else ""
    for most in (FEW, FEW + 1):
        expected = {"state_step", "state_chunks"} if has_chunks(name, most) else {"state_step"}
        text = lower_for(platform, *lowered.scan(name, most, None))
        if most == FEW:
            assert f"state_step{suffix}" in lower_for(platform, *lowered.to_targets(name, most, None))
        assert set(re.findall(rf"state_(?:step|chunks){suffix}\b", text)) == {each + suffix for each in expected}


def has_chunks(name, max_query_len):
    """True if the call has a kernel for chunks."""
    return max_query_len > FEW and name not in lowered.BY_CHANNEL


def copies(text, states):
    """Operations whose result has the shape of the states."""
    shape = ",".join(map(str, states.shape))
    return re.findall(rf"= \w+\[{shape}\]\S* (copy|copy-start|copy-done|transpose|convert|fusion)\(", text)


@deviceless(H200)
@BOTH_KINDS
@SOME_SCANS
def test_scans_stay_in_place_on_an_h200(name, max_query_len):
    argument = lowered.STATES[lowered.SCANS[name][0]]
    call, arguments = lowered.scan(name, max_query_len, None)
    program = compile_for(H200, call, arguments, donate_argnums=argument)
    states, memory = arguments[argument], program.memory_analysis()
    kernels = re.findall(r'name = "state_\w+", num_stages', program.as_text())
    assert len(kernels) == 1 + has_chunks(name, max_query_len)
    assert copies(program.as_text(), states) == []
    assert memory.alias_size_in_bytes >= 4 * states.size
    assert memory.temp_size_in_bytes < states.size // 100


@deviceless(H200)
def test_states_with_targets_stay_in_place_on_an_h200():
    call, arguments = lowered.to_targets(DEFAULT, FEW, None)
    program = compile_for(H200, call, arguments, donate_argnums=5)
    assert copies(program.as_text(), arguments[5]) == []
    assert program.memory_analysis().alias_size_in_bytes >= 4 * arguments[5].size


@deviceless(V5E)
def test_states_with_targets_stay_in_place_on_a_v5e():
    call, arguments = lowered.to_targets(DEFAULT, FEW, None)
    states = arguments[5]
    program = compile_for_v5e(
        call, arguments, lambda x: page(x, V5E) if x is states else on_v5e(x), donate_argnums=5,
        out_shardings=(V5E.sharding(), page(states, V5E).format),
    )  # fmt: skip
    assert copies(program.as_text(), states) == []
    assert program.memory_analysis().alias_size_in_bytes >= 4 * states.size


@deviceless(H200)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@SOME_SCANS
def test_decodes_keep_the_state_in_registers(name, tmp_path):
    made = kernels_of(*lowered.scan(name, 1, None), tmp_path, "state_step")
    assert made["state_step"].spilled_bytes == 0
    assert made["state_step"].resident_blocks >= 4


@deviceless(V5E)
@BOTH_KINDS
@SOME_SCANS
def test_scans_stay_in_place_on_a_v5e(name, max_query_len):
    """States are row-major, as pages. With heads of 64 numbers XLA would choose another layout, and copy them."""
    argument = lowered.STATES[lowered.SCANS[name][0]]
    call, arguments = lowered.scan(name, max_query_len, None)
    states = arguments[argument]

    def place(x):
        return page(x, V5E) if x is states else on_v5e(x)

    program = compile_for_v5e(
        call, arguments, place, donate_argnums=argument, out_shardings=(V5E.sharding(), page(states, V5E).format)
    )
    memory = program.memory_analysis()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1 + has_chunks(name, max_query_len)
    assert copies(program.as_text(), states) == []
    assert memory.alias_size_in_bytes >= 4 * states.size
    assert memory.temp_size_in_bytes < 2 * states.size  # half of the states: tokens gathered in chunks


@deviceless(H200)
@BOTH_KINDS
@SOME_CONVOLUTIONS
def test_convolutions_stay_in_place_on_an_h200(name, max_query_len):
    call, arguments = lowered.convolution(name, max_query_len, None)
    program = compile_for(H200, call, arguments, donate_argnums=3)
    assert "copy" not in copies(program.as_text(), arguments[3])
    assert program.memory_analysis().alias_size_in_bytes >= arguments[3].size * arguments[3].dtype.itemsize


@deviceless(V5E)
@BOTH_KINDS
@SOME_CONVOLUTIONS
def test_convolutions_stay_in_place_on_a_v5e(name, max_query_len):
    call, arguments = lowered.convolution(name, max_query_len, None)
    program = compile_for_v5e(call, arguments, donate_argnums=3)
    assert "copy" not in copies(program.as_text(), arguments[3])
    assert program.memory_analysis().alias_size_in_bytes >= arguments[3].size * arguments[3].dtype.itemsize
