"""safetensors files: arrays are read unchanged, and damaged files are refused by name before any tensor is read."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.loading.safetensors_file import SafetensorsFile
from tests.golden.checkpoints import write_safetensors

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "none": np.zeros((0, 4), np.float16),
    "scalar": np.float64(3.5).reshape(()),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    return tmp_path / "model.safetensors"


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the header of a file and keep its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_arrays_are_what_was_written(path: Path) -> None:
    file = SafetensorsFile(path)
    assert set(file.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        got = file.array(name)
        assert got.dtype == tensor.dtype
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, tensor)
        file.release(name)
        np.testing.assert_array_equal(got, tensor)  # pages come back from the file
    del got
    file.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a"].update(data_offsets=[0, 44]), "tensor a has 44 bytes, which does not match F32"),
        (lambda h: h["b"].update(data_offsets=[40, 52]), "tensor b overlaps tensor a"),
        (lambda h: h["b"].update(data_offsets=[52, 64]), "leaves a gap to tensor a"),
        (lambda h: h["a"].update(shape=[-3, -4]), "tensor a is not valid"),
        (lambda h: h["a"].update(shape=[3.0, 4]), "tensor a is not valid"),
        (lambda h: h["a"].update(shape=[True, 4]), "tensor a is not valid"),
        (lambda h: h["a"].pop("dtype"), "tensor a is not valid"),
        (lambda h: h.update(a=[1, 2]), "tensor a is not valid"),
        (lambda h: h["a"].update(data_offsets=[48, 0]), "tensor a has -48 bytes"),
        (lambda h: h["scalar"].update(shape=[1 << 40], data_offsets=[60, 60 + (8 << 40)]), "scalar should end at byte"),
        (lambda h: h.pop("scalar"), "8 bytes follow the last tensor"),
    ],
)
def test_wrong_headers(path: Path, change: Callable[[dict], object], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "fetch it again" in str(caught.value)


def test_a_name_twice(path: Path) -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b"{" + entry + b"," + entry + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(ModelLoadError, match="the name 'a' occurs twice"):
        SafetensorsFile(path)


def test_metadata_and_unknown_dtypes_are_accepted(path: Path) -> None:
    """A tensor of an unknown dtype does not prevent reading other tensors."""
    rewrite(path, lambda h: (h.update(__metadata__={"format": "pt"}), h["none"].update(dtype="F4", shape=[0])))
    file = SafetensorsFile(path)
    np.testing.assert_array_equal(file.array("a"), TENSORS["a"])
    with pytest.raises(ModelLoadError, match="tensor none is F4, which jpaged does not support; it supports BOOL, U8"):
        file.array("none")
    file.close()


@given(size=st.integers(0, 400))
def test_truncated_anywhere(size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_safetensors(path, TENSORS)
    data = path.read_bytes()
    path.write_bytes(data[: min(size, len(data) - 1)])
    with pytest.raises(ModelLoadError, match="fetch it again"):
        SafetensorsFile(path)


@given(noise=st.binary(max_size=300))
def test_noise_is_refused(noise: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("noise") / "model.safetensors"
    path.write_bytes(noise)
    with pytest.raises(ModelLoadError, match="the file is damaged"):
        SafetensorsFile(path)
