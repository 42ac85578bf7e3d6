"""Import path of vLLM's users for the parameter classes of generation. The classes are in `jpaged.params`."""

from jpaged.params.beam_search import BeamSearchParams
from jpaged.params.repetition_detection import RepetitionDetectionParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "RepetitionDetectionParams", "BeamSearchParams",
]  # fmt: skip
