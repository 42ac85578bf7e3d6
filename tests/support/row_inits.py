"""Rows of the request table by the names of their sampling parameters."""

from jpaged.engine.step_plan import RowInit
from jpaged.params.sampling import NEUTRAL_COLUMNS


def make_row(row, num_computed, rope_len, blocks, *, temperature=0.0, seed=0, **sampling):
    """A RowInit. sampling: parameters with a column, and other fields of RowInit."""
    columns = [sampling.pop(name, neutral) for name, neutral in NEUTRAL_COLUMNS.items()]
    return RowInit(row, num_computed, rope_len, blocks, temperature, seed, columns=columns, **sampling)
