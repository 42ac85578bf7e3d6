"""The methods that every quantised format has."""

import abc

import numpy as np

from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.quantized.matrix_tensors import Header, Parts

CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # dtypes of a tensor "weight" that holds codes


class Format(abc.ABC):
    """A format of packed matrices."""

    parts: tuple[str, ...]  # tensors that a module has only if it is packed
    hidden: tuple[str, ...] = ("input_scale",)  # further tensors of a packed module, which are not read

    def modules(self, checkpoint: TensorSource) -> list[str]:
        """Modules that have at least one part, or codes instead of weights."""
        found = set()
        for name in checkpoint.names:
            module, _, part = name.rpartition(".")
            if part in self.parts or (part == "weight" and checkpoint.entry(name).dtype in CODE_DTYPES):
                found.add(module)
        return sorted(found)

    @abc.abstractmethod
    def excluded(self, module: str) -> str | None:
        """The setting of quantization_config that excludes the module, in words; None: the module is packed."""

    @abc.abstractmethod
    def header(self, parts: Parts) -> Header:
        """Check dtypes and shapes of a matrix's parts. Reads headers only. Raises ModelLoadError."""

    @abc.abstractmethod
    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        """Describe a packed matrix [out, in] from the config alone, with the format's usual dtype of scales.

        Raises ModelLoadError if the config does not fit the shape.
        """

    def reorders(self, module: str) -> bool:
        """True if the config says that the matrix has an `order` of inputs."""
        return False

    def packs_outside_layers(self, module: str) -> bool:
        """True if a module outside the layers is packed, unless it is excluded."""
        return False

    def order(self, parts: Parts, header: Header) -> np.ndarray | None:
        """int32[in]: `QuantizedWeight.order`. None: the inputs are in the order of x."""
        return None

    @abc.abstractmethod
    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        """Codes [out, in], one per byte, inputs in the file's order. Raises ModelLoadError for invalid codes."""

    @abc.abstractmethod
    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        """Scales [out, groups in the file], in the dtype of the file. Raises ModelLoadError for invalid scales."""

    @abc.abstractmethod
    def zeros(self, parts: Parts, header: Header) -> np.ndarray | None:
        """Zeros [out, groups in the file] of the dtype `header.zeros`; None: no zeros. Raises ModelLoadError."""

    def outer(self, parts: Parts, header: Header) -> np.ndarray | None:
        """float32[out, 1]: `QuantizedWeight.outer`. None: the scales have no common factor. Raises ModelLoadError."""
        return None
