"""PoolingParams: parameters of `embed` and `classify`. Checked when created, then immutable."""

import dataclasses

from jpaged.errors import RequestError

TASKS = ("embed", "classify")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt's last hidden state is returned. Raises RequestError for an invalid value."""

    dimensions: int | None = None
    """Length of the embedding, at least 1: keep its first `dimensions` numbers, before normalisation. For models
    trained that way (Matryoshka, arXiv:2205.13147). None keeps all."""

    normalize: bool = True
    """Scale an embedding to length 1."""

    activation: bool = True
    """Turn a classifier's scores into probabilities; False returns the scores."""

    task: str | None = None
    """"embed" or "classify"; `LLM.embed` and `LLM.classify` set it. None: the model's own task."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError("dimensions", self.dimensions, "must be a whole number of at least 1, or None")
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        if self.task is not None and self.task not in TASKS:
            raise RequestError("task", self.task, f"must be {' or '.join(TASKS)}, or None")
