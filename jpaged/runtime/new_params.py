"""Checks weights that replace a running engine's weights: programs must accept them without a compile or a copy."""

from collections.abc import Mapping

import jax

from jpaged.errors import ModelLoadError
from jpaged.models.spec import Params


def check_params(expected: Params | None, params: Params) -> None:
    """Raise ModelLoadError unless each leaf has the shape, dtype, placement and layout of its leaf in `expected`."""
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"params is a {type(params).__name__}: must be the tree that the engine started with")
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name in sorted(wanted.keys() ^ given.keys()):
        state = "missing" if name in wanted else "not a parameter of the model"
        raise ModelLoadError(f"params{name} is {state}: pass the same tree that the engine started with")
    if (structure := jax.tree.structure(params)) != jax.tree.structure(expected):
        raise ModelLoadError(f"params has another structure, {structure}: must be {jax.tree.structure(expected)}")
    for name, leaf in given.items():
        want = _description(wanted[name])
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            raise ModelLoadError(f"params{name} is a {type(leaf).__name__}: must be a concrete jax.Array, {want}")
        if leaf.is_deleted():
            raise ModelLoadError(f"params{name} has been deleted: must be {want}")
        if (found := _description(leaf)) != want:
            raise ModelLoadError(f"params{name} is {found}: must be {want}")
        if leaf.format.layout != wanted[name].format.layout:
            raise ModelLoadError(
                f"params{name} has the layout {leaf.format.layout}: must be {wanted[name].format.layout}, like the "
                "weights that the programs were compiled for"
            )


def _description(leaf: jax.Array) -> str:
    """Dtype, shape, devices and memory of an array: "float32[4, 8] on TFRT_CPU_0, device memory"."""
    devices = ", ".join(sorted(map(str, leaf.devices())))
    memory_kind = leaf.sharding.memory_kind or "default"
    return f"{leaf.dtype}{list(leaf.shape)} on {devices}, {memory_kind} memory"
