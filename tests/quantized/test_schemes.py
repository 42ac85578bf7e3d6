"""Presets of compressed-tensors are the groups that its names stand for (tests/golden/record_quantized.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import ModelLoadError
from jpaged.loading.quantized.config import Values
from jpaged.loading.quantized.schemes import FORMATS, MIXED, Group, read_groups

PRESETS = json.loads((Path(__file__).parents[1] / "golden/quantized/presets.json").read_text())
# Integer activations of 4 bits, and formats that jpaged has not
REFUSED = {"W2A4", "W3A4", "W4A4", "MXFP6A16", "MXFP6A8", "MXFP8A16", "MXFP8"}


def groups(name: str, value: Any, form: str) -> list[Group]:
    return read_groups(Values({"config_groups": {name: value}}), form)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_library_s_group(name: str) -> None:
    written = dict(PRESETS[name])
    form = written.pop("format")
    if name in REFUSED:
        with pytest.raises(ModelLoadError, match=rf"config_groups.{name}[. ].*(must be 8|its name one of)"):
            groups(name, ["Linear"], MIXED)
        assert form not in FORMATS or written["input_activations"]["num_bits"] == 4
        return
    (found,) = groups(name, ["Linear"], MIXED)
    assert [found] == groups(name.lower(), ["Linear"], MIXED)
    assert [found] == groups("group_0", written, MIXED)
    assert [found] == groups("group_0", written | {"format": form}, "pack-quantized") or name == "UNQUANTIZED"
    assert found.targets == ("Linear",)
    assert found.scheme is None if name == "UNQUANTIZED" else found.scheme.format == form
    activations = written.get("input_activations")
    eight = activations is not None and activations["type"] == "int"
    assert found.scheme is None or found.scheme.activations == ("int8" if eight else "float")


def test_the_checkpoint_s_format_is_that_of_a_preset() -> None:
    """Checkpoints of W4A8 may be packed, though the library would not choose that format for them."""
    (found,) = groups("W4A8", ["re:.*up_proj"], "pack-quantized")
    assert found.scheme.format == "pack-quantized"
    assert (found.scheme.bits, found.scheme.group_size, found.scheme.activations) == (4, 128, "int8")
