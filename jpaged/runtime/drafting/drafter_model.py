"""A drafter that runs on the device, as the loader returns it."""

import dataclasses

from jpaged.models.draft_head import HeadSpec
from jpaged.models.spec import DecoderSpec, Params, WeightLayout


@dataclasses.dataclass(frozen=True)
class DrafterModel:
    """Weights of a draft model or of a draft head, whole on every device of the target."""

    spec: DecoderSpec | HeadSpec
    params: Params  # arrays or ShapeDtypeStructs
    layout: WeightLayout = WeightLayout()
    max_len: int | None = None  # tokens of a sequence, from which on it does not draft; None: the limit of its spec

    @property
    def layer_spec(self) -> DecoderSpec:
        """The spec of the layers that have KV pages."""
        return self.spec.layer if isinstance(self.spec, HeadSpec) else self.spec

    @property
    def is_head(self) -> bool:
        """True for a draft head, which follows the target's steps; False for a draft model."""
        return isinstance(self.spec, HeadSpec)

    @property
    def capture(self) -> tuple[int, ...] | None:
        """Hidden states of the target that the drafter reads, as `capture` of `step.forward`. None: it reads none."""
        return self.spec.capture if isinstance(self.spec, HeadSpec) else None
