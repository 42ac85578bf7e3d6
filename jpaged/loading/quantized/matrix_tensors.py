"""The tensors that a checkpoint stores for one packed matrix, and the checks that all formats share."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.safetensors_file import TensorEntry

FLOATS = ("F16", "BF16", "F32")
# A scale times a code of fp8 (at most 448), or of 8 bits less its zero (at most 256), is then finite in float32
_LARGEST_SCALE = np.finfo(np.float32).max / 512


@dataclasses.dataclass(frozen=True)
class Header:
    """Description of a packed matrix, from the file's headers and the config."""

    codes: str              # the part with the codes
    shape: tuple[int, int]  # of the weights, [out, in]
    kind: str               # of `QuantizedWeight`
    bits: int               # of a stored code
    stored_group: int       # inputs of a group in the file; the last group may have fewer
    scales: str             # the file format's name of the scales' dtype in memory
    zeros: np.dtype | None  # dtype of the zeros in memory; None: the default of the kind
    activations: str = "float"
    block: int = 1          # outputs that share a scale in the file
    has_outer: bool = False  # the scales have a common factor; in memory, one float32 per output
    divides: bool = False   # the scales are divided by the factor, not multiplied

    @property
    def group_size(self) -> int:
        """Inputs per group in memory, where all groups have the same size."""
        return math.gcd(self.stored_group, self.shape[1])

    @property
    def groups(self) -> int:
        """Groups per output in memory."""
        return self.shape[1] // self.group_size

    @property
    def stored_groups(self) -> int:
        """Groups per output in the file."""
        return -(-self.shape[1] // self.stored_group)

    def widen(self, array: np.ndarray) -> np.ndarray:
        """Convert [out, groups in the file] to [out, groups in memory]."""
        if self.stored_groups == self.groups:
            return array
        return array[:, np.arange(self.groups) * self.group_size // self.stored_group]


class Parts:
    """The tensors MODULE.PART of one packed matrix MODULE.weight."""

    def __init__(self, checkpoint: TensorSource, module: str):
        self.checkpoint = checkpoint
        self.module = module
        self._called_for: set[str] = set()

    def __contains__(self, part: str) -> bool:
        return self.name(part) in self.checkpoint

    def name(self, part: str) -> str:
        """Name of a part's tensor."""
        return f"{self.module}.{part}" if self.module else part

    def path(self) -> Path:
        """Path of a file that has a part of the matrix, for messages."""
        prefix = self.name("")
        return self.checkpoint.path(next(n for n in self.checkpoint.names if n.startswith(prefix)))

    def entry(self, part: str, because: str) -> TensorEntry:
        """Shape and dtype of a part. Raises ModelLoadError if it is missing. because: the reason why it must exist."""
        if part not in self:
            raise ModelLoadError(
                f"{self.path()}: {self.module} has no {part}, but {because}: the checkpoint is incomplete, or its "
                "quantization_config is from another model"
            )
        self._called_for.add(part)
        return self.checkpoint.entry(self.name(part))

    def matrix(self, part: str, because: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Shape of a part that must have two axes and one of these dtypes. Raises ModelLoadError."""
        entry = self.entry(part, because)
        if entry.dtype not in dtypes or len(entry.shape) != 2 or 0 in entry.shape:
            raise self.wrong(part, f"{' or '.join(dtypes)} with two axes")
        return entry.shape[0], entry.shape[1]

    def check(
        self, part: str, because: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...], meaning: str
    ) -> TensorEntry:
        """Check dtype and shape of a part. meaning: the shape in words. Raises ModelLoadError."""
        entry = self.entry(part, because)
        if entry.dtype not in dtypes or entry.shape not in shapes:
            texts = " or ".join(str(list(shape)) for shape in shapes)
            raise self.wrong(part, f"{' or '.join(dtypes)} of shape {texts} ({meaning})")
        return entry

    def refuse_more(self, parts: tuple[str, ...]) -> None:
        """Raise ModelLoadError if one of these parts exists, but no check of a header has read it."""
        for part in parts:
            if part in self and part not in self._called_for:
                name = self.name(part)
                raise ModelLoadError(
                    f"{self.checkpoint.path(name)}: {name} is one part more than quantization_config calls for in "
                    f"{self.module}: the file is damaged, or its quantization_config is from another model"
                )

    def wrong(self, part: str, expected: str) -> ModelLoadError:
        """Error for a part whose dtype or shape is wrong."""
        entry = self.checkpoint.entry(self.name(part))
        return ModelLoadError(
            f"{self.checkpoint.path(entry.name)}: {entry.name} is {entry.dtype}{list(entry.shape)}, but must be "
            f"{expected}: the file is damaged, or its quantization_config is from another model"
        )

    def damaged(self, part: str, found: str) -> ModelLoadError:
        """Error for a part with wrong numbers."""
        name = self.name(part)
        return ModelLoadError(
            f"{self.checkpoint.path(name)}: {name} has {found}: the file is damaged, fetch it again or use another "
            "quantization of the model"
        )

    def array(self, part: str) -> np.ndarray:
        """The part, as a view of the mapped file."""
        return self.checkpoint.array(self.name(part))

    def scales(self, part: str, *, is_fp8: bool = False) -> np.ndarray:
        """Return the part, which must have finite numbers other than zero. Raises ModelLoadError.

        is_fp8: the scales must be above 0, because fp8 codes have a sign. For symmetric integers, AutoRound writes
        negative scales, with the sign of the largest weight.
        """
        scales = self.array(part)
        wide = scales.astype(np.float32)
        if (bad := ~np.isfinite(wide) | (wide == 0)).any():
            raise self.damaged(part, f"a scale of {wide[bad][0]:g} (scales must be finite and not 0)")
        if (bad := np.abs(wide) > _LARGEST_SCALE).any():
            raise self.damaged(part, f"a scale of {wide[bad][0]:g}, which makes weights infinite")
        if is_fp8 and (bad := wide < 0).any():
            raise self.damaged(part, f"a scale of {wide[bad][0]:g} (scales of fp8 must be above 0)")
        return scales
