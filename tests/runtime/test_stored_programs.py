"""Stored programs: the next start traces nothing, and loads the same programs."""

import functools
import hashlib
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.config import EngineConfig
from jpaged.models import decoder
from jpaged.models.spec import WeightLayout, param_shapes
from jpaged.params.logits_processors import logits_processors
from jpaged.runtime.compile.blueprint import Blueprint, FittedBuild, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.store import stored_programs
from jpaged.runtime.store.cache import CacheCounter, persistent_cache
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program
from pallas_kernels import cpu_kernels
from tests.support.tiny_engine import SPECS, bits, make_engine, make_runner, run

PACKAGES = pathlib.Path(stored_programs.pallas_kernels.__path__[0])
KERNELS = cpu_kernels.kernels_of_model(quantized=False, experts=False)
REQUESTS = [
    ([3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(max_tokens=8, temperature=0)),
    ([2, 7, 1, 8, 2, 8], SamplingParams(max_tokens=8, temperature=0.9, seed=3, logprobs=2, presence_penalty=0.5)),
    ([1, 4, 1, 4, 2], SamplingParams(max_tokens=8, temperature=0.7, seed=4)),
]


@pytest.fixture
def tracing(monkeypatch):
    """Names of the model's functions that were traced."""
    seen = []
    for name in ("decode", "lm_head"):
        function = getattr(decoder, name)

        def traced(*arguments, name=name, function=function, **options):
            seen.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(decoder, name, traced)
    return seen


def answers(store):
    """Bits of the answers of a runner whose programs are stored in a folder, or traced."""
    with pytest.MonkeyPatch.context() as patch:
        if store is None:
            patch.setattr(ProgramStore, "open", lambda *_: None)
        runner = make_runner(SPECS["windows"], **({} if store is None else {"compilation_cache_dir": str(store)}))
    outputs = run(make_engine(runner), REQUESTS)
    aliased = {str(p.shape): p.run.memory_analysis().alias_size_in_bytes for p in runner.programs.programs}
    pages = [np.asarray(pages.data) for pages in runner.state.pages]
    runner.close()
    return [bits(outputs[str(number)]) for number in range(len(REQUESTS))], aliased, pages


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.usefixtures("own_programs")
def test_a_stored_program_is_the_traced_one(tmp_path, tracing):
    """The same bits, the same memory reused; and the second start does not trace the model."""
    expected, aliased, pages = answers(None)
    assert set(tracing) == {"decode", "lm_head"}
    for start in ("cold", "warm"):
        tracing.clear()
        jax.clear_caches()
        found = answers(tmp_path)
        assert found[:2] == (expected, aliased), start
        for ours, theirs in zip(found[2], pages, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert bool(tracing) == (start == "cold")
    in_place = [size for name, size in aliased.items() if name.startswith(("decode", "mixed"))]
    assert len(in_place) == 2
    assert min(in_place) > sum(array.nbytes for array in pages)
    assert (tmp_path / "exported").stat().st_mode & 0o777 == 0o700


def double(x, *, factor):
    """A program of two results."""
    return x * factor, x.sum()


X = jax.ShapeDtypeStruct((4, 8), np.float32)


def compiled(store, factor=2, argument=X):
    """Run `double` of ones from the store."""
    program = compile_program(
        functools.partial(double, factor=factor), (argument,), donate=(), store=store
    )
    return float(program(np.ones(argument.shape, argument.dtype))[0].max())


def files(folder):
    """Stored programs by the names of their files."""
    return {path.name: path.read_bytes() for path in (folder / "exported").iterdir() if path.suffix != ".compiled"}


def test_every_input_of_a_trace_is_in_the_key(tmp_path, monkeypatch):
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)
    assert store is not None
    assert compiled(store) == 2
    assert compiled(store, factor=3) == 3
    assert compiled(store, argument=jax.ShapeDtypeStruct((4, 9), np.float32)) == 2
    assert compiled(store, argument=jax.ShapeDtypeStruct((4, 8), np.int32)) == 2
    assert len(files(tmp_path)) == 4
    assert compiled(store) == 2
    assert len(files(tmp_path)) == 4

    assert ProgramStore.open(tmp_path, "cpu", KERNELS) == store
    with jax.default_matmul_precision("float32"):
        assert ProgramStore.open(tmp_path, "cpu", KERNELS).key != store.key
    for name, value in (
        ("load_kernels", {"pallas_kernels.dot.cpu_kernel": None}),
        ("_sources", "another digest"),
        ("_versions", ["another version"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(stored_programs, name, lambda *_, value=value: value)
            assert ProgramStore.open(tmp_path, "cpu", KERNELS).key != store.key, name


@pytest.mark.parametrize("harm", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_again(tmp_path, caplog, harm):
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)
    compiled(store)
    [(name, data)] = files(tmp_path).items()
    harmed = {"cut": data[:-10], "changed": data[:500] + b"?" + data[501:], "empty": b""}[harm]
    (tmp_path / "exported" / name).write_bytes(harmed)
    assert compiled(store) == 2
    assert caplog.text.count("is damaged") == 1
    assert files(tmp_path) == {name: data}


@pytest.mark.parametrize("harm", ["cut", "empty", "random"])
def test_a_damaged_file_of_jax_is_made_again(tmp_path, harm):
    """JAX alone keeps the damaged file, and compiles at every start."""

    def hits_and_misses() -> tuple[int, int]:
        jax.clear_caches()
        counter = CacheCounter()
        with persistent_cache(str(tmp_path)):
            program = jax.jit(lambda x: x * 3 + 1).lower(X).compile()
        counter.close()
        assert np.asarray(program(np.ones(X.shape, X.dtype))).max() == 4
        return counter.hits, counter.misses

    assert hits_and_misses() == (0, 1)
    [path] = tmp_path.glob("*-cache")
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-10], "empty": b"", "random": os.urandom(len(data))}[harm])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert hits_and_misses() == (0, 1)
    assert hits_and_misses() == (1, 0)


def test_programs_that_were_not_used_for_a_month_are_removed(tmp_path):
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)
    compiled(store)
    compiled(store, factor=3)
    used, unused = files(tmp_path)
    for path in (tmp_path / "exported").iterdir():
        days = 29 if path.name.startswith(used) else 31
        os.utime(path, (0, time.time() - days * 86_400))
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)
    assert list(files(tmp_path)) == [used]
    compiled(store)
    compiled(store, factor=3)
    assert all(path.stat().st_mtime > time.time() - 60 for path in (tmp_path / "exported").iterdir())
    assert set(files(tmp_path)) == {used, unused}


def test_a_folder_of_others_is_not_used(tmp_path, caplog):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported").chmod(0o777)
    assert ProgramStore.open(tmp_path, "cpu", KERNELS) is None
    assert caplog.text.count("not a private folder") == 1
    assert compiled(None) == 2


def test_other_platforms_and_no_cache_store_nothing(tmp_path):
    assert ProgramStore.open(tmp_path, "tpu", KERNELS) is None
    assert ProgramStore.open(None, "cpu", KERNELS) is None
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_stored_is_traced(tmp_path, caplog):
    """It calls code that is not one of the native kernels."""
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)

    def on_host(x):
        return jax.pure_callback(np.negative, X, x)

    program = compile_program(functools.partial(on_host), (X,), donate=(), store=store)
    assert float(program(np.ones(X.shape, np.float32)).max()) == -1
    assert "every start traces it" in caplog.text
    assert files(tmp_path) == {}


@pytest.mark.slow
def test_custom_logits_processors_are_not_stored(tmp_path):
    """A stored program is found by the sources of jpaged. The caller's function is not among them."""
    processors = logits_processors({"same": lambda logits: logits})
    store = ProgramStore.open(tmp_path, "cpu", KERNELS)
    spec = SPECS["full"]
    model = ServedModel(spec, param_shapes(spec, np.float32), WeightLayout(), processors=processors)
    config = EngineConfig(model="tiny", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    blueprint = Blueprint.draw(model, config, Placement.single(jax.devices()[0]))
    build = FittedBuild(blueprint, blueprint.fit().memory_plan, store)
    build.compile(blueprint.largest_shapes[1])
    assert files(tmp_path) == {}


def test_every_native_kernel_is_known():
    """A program that calls a kernel which is missing here is traced at every start."""
    modules = {f"pallas_kernels.{path.parent.name}.{path.stem}" for path in PACKAGES.glob("*/cpu_*kernel.py")}
    assert set(cpu_kernels.KERNELS) == modules


ON_ANOTHER_DEVICE = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 2)
from tests.support.tiny_engine import *
from jpaged import SamplingParams
with jax.default_device(jax.devices()[int(sys.argv[2])]):
    runner = make_runner(SPECS["full"], compilation_cache_dir=sys.argv[1])
[out] = run(make_engine(runner), [([3, 1, 4], SamplingParams(max_tokens=4, temperature=0))]).values()
print(runner.state.table.devices(), out.outputs[0].token_ids)
"""


@pytest.mark.slow
def test_a_stored_program_runs_on_another_device(tmp_path):
    said = []
    for device in "01":
        command = [sys.executable, "-c", ON_ANOTHER_DEVICE, str(tmp_path), device]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        where, _, tokens = done.stdout.strip().partition("} ")
        assert f"id={device}" in where
        said.append((tokens, {name: hashlib.sha256(data).hexdigest() for name, data in files(tmp_path).items()}))
    assert said[0] == said[1]
