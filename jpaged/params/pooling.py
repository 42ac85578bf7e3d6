"""PoolingParams, the parameters of `embed` and `classify`, and PooledModel, which describes a pooling engine."""

import dataclasses
import enum

from jpaged.errors import RequestError

PER_TOKEN = "token_"  # begins the names of tasks whose answer has a vector for each token of the prompt
TASKS = ("embed", "classify", "token_embed", "token_classify")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt's last hidden state is returned. Immutable. Raises RequestError for an invalid value."""

    dimensions: int | None = None
    """Length of the embedding, at least 1: keep its first `dimensions` numbers, before normalisation. For models
    trained that way (Matryoshka, arXiv:2205.13147). None keeps all."""

    normalize: bool = True
    """Scale an embedding to length 1."""

    activation: bool = True
    """Turn a classifier's scores into probabilities; False returns the scores."""

    use_activation: bool | None = None
    """vLLM's parameter for both `normalize` and `activation`: sets both. None changes neither."""

    task: str | None = None
    """"embed" or "classify"; "token_embed" or "token_classify" for a vector of each token. `LLM.embed`, `LLM.classify`
    and `LLM.encode` set it. None: the model's own task."""

    prompt_name: str | None = None
    """Name of a prompt in the model's config_sentence_transformers.json, a text that is put before the text to embed.
    "": none. None: the prompt that the file names as its default, if any."""

    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens of the prompt, at least 1; -1: as many as the model takes. None: all. Special
    tokens that the tokenizer adds around a text are counted, and are kept."""

    truncation_side: str | None = None
    """End of the prompt to remove, with `truncate_prompt_tokens`: "left" or "right". None: "right" (keep the first)."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError("dimensions", self.dimensions, "must be a whole number of at least 1, or None")
        if self.use_activation is not None:
            if not isinstance(self.use_activation, bool):
                raise RequestError("use_activation", self.use_activation, "must be True, False or None")
            for name in ("normalize", "activation"):
                object.__setattr__(self, name, self.use_activation)
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        if self.task is not None and self.task not in TASKS:
            raise RequestError("task", self.task, f"must be {', '.join(TASKS)}, or None")
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise RequestError("prompt_name", self.prompt_name, "must be a text, or None")
        kept = self.truncate_prompt_tokens
        if kept is not None and (type(kept) is not int or (kept < 1 and kept != -1)):
            raise RequestError("truncate_prompt_tokens", kept, "must be a whole number of at least 1, -1, or None")
        if self.truncation_side not in (None, "left", "right"):
            raise RequestError("truncation_side", self.truncation_side, "must be 'left' or 'right', or None")
        if self.truncation_side is not None and kept is None:
            raise RequestError("truncation_side", self.truncation_side, "needs truncate_prompt_tokens: leave it out")

    @property
    def per_token(self) -> bool:
        """Whether each token of the prompt gets a vector, not only the last one."""
        return self.task is not None and self.task.startswith(PER_TOKEN)


class PairFormat(enum.Enum):
    """How a cross-encoder reads a query and a document."""

    JOINED = "joined"  # as the tokenizer joins two texts
    TYPED = "typed"    # the same, and the tokens of the second text have type 1 (BERT)
    QWEN3 = "qwen3"    # inside Qwen3-Reranker's instruction, which is answered with yes or no


@dataclasses.dataclass(frozen=True, slots=True)
class PooledModel:
    """Task, size and labels of a pooling engine."""

    task: str                    # "embed" or "classify"
    size: int                    # length of an embedding, or number of labels
    labels: tuple[str, ...] = ()  # names of a classifier's labels, in order
    pairs: PairFormat = PairFormat.JOINED  # of a classifier with one label, which scores pairs of texts
