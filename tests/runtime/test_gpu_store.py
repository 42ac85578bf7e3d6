"""Stored programs of an NVIDIA GPU, compiled for an H200 without the device: a second start traces nothing."""

import dataclasses
import re

import jax
import pytest

from jpaged import planning
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec, QKNorm, Rope, param_shapes
from jpaged.runtime.compile import blueprint as blueprints
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.store import stored_programs
from jpaged.runtime.store.stored_programs import ProgramStore
from tests.support.deviceless import H200, deviceless

# A layer of Qwen3 0.6B's shape, and a small vocabulary.
SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128,
    max_position=8192, rope=Rope(), qk_norm=QKNorm.HEAD,
)  # fmt: skip
OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 256}


def blueprint() -> Blueprint:
    model = ServedModel(SPEC, param_shapes(SPEC, "bfloat16"))
    return Blueprint.draw(model, planning.engine_config("test", OPTIONS), Placement.for_target(H200))


@pytest.mark.codegen
@deviceless(H200)
def test_a_second_start_traces_nothing(tmp_path, monkeypatch):
    """And compiles the same program: the same memory is used again, no copy, the same kernels."""
    traced = []
    decode = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda *args, **options: traced.append(1) or decode(*args, **options))
    build = blueprint().fit(free_bytes=2**30)
    forwards = [each for each in build.blueprint.program_shapes if isinstance(each, ForwardShape)]
    shape = max((each for each in forwards if each.is_decode), key=lambda each: each.tokens)
    store = ProgramStore.open(tmp_path, "gpu", (), H200.device_kind)
    found = []
    for start, used in (("without a store", None), ("first", store), ("second", store)):
        jax.clear_caches()
        traced.clear()
        with H200.tracing():
            program = dataclasses.replace(build, store=used).compile(shape)
        assert bool(traced) == (start != "second"), start
        sizes, text = program.memory_analysis(), program.as_text()
        kernels = re.findall(r'custom_call_target="([^"]+)"', text)
        copies = len(re.findall(r"= \S+ copy\(", text))
        found.append((sizes.alias_size_in_bytes, sizes.temp_size_in_bytes, len(kernels), copies))
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 2**29  # the KV pool
    assert found[0][2:] == (8, 0)  # kernels of a fused layer, and copies


def test_versions_and_the_kind_of_the_gpu_are_in_the_key(tmp_path, monkeypatch):
    key = ProgramStore.open(tmp_path, "gpu", (), "NVIDIA H200").key
    assert ProgramStore.open(tmp_path, "gpu", (), "NVIDIA H200").key == key
    assert ProgramStore.open(tmp_path, "gpu", (), "NVIDIA L4").key != key
    known, version = ("jax-cuda13-plugin", "jax-cuda13-pjrt"), stored_programs.importlib.metadata.version

    def changed(package: str) -> str:
        return "another" if package in known else version(package)

    monkeypatch.setattr(stored_programs.importlib.metadata, "version", changed)
    stored_programs._versions.cache_clear()
    try:
        assert ProgramStore.open(tmp_path, "gpu", (), "NVIDIA H200").key != key
    finally:
        stored_programs._versions.cache_clear()


def test_a_second_start_needs_no_program_to_size_the_pool(tmp_path, monkeypatch):
    """Its temporaries are remembered, unless the pool has become too small or too large for the free memory."""
    free, compiled = [8 * 2**30], []
    monkeypatch.setattr(Blueprint, "_free_bytes", lambda self: free[0])
    monkeypatch.setattr(Blueprint, "largest_temporaries", lambda self, free: (None, compiled.append(free) or 2**28))

    def blocks() -> int:
        return drawn.fit_device(tmp_path).memory_plan.num_blocks

    drawn = blueprint()
    first = blocks()
    assert len(compiled) == 1
    free[0] += 2**20
    assert (blocks(), len(compiled)) == (first, 1)
    assert drawn.fit_device(tmp_path).store is not None
    free[0] = 4 * 2**30
    assert blocks() < first
    assert len(compiled) == 2
    monkeypatch.setattr(blueprints, "program_key", lambda: "another version of a kernel")
    blocks()
    assert len(compiled) == 3
    assert len(list(tmp_path.glob("pool-*.json"))) == 2
