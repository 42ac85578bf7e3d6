"""Block tables of a drafter's rows, with a plan's changes."""

import jax
import numpy as np

from jpaged.runtime.drafting.draft_state import TableColumns
from jpaged.runtime.drafting.ragged import updated_block_tables


def test_only_changes_of_the_given_rows_count():
    blocks = np.arange(6 * 10, dtype=np.int32).reshape(6, 10)
    rows = np.array([4, 1, 6, 6], np.int32)  # the last two are padding
    changes = np.array([(1, 9, 700), (4, 5, 701), (2, 5, 702), (4, 6, 703), (-1, 0, 704), (-1, -1, -1)], np.int32)
    columns = TableColumns(first=5, width=5)
    tables = jax.jit(lambda *arrays: updated_block_tables(arrays[0], arrays[1], columns, arrays[2]))(
        blocks, rows, changes.ravel()
    )
    expected = blocks[[4, 1], 5:].copy()
    expected[1, 4], expected[0, 0], expected[0, 1] = 700, 701, 703
    np.testing.assert_array_equal(np.asarray(tables)[:2], expected)
    assert tables.shape == (4, 5)
