"""The sample of a checkpoint, by which processes notice that one of them has an old copy."""

import shutil

from jpaged.loading.updates import sample
from tests.golden.checkpoints import BY_NAME, write_checkpoint


def test_copies_are_equal_and_other_weights_of_the_same_sizes_differ(tmp_path):
    for seed, name in enumerate(("old", "new")):
        write_checkpoint(BY_NAME["llama"], seed, tmp_path / name)
    old, new = (tmp_path / name / "model.safetensors" for name in ("old", "new"))
    assert old.stat().st_size == new.stat().st_size
    shutil.copytree(tmp_path / "new", tmp_path / "copy")
    (tmp_path / "copy" / "trainer.log").write_text("step 7")
    assert sample(str(tmp_path / "copy")) == sample(str(tmp_path / "new")) != sample(str(tmp_path / "old"))
    # a copy that ends before its last bytes
    cut = tmp_path / "copy" / "model.safetensors"
    cut.write_bytes(new.read_bytes()[:-100] + bytes(100))
    assert sample(str(tmp_path / "copy")) != sample(str(tmp_path / "new"))


def test_every_file_of_a_converted_folder_counts(tmp_path):
    for name, text in (("one", "abc"), ("two", "abd")):
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "jpaged.json").write_text("{}")
        (tmp_path / name / "weights" / "0").write_text(text)
    assert sample(str(tmp_path / "one")) != sample(str(tmp_path / "two"))
    (tmp_path / "two" / "weights" / "0").write_text("abc")
    assert sample(str(tmp_path / "one")) == sample(str(tmp_path / "two"))
