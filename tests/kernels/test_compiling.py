"""Every variant of the kernels compiles for an H200, without the device: shared memory fits, pages stay in place.

The machine code of attention is fast: no spilled registers, copies during matmuls, enough programs per multiprocessor.
"""

import re

import pytest

from jpaged.runtime.targets import TARGETS
from tests.kernels import lowered
from tests.kernels.machine_code import compile_for, kernels_of, tool
from tests.support.deviceless import H200, marks

pytestmark = marks(H200)
with_disassembler = pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")


def kernels(program):
    """Names of the kernels in a compiled program."""
    return re.findall(r'name = "(\w+)", num_stages', program.as_text())


@pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", lowered.ATTENTION)
def test_attention_compiles(name, max_query_len):
    program = compile_for(H200, *lowered.attention(name, max_query_len, "triton"))
    assert len(kernels(program)) == (2 if max_query_len == 1 else 3)


@pytest.mark.parametrize("name", ["llama-3-8b", "float32-256"])
def test_the_small_kernels_compile(name):
    assert len(kernels(compile_for(H200, *lowered.attention(name, 32, "triton_small")))) == 2  # one split: no merge


@pytest.mark.parametrize("name", ["llama-3-8b", "mha-256", "float32-256", "int8"])
def test_kernels_compile_for_a_card_with_little_shared_memory(name):
    """An L4's blocks have 99 KiB."""
    assert len(kernels(compile_for(TARGETS["l4"], *lowered.attention(name, 32, "triton")))) == 3


@with_disassembler
@pytest.mark.parametrize("name", lowered.ATTENTION)
def test_machine_code_of_attention(name, tmp_path):
    """The call is a mixed step, which has all kernels."""
    made = kernels_of(*lowered.attention(name, 32, "triton"), tmp_path)
    decode, prefill = made["paged_decode"], made["paged_prefill"]
    assert {kernel.spilled_bytes for kernel in made.values()} == {0}
    whole = "float32" not in name  # products of float32 do not use the matrix units, and need more registers
    if name in WIDE:
        assert decode.resident_blocks >= WIDE[name]
        assert_wide_prefill(prefill)
        return
    assert decode.resident_blocks >= (3 if whole else 2)
    (loop,) = [loop for loop in decode.loops if any("LDGSTS" in i for i in loop)]
    assert any("LDGSTS" in i and ".128" in i for i in loop) or name == "int8-float32"  # rows of 64 bytes
    waits = [i for i in loop if i.startswith("DEPBAR")]
    assert waits
    assert not any("0x0" in i for i in waits), "the loop waits for every copy in flight"
    if whole:
        assert all(any("HGMMA" in i for i in loop) for loop in prefill.loops)
    if name == "llama-3-8b":
        inside, edge = sorted(map(len, prefill.loops))
        print(f"prefill: {inside} instructions a tile of 64 keys, {edge} at the edges; decode {len(loop)}")
        assert inside < 450
        assert edge < 650


# Wide heads: decode programs of a multiprocessor
WIDE = {"gemma-4-512": 2, "float32-512": 2, "deepseek-v3": 1, "kimi-k2": 1}


def assert_wide_prefill(prefill):
    """One loop, with Hopper's matrix instructions for bfloat16. The compiler does not wait for each of them."""
    (loop,) = prefill.loops
    matmuls = sum("HGMMA" in i for i in loop)
    waits = sum(i.startswith("WARPGROUP.DEPBAR") for i in loop)
    print(f"prefill: {len(loop)} instructions, {matmuls} matmuls, {waits} waits, {prefill.shared_bytes >> 10} KiB")
    assert waits <= 2
    assert (matmuls >= 33 and len(loop) < 700) or prefill.shared_bytes <= 96 << 10


@with_disassembler
def test_machine_code_of_sparse_attention(tmp_path):
    """Single tokens are copied into shared memory in 16-byte pieces, while the tile before is multiplied."""
    call, arguments = lowered.sparse_attention()
    made = kernels_of(call, arguments, tmp_path)
    (decode,) = [kernel for name, kernel in made.items() if name == "paged_decode"]
    assert {kernel.spilled_bytes for kernel in made.values()} == {0}
    assert "paged_decode_merge" not in made  # 64 rows fill the device without splits
    (loop,) = decode.loops
    assert sum("HGMMA" in i for i in loop) == 37
    assert all(".128" in i for i in loop if "LDGSTS" in i and "BYPASS" in i)
    assert any("LDGSTS" in i for i in loop)


@with_disassembler
@pytest.mark.parametrize("name", ["llama-3-8b", pytest.param("gqa-7-64-sinks", marks=pytest.mark.slow)])
def test_a_prefill_for_an_a100_reads_little_shared_memory(name, tmp_path):
    """An A100's matmuls read keys and values from shared memory, 128 bytes a cycle: fewer cycles than they compute."""
    call = lowered.attention(name, 32, "triton")
    prefill = kernels_of(*call, tmp_path, "paged_prefill", target=TARGETS["a100"], arch="sm_80")["paged_prefill"]
    inside = min((loop for loop in prefill.loops if any("HMMA" in i for i in loop)), key=len)
    warps, count = prefill.threads // 32, {name: sum(name in i for i in inside) for name in ("HMMA", "LDSM", "LDL")}
    reading = warps * count["LDSM"] * 512 / 128
    matmuls = warps * count["HMMA"] * 16 * 8 * 16 / 1024
    print(f"{name}: {len(inside)} instructions, {count}, {reading:.0f} cycles to read, {matmuls:.0f} of matmuls")
    assert reading < 0.8 * matmuls
    assert warps // 4 * len(inside) < 1.4 * matmuls
    assert count["LDL"] <= 8
    # two blocks of a multiprocessor: one computes its softmax while the other one multiplies
    assert prefill.registers * prefill.threads <= 65_536 / 2
    assert prefill.shared_bytes + 1024 <= 167_936 / 2


@with_disassembler
def test_decode_programs_follow_the_card_not_the_block_table(tmp_path):
    """3 for each of 132 multiprocessors, whether requests may have 8,192 tokens or 131,072."""
    for width in (512, 8192):
        folder = tmp_path / str(width)
        folder.mkdir()
        call, (q, pages, _, lens, starts) = lowered.attention("llama-3-8b", 1, "triton")
        tables = lowered.array((lens.shape[0], width), "int32")
        made = kernels_of(call, (q, pages, tables, lens, starts), folder)
        assert made["paged_decode"].blocks == 3 * 132


@with_disassembler
@pytest.mark.parametrize(
    ("rows", "tiles", "shared", "resident"),
    [(1, 224, 96, 2), (64, 224, 96, 2), (256, 224, 192, 1), (2048, 1792, 192, 1)],
)
def test_machine_code_of_gated_dot(rows, tiles, shared, resident, tmp_path):
    """Llama 3.1 8B: both sums in Hopper's matrix instructions, two tiles in flight while they run, nothing spilled."""
    (kernel,) = kernels_of(*lowered.gated(rows), tmp_path).values()
    assert (kernel.blocks, kernel.shared_bytes, kernel.resident_blocks) == (tiles, shared << 10, resident)
    assert kernel.spilled_bytes == 0
    (loop,) = kernel.loops
    print(f"{rows} rows: {len(loop)} instructions, {kernel.registers} registers")
    assert len(loop) < 120
    assert sum("HGMMA" in i for i in loop) == 8  # 64 inputs are four instructions a matrix
    copies = [i for i in loop if "LDGSTS" in i]
    assert copies
    assert all(".128" in i for i in copies)
    # x, gate and up are copied as three groups
    assert [i.split()[-1] for i in loop if i.startswith("DEPBAR")] == ["0x6"]
    assert [i.split()[-1] for i in loop if i.startswith("WARPGROUP.DEPBAR")] == ["0x2"], "a product waits for the last"


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("target", ["l4", "a100"])
def test_gated_dot_compiles_for_older_cards(target, rows):
    assert kernels(compile_for(TARGETS[target], *lowered.gated(rows))) == ["gated_dot"]


@pytest.mark.parametrize("name", [*lowered.QKV, *range(len(lowered.WRITES))])
def test_writes_compile_and_stay_in_place(name):
    """The write is one kernel. Input and output pages are the same buffer, and no other operation uses it."""
    if name in lowered.QKV:
        call, arguments = lowered.writing_qkv(name, "triton")
    else:
        call, arguments = lowered.writing(*lowered.WRITES[name], "triton")
    program = compile_for(H200, call, arguments, donate_argnums=0)
    pages = arguments[0]
    memory = program.memory_analysis()
    assert len(kernels(program)) == 1
    changed = pages.num_bytes - (0 if pages.dtype != "float8_e4m3fn" else pages.scales.size * 4)
    assert memory.alias_size_in_bytes >= changed
    assert memory.temp_size_in_bytes < changed // 100
