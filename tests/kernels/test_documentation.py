"""The example in docs/kernels.md runs as printed, with the result that the page states."""

import pathlib
import re

import numpy as np

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/kernels.md"


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names = {}
    exec(code, names)  # noqa: S102
    assert capsys.readouterr().out == "(6, 8, 64)\n"
    # the second row's first token sees only itself: its output is its own value, for every head of a KV head
    value = np.asarray(names["qkv"])[1, :, -1]
    np.testing.assert_allclose(np.asarray(names["out"])[1].reshape(2, 4, 64), value[:, None].repeat(4, 1), atol=1e-6)
