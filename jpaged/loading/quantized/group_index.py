"""g_idx: the group of each input, for files with inputs that are not sorted by group (desc_act, actorder)."""

import numpy as np

from jpaged.loading.quantized.matrix_tensors import Header, Parts


def check_group_index(parts: Parts, part: str, header: Header, required: str | None) -> None:
    """Check the header of a g_idx. Raises ModelLoadError.

    required: the config's setting that needs a g_idx, in words; None: it may be missing or empty. With one group for
    all inputs it has no meaning, and may always be missing.
    """
    because = required if required is not None and header.stored_groups > 1 else None
    if because is not None or (part in parts and parts.entry(part, "").shape != (0,)):
        parts.check(part, because or "", ("I32", "I64"), header.shape[1:], meaning="inputs")


def order_of(parts: Parts, part: str, header: Header) -> np.ndarray | None:
    """Return the inputs sorted by group, int32[in]; None if the file has them in this order.

    Raises ModelLoadError if a group is out of range, or does not have as many inputs as the group size.
    """
    if part not in parts:
        return None
    index = parts.array(part)
    if index.size == 0:
        return None
    if (bad := (index < 0) | (index >= header.stored_groups)).any():
        group, position = index[bad][0], np.flatnonzero(bad)[0]
        raise parts.damaged(part, f"group {group} at input {position}, but there are {header.stored_groups} groups")
    expected = np.arange(len(index)) // header.stored_group
    if np.array_equal(index, expected):
        return None
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], expected):
        group = index[order][np.flatnonzero(index[order] != expected)[0]]
        raise parts.damaged(
            part, f"{np.count_nonzero(index == group)} inputs in group {group} (groups must have {header.stored_group})"
        )
    return order.astype(np.int32)
