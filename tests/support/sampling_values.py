"""Values of the numbers that SamplingParams declares, for tests that pass each parameter on its own."""

from jpaged import SamplingParams
from jpaged.params.sampling import NUMBERS, PARAMETERS


def half_way(name: str) -> float:
    """A value between the default and a limit of the parameter."""
    default, declared = getattr(SamplingParams, name), PARAMETERS[name]
    limits = (declared.least, declared.above, declared.most)
    return (default + next((limit for limit in limits if limit != default and abs(limit) < 100), 0)) / 2


NUMBER_VALUES = {name: half_way(name) for name in NUMBERS}
