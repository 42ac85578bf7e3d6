"""The prefill for Hopper through Mosaic GPU: in Pallas' GPU interpreter against float64, lowered, and compiled.

The interpreter runs the copies, the barriers and the turns of the three warp groups. It has no matmul with registers,
so the second matmul reads its weights from shared memory here. It ignores layouts of shared memory: some copies into
tiled memory were right here and wrong on a GPU.
"""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jaxtyping
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import mosaic_gpu_prefill, triton
from tests.kernels import lowered
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import HGMMA_RATE, MatmulLoop, mosaic_kernel, tool
from tests.kernels.oracle import TOLERANCE, Shape, attention_call, expected, make_case
from tests.support.device_arrays import device_array
from tests.support.deviceless import H200

has_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="the prefill, and its interpreter, need JAX 0.11"
)
SLOW = pytest.mark.slow
# A unit has 32 tokens, a tile has two: the second unit of the first row begins earlier, the last row is shorter than a
# unit, and the row of one token belongs to another kernel. Tiles have 128 keys.
PLAIN = Shape(heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", tokens=56, rows=3, width=17)
ROWS = ((45, 257), (1, 30), (9, 128))


def prefill(shape, rows, params=None):
    """Outputs of rows with several tokens, and the expected ones."""
    case = make_case(shape, rows)
    call = jax.jit(mosaic_gpu_prefill.prefill)
    with plgpu.force_gpu_interpret_mode(*(() if params is None else (params,))):
        out = np.asarray(call(attention_call(shape, case)), np.float32)
    counts = [count for count, _ in rows]
    chosen = np.repeat(np.asarray(counts) > 1, counts)
    return out[: len(chosen)][chosen], expected(shape, case)[chosen]


@has_interpreter
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({}, ROWS, id="ragged"),
        pytest.param({"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 128}, ROWS, id="gqa-4-128", marks=SLOW),
        pytest.param({"heads": 3, "dtype": "float16", "block_size": 8, "width": 34}, ROWS, id="gqa-3", marks=SLOW),
        pytest.param({"window": 50}, ROWS, id="window"),
        # no query of the second unit sees a key of the first tile
        pytest.param({"window": 1}, ((56, 160),), id="window-1", marks=SLOW),
        pytest.param({"softcap": 2.0, "sinks": True, "slopes": True}, ROWS, id="softcap-sinks-alibi", marks=SLOW),
        # more tiles than shared memory holds
        pytest.param({"head_dim": 256, "block_size": 64, "width": 5}, ROWS, id="256", marks=SLOW),
        # the call has fewer tokens than a unit, and the last tile extends beyond the block table
        pytest.param({"tokens": 12, "width": 9}, ((3, 140), (9, 9)), id="few-tokens", marks=SLOW),
    ],
)
def test_matches_float64(options, rows):
    shape = dataclasses.replace(PLAIN, **options)
    out, right = prefill(shape, rows)
    np.testing.assert_allclose(out, right, atol=TOLERANCE[shape.dtype], rtol=0)


@has_interpreter
@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_other_rows():
    (alone, _), (together, _) = prefill(PLAIN, ((45, 257),)), prefill(PLAIN, ((45, 257), (1, 30), (9, 128)))
    np.testing.assert_array_equal(together[:45], alone)


@has_interpreter
@pytest.mark.slow
def test_bits_of_a_token_do_not_depend_on_the_chunk():
    """The last 20 tokens of a row as a chunk, and with the 31 tokens before them: other lanes, units and edges."""
    case = make_case(PLAIN, ((51, 260),))
    starts = np.full(PLAIN.rows + 1, 20, np.int32)
    starts[0] = 0
    queries = np.asarray(case["q"])[31:]
    last = case | {"q": device_array(queries, queries.dtype), "query_start_loc": device_array(starts, np.int32)}
    call = jax.jit(mosaic_gpu_prefill.prefill)
    with plgpu.force_gpu_interpret_mode():
        whole, chunk = (np.asarray(call(attention_call(PLAIN, each)), np.float32) for each in (case, last))
    np.testing.assert_array_equal(whole[31:51], chunk[:20])


@has_interpreter
def test_the_interpreter_finds_no_race(capsys):
    """The turns order the accesses of the two units. Copies against products are not compared: the detector ignores
    reads of a product.

    Whole units only: the last unit of other rows stores some tokens twice, with equal bits.
    """
    out, right = prefill(
        dataclasses.replace(PLAIN, tokens=64, window=150), ((64, 270),), plgpu.InterpretGPUParams(detect_races=True)
    )
    assert "RACE" not in capsys.readouterr().out
    np.testing.assert_allclose(out, right, atol=TOLERANCE["bfloat16"], rtol=0)


# The two kernels of this call run at once, and each has three warp groups that wait for each other. XLA's thread pool
# has a thread per core: on two cores, waiting warp groups hold both, and the others never start. NPROC sets the pool's
# size when a process creates its first array, hence the child process.
SELF_CHECK = """
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels import self_check
with plgpu.force_gpu_interpret_mode():
    print(self_check(implementation="mosaic_gpu", q_heads=2, kv_heads=1, head_dim=64, cases=("mixed",))["mixed"])
"""


@has_interpreter
@pytest.mark.slow
def test_self_check_finds_agreement():
    """Decodes and chunks in one call: each kernel leaves the rows of the other alone."""
    environment = os.environ | {"NPROC": "8", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SELF_CHECK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    assert 0 < float(done.stdout) < 1e-2


def test_the_decode_through_triton_completes_the_output():
    """The interpreter of Mosaic GPU takes no Triton kernels: the reference's output stands for that of the prefill."""
    shape = Shape(head_dim=64, dtype="bfloat16")
    case = make_case(shape)
    reference = functools.partial(paged_attention, **shape.options, max_query_len=64, implementation="reference")
    right, counts = np.asarray(jax.jit(reference)(**case)), np.diff(case["query_start_loc"])
    one_token, prefilled = np.repeat(counts == 1, counts), right.copy()
    prefilled[: len(one_token)][one_token] = 0
    call = jax.jit(functools.partial(triton.paged_attention, interpret=True))
    out = np.asarray(call(attention_call(shape, case), prefilled=prefilled))
    assert prefilled[0].any() != out[0].any()  # the first row has one token
    used = len(one_token)
    np.testing.assert_allclose(
        *(a[:used].astype(np.float32) for a in (out, right)), atol=TOLERANCE["bfloat16"], rtol=0
    )


@has_interpreter
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(head_dim=64), "q float32"),
        (Shape(head_dim=32, dtype="bfloat16"), "head_dim=32"),
        (Shape(head_dim=64, dtype="bfloat16", kv_dtype="int8"), "pages int8"),
        (Shape(head_dim=64, dtype="bfloat16", block_size=192, width=2), "block_size=192"),
    ],
)
@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_prefill"])
def test_refused_calls_are_named(name, shape, message):
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=message):
        paged_attention(**make_case(shape), scale=1.0, max_query_len=64, implementation=name)


def test_old_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ValueError, match=r"needs JAX 0\.11 or newer"):
        lower_for("cuda", *lowered.attention("llama-3-8b", 32, "mosaic_prefill", lowered.HOPPER))


@has_interpreter
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name != "gqa-7-64")) for name in lowered.HOPPER]
)
def test_lowers(name):
    call = lowered.attention(name, 32, "mosaic_prefill", lowered.HOPPER)
    text = lower_for("cuda", *call)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "paged_prefill_mosaic" in text
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2  # decode and its merge


@has_interpreter
def test_copies_of_queries_and_outputs_have_no_tiles():
    """Units begin at any token. A copy that tiles the array by 8 tokens would end at a multiple of 8.

    The interpreter does not know the difference. Mosaic GPU accepts such a copy if the number of tokens is a multiple.
    """
    call, (q, *rest) = lowered.attention("llama-3-8b", 32, "mosaic_prefill", lowered.HOPPER)
    lower_for("cuda", call, (lowered.array((20, *q.shape[1:]), q.dtype), *rest))


def counted(loop, *names):
    return [sum(name in instruction for instruction in loop) for name in names]


@pytest.mark.deviceless
@pytest.mark.skipif(H200.missing is not None, reason="needs jax-cuda13-plugin")
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(
    "name", ["llama-3-8b", "gqa-7-64", pytest.param("mha-256", marks=SLOW), pytest.param("mqa-softcap", marks=SLOW)]
)
def test_machine_code_for_an_h200(name, tmp_path, monkeypatch):
    """The matmuls of both units and the softmax overlap, pages come by the tensor memory accelerator, no spills."""
    variants = lowered.HOPPER | {"mha-256": lowered.ATTENTION["mha-256"]}
    kernel = mosaic_kernel(*lowered.attention(name, 32, "mosaic_prefill", variants), tmp_path, monkeypatch)
    head_dim, block_size, options = (variants[name][i] for i in (1, 4, 5))
    assert kernel.registers == 168  # 3 warp groups fill a multiprocessor; then they change the number
    keys = mosaic_gpu_prefill.tile_keys(head_dim)
    attend = sorted((loop for loop in kernel.loops if any("HGMMA" in i for i in loop)), key=len)
    inside, *edges = map(MatmulLoop.of, attend)
    (copy,) = [loop for loop in kernel.loops if any("UTMALDG" in i for i in loop)]
    print(f"{name}: {inside} for {keys} keys, edges {edges}, {len(copy)} to copy, {kernel.spilled_bytes} bytes spilled")
    assert len(edges) == (2 if "sliding_window" in options else 1)
    for loop in (inside, *edges):
        assert loop.matmul_cycles == 2 * 64 * keys * head_dim // HGMMA_RATE
        # the other unit may issue its matmuls before these have ended
        assert loop.passes_turn
        # the softmax runs between the wait for the scores and the wait for the second matmul, which is in flight
        assert loop.overlapped > 0.5 * loop.instructions - 64
    assert counted(attend[0], "STL", "LDSM", "BAR.SYNC") == [0, 0, 0]
    assert inside.spills <= (2 if head_dim == 256 else 0)  # with 256, two addresses are read again
    assert counted(copy, "HGMMA") == [0]
    # each warp of the third group copies half a tile of keys, or of values
    pieces = keys // min(block_size, keys)
    assert counted(copy, "UTMALDG") == [max(1, pieces // 2)]
    # A scheduler issues for a warp of each unit, and for a warp that copies. The tensor cores take longer.
    if "logit_softcap" not in options:  # a soft cap takes three exponentials per score
        assert 2 * inside.instructions + len(copy) < 2 * inside.matmul_cycles
    if name == "llama-3-8b":
        assert inside.instructions < 520
        assert edges[0].instructions < 760
