"""Shared by the tests of several devices: a small checkpoint."""

import pytest

from tests.golden.checkpoints import VARIANTS, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(next(v for v in VARIANTS if v.name == "llama"), 0, folder)
    return str(folder)
