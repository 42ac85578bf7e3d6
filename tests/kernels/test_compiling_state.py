"""Kernels with a state lower for accelerators, and compile for an H200 and a v5e without the devices.

The states are updated in place: no operation of the compiled program makes an array of their size.
"""

import re

import pytest

from jpaged.runtime.targets import TARGETS
from pallas_kernels.state_scan.chunk import FEW
from pallas_kernels.state_scan.triton_chunks import CHUNK
from tests.kernels import lowered_state as lowered
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import compile_for, kernels_of, tool
from tests.support.deviceless import H200, V5E, compile_for_v5e, deviceless, on_v5e, page

slow = pytest.mark.slow
BOTH_KINDS = pytest.mark.parametrize("max_query_len", [1, 400], ids=["decode", "mixed"])
KERNELS = ("state_step", "state_matrices", "state_chunks")  # for NVIDIA
DEFAULT = "qwen3-next-80b"  # the others take minutes to compile
SOME_SCANS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * (name != DEFAULT)) for name in lowered.SCANS]
)
SOME_CONVOLUTIONS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * bool(i)) for i, name in enumerate(lowered.CONVOLUTIONS)]
)


@SOME_SCANS
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_kernels_lower(platform, name):
    """The kernel of the platform is chosen. A call without long rows has no kernel for chunks."""
    suffix = "_tpu" if platform == "tpu" else ""
    chunks = {"state_chunks"} if platform == "tpu" else {"state_matrices", "state_chunks"}
    for most in (FEW, FEW + 1):
        expected = {"state_step", *(chunks if most > FEW else ())}
        text = lower_for(platform, *lowered.scan(name, most, None))
        if most == FEW:
            assert f"state_step{suffix}" in lower_for(platform, *lowered.to_targets(name, most, None))
        found = re.findall(rf"state_(?:step|matrices|chunks){suffix}\b", text)
        assert set(found) == {each + suffix for each in expected}


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
    assert len(kernels) == (3 if max_query_len > FEW else 1)
    assert copies(program.as_text(), states) == []
    assert memory.alias_size_in_bytes >= 4 * states.size
    numbers = 2 * CHUNK + (3.2 * lowered.SCANS[name][3] if name in lowered.BY_CHANNEL else 4)  # of a token and head
    matrices = 4 * (max_query_len > FEW) * lowered.TOKENS * states.shape[1] * numbers
    assert memory.temp_size_in_bytes < states.size // 100 + 1.01 * matrices


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
@pytest.mark.parametrize(
    ("target", "arch"),
    [("h200", "sm_90a"), pytest.param("a100", "sm_80", marks=slow), pytest.param("l4", "sm_89", marks=slow)],
)
@SOME_SCANS
def test_no_register_is_spilled(name, target, arch, tmp_path):
    """A mixed step has all kernels. Four programs of a decode fit a multiprocessor."""
    made = kernels_of(*lowered.scan(name, 400, None), tmp_path, "state_.*", target=TARGETS[target], arch=arch)
    assert {kernel: facts.spilled_bytes for kernel, facts in made.items()} == dict.fromkeys(KERNELS, 0)
    print(*(f"{kernel}: {facts.registers} registers" for kernel, facts in made.items()), sep=", ")
    assert made["state_step"].resident_blocks >= 4
    if arch == "sm_90a" and lowered.SCANS[name][3] <= 128:
        (loop,) = made["state_chunks"].loops
        assert sum("HGMMA" in i for i in loop) >= 48, "a product does not use Hopper's matmul instructions"
        assert not any(i.startswith("HMMA") for i in loop)


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
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1 + (max_query_len > FEW)
    assert copies(program.as_text(), states) == []
    assert memory.alias_size_in_bytes >= 4 * states.size
    assert memory.temp_size_in_bytes < 2 * states.size  # half of the states: tokens gathered in chunks


@deviceless(H200)
@BOTH_KINDS
@SOME_CONVOLUTIONS
def test_convolutions_stay_in_place_on_an_h200(name, max_query_len):
    call, arguments = lowered.convolution(name, max_query_len, None)
    program = compile_for(H200, call, arguments, donate_argnums=3)
    assert " while(" not in program.as_text(), "a loop launches kernels of its own"
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
