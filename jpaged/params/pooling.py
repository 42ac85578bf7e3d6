"""What a caller of `embed` or `classify` asks for."""

import dataclasses

from jpaged.errors import RequestError

TASKS = ("embed", "classify")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt's last hidden state is given out. Raises RequestError for a value of no use."""

    dimensions: int | None = None
    """Keep the first so many numbers of an embedding, before it is normalised: for models that were trained so
    (Matryoshka, arXiv:2205.13147). None: all."""

    normalize: bool = True
    """Scale an embedding to length 1."""

    activation: bool = True
    """Make probabilities of a classifier's scores; False gives the scores themselves."""

    task: str | None = None
    """embed or classify; `LLM.embed` and `LLM.classify` fill it in. None: what the model is for."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError("dimensions", self.dimensions, "must be a whole number of at least 1, or None")
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        if self.task is not None and self.task not in TASKS:
            raise RequestError("task", self.task, f"must be {' or '.join(TASKS)}, or None")
