"""Choice of implementations by device and shape, and `self_check`, which detects wrong ones."""

import dataclasses
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelCheckError, KVPages, paged_attention, self_check
from pallas_kernels.native import library
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation, cpu
from pallas_kernels.platforms import Implementation, choose, default_device
from tests.kernels.fake_devices import device_like
from tests.kernels.oracle import Shape, make_case

# import_module, because the package has functions of the same names
write_kv, write_qkv = (importlib.import_module(f"pallas_kernels.{name}") for name in ("write_kv", "write_qkv"))


@pytest.mark.parametrize(
    ("implementation", "kv_dtype"),
    [
        ("xla_loop", None), ("triton", None), ("triton", "int8"), ("mosaic_tpu", None),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_self_check_finds_agreement(implementation, kv_dtype):
    errors = self_check(implementation=implementation, dtype=jnp.float32, kv_dtype=kv_dtype, head_dim=16, q_heads=4)
    assert set(errors) == {"decode", "chunks", "mixed"}
    assert max(errors.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [24, 1000, 2048])
def test_self_check_takes_any_block_size(block_size):
    errors = self_check(
        implementation="xla_loop", dtype=jnp.float32, head_dim=16, q_heads=4, block_size=block_size, cases="chunks",
        sliding_window=100, logit_softcap=5.0,
    )  # fmt: skip
    assert 0 < errors["chunks"] < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block_size": 0}, "block_size=0"), ({"dtype": jnp.int8}, "dtype=int8"), ({"cases": ("d",)}, "cases="),
     ({"cases": ()}, "cases=")],
)  # fmt: skip
def test_self_check_names_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        self_check(implementation="xla_loop", **options)


def test_self_check_detects_a_wrong_write(monkeypatch):
    def one_slot_late(pages, k, v, slots):
        return pages.scatter(k, v, jnp.where(slots < 0, slots, slots + 1))

    monkeypatch.setitem(write_kv.IMPLEMENTATIONS, "triton", Implementation(one_slot_late))
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", IMPLEMENTATIONS["xla_loop"])  # quick to compile
    with pytest.raises(KernelCheckError, match=r"'triton' writes, keys on .*case decode .*differs from the reference"):
        self_check(implementation="triton", dtype=jnp.float32, head_dim=8, q_heads=4)  # a shape not traced before


@pytest.mark.slow
@pytest.mark.parametrize("key_dim", [None, 24], ids=["dense", "sparse"])
def test_self_check_takes_latent_pages(key_dim):
    """Dense, and with a row for each token, whose keys are blocks of one token."""
    options = {"head_dim": 40, "v_dim": 16, "key_dim": key_dim, "q_heads": 4, "kv_heads": 1, "dtype": jnp.float32}
    assert 0 < self_check(implementation="triton", cases="decode", **options)["decode"] < 1e-5


@pytest.mark.slow
def test_self_check_detects_nan(monkeypatch):
    """Queries that a wrong write has made NaN are found, although attention is then NaN in the reference too."""
    def nan_queries(*args):
        q, pages = write_qkv.IMPLEMENTATIONS["xla"].call(*args)
        return q.at[0].set(jnp.nan), pages

    monkeypatch.setitem(write_qkv.IMPLEMENTATIONS, "triton", Implementation(nan_queries))
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", IMPLEMENTATIONS["xla_loop"])  # quick to compile
    with pytest.raises(KernelCheckError, match=r"write_qkv 'triton', queries on .* by nan"):
        self_check(implementation="triton", dtype=jnp.float32, head_dim=8, q_heads=2, kv_heads=1)


def test_self_check_detects_a_wrong_kernel(monkeypatch):
    def without_scale(call):
        return IMPLEMENTATIONS["xla_loop"].call(dataclasses.replace(call, scale=1.0))

    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", Implementation(without_scale))
    with pytest.raises(KernelCheckError, match=r"'wrong' on .*case decode .*differs from the reference by"):
        self_check(implementation="wrong", dtype=jnp.float32, head_dim=16, q_heads=4)


@pytest.mark.slow
def test_self_check_detects_other_bits(monkeypatch):
    """A kernel with a race may be right within the tolerance, and has other bits in some runs."""
    runs = itertools.count()

    def unsteady(call):
        out = IMPLEMENTATIONS["xla_loop"].call(call)
        noise = jax.pure_callback(lambda: np.float32(next(runs) // 8 * 1e-7), jax.ShapeDtypeStruct((), np.float32))
        return out + noise

    monkeypatch.setitem(IMPLEMENTATIONS, "unsteady", Implementation(unsteady))
    options = {"dtype": jnp.float32, "head_dim": 16, "q_heads": 4, "cases": "prompts"}
    with pytest.raises(KernelCheckError, match=r"'unsteady' on .*case prompts: has other bits in another run"):
        self_check(implementation="unsteady", **options)
    assert self_check(implementation="xla_loop", **options)["prompts"] < 1e-5


@pytest.mark.parametrize(
    ("option", "argument"),
    [("with_sinks", "sinks"), pytest.param("with_alibi", "alibi_slopes", marks=pytest.mark.slow)],
)
def test_self_check_detects_a_kernel_that_ignores_an_option(monkeypatch, option, argument):
    def ignores_option(call):
        return IMPLEMENTATIONS["xla_loop"].call(dataclasses.replace(call, **{argument: None}))

    monkeypatch.setitem(IMPLEMENTATIONS, f"no {argument}", Implementation(ignores_option))
    with pytest.raises(KernelCheckError, match=rf"'no {argument}' on .*differs from the reference by"):
        self_check(
            implementation=f"no {argument}", dtype=jnp.float32, head_dim=16, q_heads=4, cases="decode", **{option: True}
        )
    self_check(implementation="xla_loop", dtype=jnp.float32, head_dim=16, q_heads=4, cases="decode", **{option: True})


@pytest.mark.parametrize(("capability", "write"), [("8.0", "xla"), ("8.9", "triton"), ("7.5", "xla")])
def test_choice_of_the_write_for_fp8(capability, write):
    pages = KVPages.shapes(32, 16, 2, 128, "float8_e4m3fn")
    assert choose(write_kv.IMPLEMENTATIONS, device_like("gpu", capability), pages) == write


def test_the_default_device_decides():
    device = jax.devices()[0]
    assert default_device() == device
    with jax.default_device(device):
        assert default_device() == device
    with jax.default_device("cpu"):
        assert default_device() == device


def call_shapes(head_dim=128, kv_dtype="bfloat16", v_dim=None, block_size=16):
    q = jax.ShapeDtypeStruct((8, 4, head_dim), jnp.dtype("bfloat16"))
    tables = jax.ShapeDtypeStruct((8, 16), jnp.dtype("int32"))
    return q, KVPages.shapes(32, block_size, 2, head_dim, kv_dtype, v_dim=v_dim), tables, 1


@pytest.mark.parametrize(
    ("device", "call", "name"),
    [
        (("cpu",), {}, "cpu" if library.native(cpu.KERNEL).name else "xla_loop"),
        (("tpu",), {}, "mosaic_tpu"),
        (("tpu",), {"kv_dtype": "int8"}, "xla"),  # blocks of 16 tokens
        (("tpu",), {"kv_dtype": "int8", "block_size": 64}, "mosaic_tpu"),
        (("tpu",), {"kv_dtype": "float8_e4m3fn", "block_size": 32}, "mosaic_tpu"),
        (("tpu",), {"head_dim": 576, "v_dim": 512}, "xla"),
        (("gpu", "9.0"), {}, "triton"),  # every row has one token
        (("gpu", "7.5"), {}, "xla"),
        (("gpu", "gfx942"), {}, "xla"),
        (("gpu", "9.0"), {"head_dim": 512}, "triton"),  # Gemma 4
        (("gpu", "9.0"), {"head_dim": 520}, "xla"),
        (("gpu", "9.0"), {"head_dim": 704, "v_dim": 512}, "triton"),  # DeepSeek V3.2
        (("gpu", "9.0"), {"head_dim": 704, "v_dim": 520}, "xla"),
        (("gpu", "8.0"), {"kv_dtype": "int8"}, "triton"),
        (("gpu", "8.0"), {"kv_dtype": "float8_e4m3fn"}, "xla"),
        (("gpu", "8.9"), {"kv_dtype": "float8_e4m3fn"}, "triton"),
    ],
)
def test_device_and_shape_decide_the_implementation(device, call, name):
    assert choose_implementation(device_like(*device), *call_shapes(**call)) == name


@pytest.mark.parametrize(
    ("name", "device", "shape", "message"),
    [
        ("cpu", ("gpu", "9.0"), Shape(), "it is for CPU, not for a device. Leave it out"),
        ("mosaic_tpu", ("gpu", "9.0"), Shape(), "for TPU"),
        ("mosaic_tpu", ("tpu",), Shape(kv_dtype="int8"), "block_size=16: it takes multiples of 32 for int8"),
        ("mosaic_tpu", ("tpu",), Shape(dtype="float16"), "float16"),
        ("mosaic_tpu", ("tpu",), Shape(dtype="bfloat16", block_size=8, width=40), "multiples of 16"),
        ("mosaic_gpu", ("gpu", "8.0"), Shape(), "Hopper"),
        ("triton", ("gpu", "7.5"), Shape(), "compute capability 8.0 .Ampere. or newer, a device has 7.5"),
        ("triton", ("gpu", "gfx942"), Shape(), "for NVIDIA"),
        ("triton", ("tpu",), Shape(), "for NVIDIA"),
        ("triton", ("gpu", "8.0"), Shape(kv_dtype="float8_e4m3fn"), "8.9"),
        ("triton", ("gpu", "9.0"), Shape(head_dim=520), "head_dim 520 with values of 520: it takes up to 768"),
        ("triton", ("gpu", "8.0"), Shape(heads=128, kv_heads=1, head_dim=576, v_dim=512, dtype="bfloat16"), "170 KiB"),
        ("triton_fixed", ("gpu", "9.0"), Shape(head_dim=512, dtype="bfloat16"), "heads of up to 256 with keys and"),
    ],
)
def test_an_implementation_that_refuses_says_why(monkeypatch, name, device, shape, message):
    monkeypatch.setattr(jax, "devices", lambda *_: [device_like(*device)])
    with pytest.raises(ValueError, match=f"implementation='{name}' cannot take this: .*{message}"):
        paged_attention(**make_case(shape), scale=1.0, max_query_len=64, implementation=name)


def test_debug_reports_from_inside_jit():
    """Inside jit, the running program reports wrong indices."""
    case = make_case(Shape())

    @jax.jit
    def call(case, tables):
        return paged_attention(**{**case, "block_tables": tables}, scale=1.0, max_query_len=64, debug=True)

    call(case, case["block_tables"]).block_until_ready()
    jax.effects_barrier()

    def wrong():
        call(case, jnp.full_like(case["block_tables"], 64)).block_until_ready()
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape("blocks are 0 to 63")):
        wrong()
