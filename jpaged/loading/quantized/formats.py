"""The methods that every quantised format has."""

import abc

import numpy as np

from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.quantized.matrix_tensors import Header, Parts

CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # of a tensor "weight" that holds codes


class Format(abc.ABC):
    """A format of packed matrices. `parts` are the tensors of a module that exist only if it is packed."""

    parts: tuple[str, ...]
    hidden: tuple[str, ...] = ("input_scale",)  # further tensors of a packed module, which nothing reads

    def modules(self, checkpoint: Checkpoint) -> list[str]:
        """Modules that have at least one part, or codes in the place of the weights."""
        found = set()
        for name in checkpoint.names:
            module, _, part = name.rpartition(".")
            if part in self.parts or (part == "weight" and checkpoint.entry(name).dtype in CODE_DTYPES):
                found.add(module)
        return sorted(found)

    @abc.abstractmethod
    def excluded(self, module: str) -> str | None:
        """The words of quantization_config that say that the module is not packed; None if there are none."""

    @abc.abstractmethod
    def header(self, parts: Parts) -> Header:
        """Check dtypes and shapes of a matrix's parts. Reads headers only. Raises ModelLoadError."""

    @abc.abstractmethod
    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        """A packed matrix [out, in] as the config alone describes it. The scales' dtype is the usual one.

        Raises ModelLoadError if the config does not fit the shape.
        """

    def reorders(self, module: str) -> bool:
        """True if the config says that the matrix has an order of inputs, which `order` reads."""
        return False

    def packs_outside_layers(self, module: str) -> bool:
        """True if a module that belongs to no layer is packed, unless it is excluded."""
        return False

    def order(self, parts: Parts, header: Header) -> np.ndarray | None:
        """int32[in]: `QuantizedWeight.order`. None: the inputs are in the order of x."""
        return None

    @abc.abstractmethod
    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        """Codes [out, in], one a byte, inputs in the file's order. Raises ModelLoadError for invalid ones."""

    @abc.abstractmethod
    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        """Scales [out, groups in the file], in the dtype of the file. Raises ModelLoadError for invalid ones."""

    @abc.abstractmethod
    def zeros(self, parts: Parts, header: Header) -> np.ndarray | None:
        """Zeros [out, groups in the file] of the dtype `header.zeros`; None without them. Raises ModelLoadError."""

    def outer(self, parts: Parts, header: Header) -> np.ndarray | None:
        """float32[out, 1]: `QuantizedWeight.outer`. None: the scales have no common factor. Raises ModelLoadError."""
        return None
