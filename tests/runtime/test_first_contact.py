"""First start on a device where something fails: the fallbacks, and the messages for the user."""

import dataclasses
import json
import logging
import re

import jax
import jax.numpy as jnp
import pytest

from jpaged import diagnosis, planning
from jpaged.cli import main, report
from jpaged.cli.common.results import write_json
from jpaged.errors import ModelLoadError
from jpaged.frontend.build import build_engine
from jpaged.models.spec import Activation, DecoderSpec, Rope, param_shapes
from jpaged.runtime import nvidia_devices
from jpaged.runtime.compile import gated_dot_choice as feed_forward
from jpaged.runtime.compile.blueprint import Blueprint, FittedBuild, ServedModel
from jpaged.runtime.memory.out_of_memory import advice, explained
from jpaged.runtime.placement import Placement
from jpaged.runtime.runner import ModelRunner
from pallas_kernels import platforms
from pallas_kernels.gated_dot import IMPLEMENTATIONS as GATED_DOT
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cpu
from pallas_kernels.platforms import Implementation

SPEC = DecoderSpec(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=256, rope=Rope(),
)  # fmt: skip


def blueprint(spec=SPEC, **options):
    model = ServedModel(spec, param_shapes(spec, "float32"))
    return Blueprint.draw(model, planning.engine_config("test", options), Placement.single(jax.devices()[0]))


@pytest.fixture
def planted(monkeypatch):
    """Two implementations that fail: one gives wrong results, and one does not compile."""

    def wrong(*args, **options):
        return jnp.zeros_like(IMPLEMENTATIONS["xla_loop"].call(*args, **options))

    def broken(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: 262144 > 232448\nmore")

    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", Implementation(wrong))
    monkeypatch.setitem(IMPLEMENTATIONS, "broken", Implementation(broken))
    monkeypatch.setitem(platforms.PREFERRED, "cpu", ("wrong", "broken", "xla_loop"))


def test_the_next_implementation_is_used(planted, caplog, monkeypatch):
    monkeypatch.setattr(cpu, "discard", lambda: pytest.fail("the native kernel is not the one that is wrong"))
    with caplog.at_level(logging.INFO):
        found = blueprint().with_checked_attention(jax.devices()[0])
    assert found.implementation == "xla_loop"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "attention 'wrong' does not work on cpu, so another implementation is tried" in errors[0]
    assert "case decode" in errors[0]
    assert re.search(r"differs from the reference by 1, more than 1e-05\. `jpaged report` writes", errors[0])
    assert "Shared memory size limit exceeded: 262144 > 232448. `jpaged report` writes" in errors[1]
    assert "attention 'xla_loop' is used instead. It is slower" in caplog.text


@pytest.mark.parametrize(("name", "reason"), [("wrong", "differs from the reference"), ("broken", "Shared memory")])
def test_an_implementation_that_the_user_named_ends_the_start(planted, name, reason):
    with pytest.raises(ModelLoadError, match=rf"attention_implementation='{name}' does not work on cpu: .*{reason}"):
        blueprint(attention_implementation=name).with_checked_attention(jax.devices()[0])


def test_nothing_works(planted, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "xla_loop", IMPLEMENTATIONS["broken"])
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", IMPLEMENTATIONS["wrong"])
    with pytest.raises(ModelLoadError, match=r"no implementation of attention works on cpu: wrong: .*; xla: .*report"):
        # a shape for which jit has not kept the real implementations
        blueprint(dataclasses.replace(SPEC, num_heads=6)).with_checked_attention(jax.devices()[0])


GIB = 2**30


@pytest.mark.parametrize(
    ("message", "device_bytes", "sentence"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.", 80 * GIB,
         "4.00 GiB could not be allocated. Lower gpu_memory_utilization from 0.9 to 0.84, or lower"),
        ("RESOURCE_EXHAUSTED: Failed to allocate 1.50GiB on device", 80 * GIB,
         "1.50 GiB could not be allocated. Lower gpu_memory_utilization from 0.9 to 0.87"),
        ("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY", 16 * GIB, "Lower gpu_memory_utilization from 0.9 to 0.88"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9", None, "no memory is left: .*Lower kv_cache_memory_bytes"),
        ("RESOURCE_EXHAUSTED: Failed to allocate 90.00GiB", 80 * GIB, "full: 90.00 GiB .*Free memory on it, or lower"),
        # as jaxlib 0.11's CPU client, CUDA plugin and allocator print them
        ("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.", None, "left: 16.00 GiB could not be alloc"),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0", 80 * GIB,
         "2.00 GiB could not be allocated. Lower gpu_memory_utilization from 0.9 to 0.87"),
        ("RESOURCE_EXHAUSTED: Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.00GiB (rounded to "
         "3221225472)", 80 * GIB, "3.00 GiB could not be allocated"),
        ("INTERNAL: Underlying backend ran out of memory trying to instantiate command buffer with 424 (total of 9 "
         "alive graphs in the process).", 80 * GIB, "Lower gpu_memory_utilization from 0.9 to 0.89"),
        # as libtpu prints them; the third is of a compilation for a v5e
        ("RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 3.42G. That was not possible. "
         "There are 682.00M free.; (0x0x0_HBM0)", 16 * GIB, "2.75 GiB could not be allocated. Lower .* to 0.71,"),
        ("RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 2.00G at the bottom of memory. "
         "That was not possible. There are 1.92G free, 0B reserved, and 1.92G reservable.", 16 * GIB, "1.00 GiB could"),
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (48.00G) exceeds "
         "available HBM (15.75G). HLO module: jit_step.", 16 * GIB,
         "program does not fit the device's memory: 32.25 GiB are missing. Lower max_num_batched_tokens or"),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G of "
         "15.48G hbm.\nExceeded hbm capacity by 6.47G.\n\nProgram: vmem 1.0M", 16 * GIB,
         "6.47 GiB could not be allocated. Lower gpu_memory_utilization from 0.9 to 0.45"),
        ("RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 94.82G, SparseCore Hbm usage 4.10G, exceeding available bytes: "
         "95.74G", 96 * GIB, "3.18 GiB could not be allocated"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.01M of 1.00M smem.", 16 * GIB, None),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack", 16 * GIB, None),
        ("INTERNAL: something else", 80 * GIB, None),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: 262144 > 232448", 80 * GIB, None),
    ],
)  # fmt: skip
def test_what_to_lower_when_memory_is_missing(message, device_bytes, sentence):
    config, error = planning.engine_config("test", {}), jax.errors.JaxRuntimeError(message)
    if sentence is None:
        assert advice(error, config, device_bytes) is None
        with pytest.raises(jax.errors.JaxRuntimeError), explained(config, device_bytes):
            raise error
        return
    with pytest.raises(ModelLoadError, match=sentence), explained(config, device_bytes):
        raise error


@pytest.mark.slow
def test_an_engine_whose_pool_cannot_be_allocated(monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99999999999 bytes")

    monkeypatch.setattr(FittedBuild, "create_state", fail)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(SPEC, "float32"))
    with pytest.raises(ModelLoadError, match=r"no memory is left: .*Lower kv_cache_memory_bytes"):
        ModelRunner.create(SPEC, params, planning.engine_config("test", {"row_buckets": (8,), "token_buckets": (16,)}))


VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 13\n"


@pytest.mark.parametrize(
    ("driver", "plugins", "sentence"),
    [
        (None, ["jax_cuda13_plugin"], None),
        ("580.65.06", [], r"plugin for it is missing: pip install 'jax\[cuda13\]'"),
        ("550.54.15", ["jax_cuda13_plugin"], "550.54.15 is too old for cuda13, which needs 580 or newer: update"),
        ("510.10", ["jax_cuda12_plugin"], "510.10 is too old for cuda12, which needs 525 or newer: update it$"),
        ("580.65.06", ["jax_cuda13_plugin"], "card that JAX does not use"),
    ],
)
def test_why_a_card_is_not_used(monkeypatch, tmp_path, driver, plugins, sentence):
    file = tmp_path / "version"
    if driver:
        file.write_text(VERSION.format(driver))
    monkeypatch.setattr(nvidia_devices, "VERSION_FILE", file)
    monkeypatch.setattr(nvidia_devices.importlib.util, "find_spec", lambda name: name if name in plugins else None)
    found = nvidia_devices.problem("cpu")
    assert nvidia_devices.problem("gpu") is None
    assert (found is None) == (sentence is None)
    assert sentence is None or re.search(sentence, found), found


@pytest.mark.slow
def test_the_report_holds_results_and_errors(planted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(diagnosis, "CPU_SHAPES", {"small": (4, 2, 16, "float32")})
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "auto")
    monkeypatch.setenv("NVIDIA_API_KEY", "a secret")
    file = tmp_path / "report.json"
    sizes = []

    def written(path, data):
        write_json(path, data)
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(report, "write_json", written)
    assert main(["report", "--output", str(file)]) == 1
    assert sorted(set(sizes)) == sizes  # the file grows with each of the four results
    assert len(sizes) == 5
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [(check["implementation"], "error" in check) for check in found["checks"]] == [
        ("wrong", True), ("broken", True), ("xla_loop", False), ("xla", False)
    ]  # fmt: skip
    assert "Shared memory size limit exceeded" in printed
    assert "agrees with the reference" in printed
    assert found["left"] == 0
    assert found["versions"]["jax"] == jax.__version__
    assert found["environment"]["JAX_TRACEBACK_FILTERING"] == "auto"
    assert "a secret" not in file.read_text()
    assert main(["report", "--output", str(tmp_path / "no/such/folder")]) == 2


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': no card")])
def test_a_platform_that_does_not_start_is_one_sentence(monkeypatch, tmp_path, capsys, error):
    """JAX_PLATFORMS=cuda without a card is a bare AssertionError in JAX."""

    def fail(*_):
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax, "default_backend", fail)
    sentence = r"JAX cannot start a device \((AssertionError|Unable to initialize .*)\): set JAX_PLATFORMS"
    with pytest.raises(ModelLoadError, match=sentence):
        planning.plan("demo")
    with pytest.raises(ModelLoadError, match=sentence):
        build_engine("demo", None, {}, progress=False)
    file = tmp_path / "report.json"
    assert main(["report", "--output", str(file)]) == 1
    assert re.search(sentence, capsys.readouterr().out)
    assert "Traceback" not in file.read_text()


@pytest.fixture
def wrong_gate(monkeypatch):
    """A kernel for gate and up that gives wrong results, and that measurements choose."""
    monkeypatch.setitem(GATED_DOT, "triton", Implementation(lambda x, *_, **options: jnp.zeros((x.shape[0], 128))))
    monkeypatch.setattr(feed_forward, "choose_implementation", lambda *_: "triton")


def test_products_of_xla_replace_a_wrong_kernel(wrong_gate, caplog):
    found = blueprint().with_checked_gated_dot(jax.devices()[0])
    assert found.gated_dot == "xla"
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "gated_dot does not work on cpu, so XLA's matmuls are used: KernelCheckError: gated_dot 'triton'" in error
    assert "differs from the reference by" in error
    assert "`jpaged report` writes" in error
    caplog.clear()
    assert found.with_checked_gated_dot(jax.devices()[0]).gated_dot == "xla"
    assert not caplog.records


def test_a_wrong_kernel_that_the_user_named_ends_the_start(wrong_gate):
    message = "gated_dot_implementation='triton' does not work on cpu: KernelCheckError"
    with pytest.raises(ModelLoadError, match=message):
        blueprint(gated_dot_implementation="triton").with_checked_gated_dot(jax.devices()[0])


def test_a_right_kernel_is_kept(caplog):
    spec = dataclasses.replace(SPEC, hidden_size=32, intermediate_size=48)
    model = ServedModel(spec, param_shapes(spec, "bfloat16"))
    config = planning.engine_config("test", {"gated_dot_implementation": "triton", "max_num_batched_tokens": 64})
    drawn = Blueprint.draw(model, config, Placement.single(jax.devices()[0]))
    with caplog.at_level(logging.INFO):
        assert drawn.with_checked_gated_dot(jax.devices()[0]) == drawn
    assert "gated_dot agrees with its reference: largest difference" in caplog.text


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, "float32", "x of float32: it multiplies bfloat16 and float16"),
        ({"activation": Activation.GELU}, "bfloat16", "activation='gelu'"),
        ({"gated": False}, "bfloat16", "no layer has gate and up in one dense matrix without biases"),
    ],
)
def test_models_that_the_kernel_cannot_compute(changes, dtype, reason):
    spec = dataclasses.replace(SPEC, **changes)
    config = planning.engine_config("test", {"gated_dot_implementation": "triton"})
    message = rf"gated_dot_implementation='triton' cannot serve .*{reason}.*; leave it out"
    with pytest.raises(ModelLoadError, match=message):
        Blueprint.draw(ServedModel(spec, param_shapes(spec, dtype)), config, Placement.single(jax.devices()[0]))


def test_an_unknown_implementation_of_gated_dot_is_refused():
    with pytest.raises(ModelLoadError, match="gated_dot_implementation='cuda': must be one of reference, xla, triton"):
        blueprint(gated_dot_implementation="cuda")
