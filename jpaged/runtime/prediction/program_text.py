"""Parses the HLO text of a compiled program, and counts the bytes and FLOPs of each operation.

An operation of the main computation is usually one kernel or one copy. The shapes of its operands and result give the
bytes it reads and writes. Gathers, slices and in-place updates access only a part of an operand.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from jpaged.collectives import COLLECTIVES

# Bytes of an element, by HLO's name of the dtype. Other dtypes have 1 byte: HLO stores 4-bit integers in bytes, too.
_ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)
}
_SHAPE = re.compile(r"\b([a-z]+\d*)(?:e\dm\d\w*)?\[([\d,]*)\](?:\{([^{}]*)\})?")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)(.*)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*?^\}", re.MULTILINE | re.DOTALL)
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota",
         "copy-done", "slice-done", *(f"{kind}-done" for kind in COLLECTIVES)}  # fmt: skip
_PARTS = {"gather", "dynamic-slice", "slice"}        # bytes read = bytes of the result
_UPDATES = {"scatter", "dynamic-update-slice"}       # in place: only the update is read and written
_SAME = {"bitcast", "reshape", "get-tuple-element"}  # the result is the operand, or a part of it; no copy


@dataclasses.dataclass(frozen=True)
class Operation:
    """One HLO operation: one line of a computation."""

    name: str
    kind: str                  # "fusion", "custom-call", "while" and so on
    shape: str                 # of the result, as in `array_bytes`; a tuple is in parentheses
    operands: tuple[str, ...]  # names
    rest: str                  # attributes and metadata; of a parameter: its number

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array_bytes(self.shape))

    @property
    def kernel(self) -> str:
        """Name of a Pallas kernel; "" for other operations."""
        # a kernel through Mosaic GPU has its name in the trace only
        traced = r'op_name="[^"]*?/(\w+)/(?:pallas_call|mpmd_map)"'
        found = re.search(r'\bname = "(\w+)"', self.rest) or re.search(traced, self.rest)
        return found[1] if found and self.kind == "custom-call" else ""

    @property
    def is_transfer(self) -> bool:
        """True for the start of an asynchronous operation, such as a copy next to other operations."""
        return self.kind.endswith("-start")

    @property
    def collective(self) -> str:
        """Name of a collective, one of `COLLECTIVES`; "" for other operations."""
        kind = self.kind.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    @property
    def group_size(self) -> int | None:
        """Number of devices in a replica group of a collective; None if the text has no replica groups."""
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", self.rest)
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", self.rest)
        if listed:
            return listed[1].count(",") + 1
        return int(counted[1]) if counted else None

    @property
    def turns(self) -> int | None:
        """Iterations of a loop; None if the number is only known at run time."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(found[1]) if found else None

    def called(self, attribute: str) -> str:
        """Name of the computation in an attribute, such as "body" or "calls"; "" without that attribute."""
        found = re.search(rf"\b{attribute}=%([\w.-]+)", self.rest)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs of one operation. A collective counts the bytes of its operands as `read`, and writes 0."""

    operation: Operation
    read: int
    written: int
    flops: int


class Program:
    """The computations of a compiled program. text: from `jax.stages.Compiled.as_text`."""

    def __init__(self, text: str):
        self._computations = {
            match[1]: {operation.name: operation for operation in _operations(match[0])}
            for match in _COMPUTATION.finditer(text)
        }
        (self.main,) = re.findall(r"^ENTRY %(\S+)", text, re.MULTILINE)

    def operations(self, computation: str | None = None) -> list[Operation]:
        """Operations of a computation that cost time, in order. None: the main computation."""
        found = self._computations[computation or self.main].values()
        return [operation for operation in found if operation.kind not in _FREE]

    def traffic(self, computation: str | None = None) -> Iterator[Traffic]:
        """Traffic of every operation, once per loop iteration. A conditional counts as its branch with the most bytes.

        Loops with an unknown number of iterations are skipped. `loops` lists them.
        """
        name = computation or self.main
        for operation in self.operations(name):
            if operation.kind == "conditional":
                branches = [list(self.traffic(branch)) for branch in self.branches(operation)]
                yield from max(branches, key=lambda branch: sum(one.read + one.written for one in branch))
            elif operation.kind == "call":
                yield from self.traffic(operation.called("to_apply"))
            elif operation.kind == "while":
                for _ in range(operation.turns or 0):
                    yield from self.traffic(operation.called("body"))
            else:
                yield self._traffic_of(operation, self._computations[name])

    def loops(self, computation: str | None = None) -> list[str]:
        """Bodies of all loops with an unknown number of iterations, also inside branches and other loops."""
        found = []
        for operation in self.operations(computation):
            inner = self.branches(operation) if operation.kind == "conditional" else []
            if operation.kind == "while":
                inner = [operation.called("body")]
                found += inner if operation.turns is None else []
            for name in inner:
                found += self.loops(name)
        return found

    def branches(self, operation: Operation) -> list[str]:
        """Names of the branch computations of a conditional."""
        listed = re.search(r"branch_computations=\{(.*?)\}", operation.rest)
        if listed:
            return re.findall(r"%([\w.-]+)", listed[1])
        return [operation.called(f"{value}_computation") for value in ("true", "false")]

    def _traffic_of(self, operation: Operation, around: Mapping[str, Operation]) -> Traffic:
        if operation.collective:
            operands = (around[name] for name in operation.operands if name in around)
            return Traffic(operation, sum(sum(array_bytes(one.shape, anywhere=True)) for one in operands), 0, 0)
        if operation.is_transfer:  # the result has source, target and a scalar of 4 bytes; the target is smaller
            arrays = [size for size in array_bytes(operation.shape, anywhere=True) if size > 4]
            moved = min(arrays, default=0)
            return Traffic(operation, moved, 0 if 0 in array_bytes(operation.shape) else moved, 0)
        body = self._computations.get(operation.called("calls"), {})
        if not body:
            read = sum(around[name].num_bytes for name in operation.operands if name in around)
            if operation.kind in _PARTS:
                read = operation.num_bytes
            return Traffic(operation, read, operation.num_bytes, _flops(operation, around))
        parameters = {int(inner.rest or 0): inner for inner in _parameters(body)}
        read = sum(_bytes_read(parameters[i], body) for i in range(len(operation.operands)))
        written = operation.num_bytes
        for inner in body.values():
            if inner.kind in _UPDATES:  # the result is the operand, updated in place
                update = body[inner.operands[-1 if inner.kind == "scatter" else 1]].num_bytes
                written -= inner.num_bytes - update
        return Traffic(operation, read, max(0, written), self._flops_of(body))

    def _flops_of(self, body: Mapping[str, Operation]) -> int:
        """FLOPs of the matmuls of a computation and of the fusions in it."""
        inside = [self._computations.get(one.called("calls"), {}) for one in body.values() if one.kind == "fusion"]
        return sum(_flops(one, body) for one in body.values()) + sum(self._flops_of(inner) for inner in inside)


def array_bytes(shape: str, *, anywhere: bool = False) -> list[int]:
    """Bytes of each array of a shape, which is one "f32[8,128]{1,0}" or a tuple in parentheses.

    Arrays outside the device's main memory, like a TPU's VMEM ("S(1)" in the layout), count 0 bytes unless `anywhere`.
    """
    sizes = []
    for (item, _, layout), dimensions in zip(_SHAPE.findall(shape), _dimensions(shape), strict=True):
        counts = anywhere or "S(" not in layout
        sizes.append(_ITEM_BYTES.get(item, 1) * math.prod(dimensions) if counts else 0)
    return sizes


def _operations(text: str) -> Iterator[Operation]:
    for name, shape, kind, operands, rest in _OPERATION.findall(text):
        if kind == "parameter":
            yield Operation(name, kind, shape, (), operands)
        else:
            yield Operation(name, kind, shape, tuple(re.findall(r"%([\w.-]+)", operands)), rest)


def _parameters(body: Mapping[str, Operation]) -> list[Operation]:
    return [operation for operation in body.values() if operation.kind == "parameter"]


def _bytes_read(parameter: Operation, body: Mapping[str, Operation]) -> int:
    """Bytes of a fusion's parameter that the fusion reads."""
    total = 0
    for user in [operation for operation in body.values() if parameter.name in operation.operands]:
        if user.kind in _PARTS and user.operands[0] == parameter.name:
            total += user.num_bytes
        elif user.kind in _UPDATES and user.operands[0] == parameter.name:
            continue
        elif user.kind in _SAME:
            total += _bytes_read(user, body)
        else:
            return parameter.num_bytes
    return min(total, parameter.num_bytes)


_MATMULS = ("dot", "gated_dot", "partial_dots", "tree_dot")  # kernels of `pallas_kernels`


def _flops(operation: Operation, around: Mapping[str, Operation]) -> int:
    """FLOPs of a matmul; 0 for other operations."""
    if operation.kernel in _MATMULS:  # the last operands are x [rows, in] and the weights [..., out, in]
        (x,), (weight,) = (_dimensions(around[name].shape) for name in operation.operands[-2:])
        return 2 * x[0] * math.prod(weight)
    if operation.kind == "convolution":
        return _convolution_flops(operation, around)
    if operation.kind != "dot":
        return 0
    (left,), (result,) = (_dimensions(shape) for shape in (around[operation.operands[0]].shape, operation.shape))
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
    depth = math.prod(left[int(n)] for n in filter(None, contracted[1].split(","))) if contracted else 1
    return 2 * math.prod(result) * depth


def _convolution_flops(operation: Operation, around: Mapping[str, Operation]) -> int:
    """FLOPs of a matmul that XLA writes as a convolution, as it does on TPU. The second operand is the weights.

    The weights' axis "i" is contracted and "o" is an axis of the result. Other axes are windows, contracted over
    min(weights' size, rows' size) entries: with one entry in the rows, the axis is kept in the result.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->", operation.rest)
    if labels is None:
        return 0
    (left,), (right,), (result,) = (
        _dimensions(shape) for shape in (*(around[name].shape for name in operation.operands[:2]), operation.shape)
    )
    rows = dict(zip(labels[1], left, strict=True))
    contracted = [
        size if label == "i" else min(size, rows[label])
        for label, size in zip(labels[2], right, strict=True) if label != "o"
    ]  # fmt: skip
    return 2 * math.prod(result) * math.prod(contracted)


def _dimensions(shape: str) -> list[list[int]]:
    """Dimensions of each array of a shape."""
    return [[int(n) for n in filter(None, dimensions.split(","))] for _, dimensions, _ in _SHAPE.findall(shape)]
