"""Options and devices that do not work with a kind of layers. Each is refused by its name."""

from collections.abc import Sequence

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.compressed_spec import Compressed, Entries
from jpaged.models.spec import DecoderSpec, Indexer

# Options that split, hand over or take back tokens or arrays of a layer's state, which is not built
NOT_WITH_STATE = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "prefill_engines", "kv_handover",
)  # fmt: skip
# Options that split the layers or hand over their pages as if all layers had the same
NOT_WITH_UNLIKE_LAYERS = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "prefill_engines", "kv_handover",
)  # fmt: skip
# Options that split, adapt, hand over or take back arrays of DeepSeek V4's layers, or store them in 8 bits
NOT_WITH_COMPRESSED = (
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "deterministic",
    "speculative_config", "enable_lora", "quantization", "kv_cache_dtype", "swap_space", "prefill_engines",
    "kv_handover",
)  # fmt: skip


def refuse_options(spec: DecoderSpec, config: EngineConfig, platform: str) -> None:
    """Raise ModelLoadError for an option or a device that does not work with the model.

    platform: "cpu", "gpu" or "tpu".
    """
    if spec.compressed is not None:
        if platform == "tpu":  # XLA would copy all pages, to read single tokens
            raise ModelLoadError(
                "the model has compressed attention, which does not run on TPUs yet: use a CPU or a GPU"
            )
        _refuse(config, NOT_WITH_COMPRESSED, "the compressed attention of this model")
    elif any(spec.recurrent):
        _refuse(config, NOT_WITH_STATE, "the recurrent layers of this model")
    if spec.layer_kv:
        _refuse_with_unlike_layers(spec, config, platform)
    if spec.indexer is not None:
        _refuse_with_indexer(spec.indexer, config, platform)


def refuse_block_size(compressed: Compressed, block_size: int) -> None:
    """Raise ModelLoadError unless blocks consist of whole entries, or entries of whole blocks."""
    for kind, ratio in zip((Entries.SPARSE, Entries.HEAVY), compressed.ratios, strict=True):
        if kind in compressed.entries and (ratio < 2 or (block_size % ratio and ratio % block_size)):
            raise ModelLoadError(
                f"block_size={block_size}: must be a multiple or a divisor of the {ratio} tokens of an entry "
                "(compress_rates of the model's config.json), which must be at least 2"
            )


def _refuse(config: EngineConfig, names: Sequence[str], layers: str) -> None:
    """Raise ModelLoadError if one of the options has another value than its default."""
    defaults = EngineConfig(model=config.model)
    for name in names:
        if (value := getattr(config, name)) != getattr(defaults, name):
            raise ModelLoadError(f"{name}={value!r}: does not work with {layers} yet: leave it out")


def _refuse_with_unlike_layers(spec: DecoderSpec, config: EngineConfig, platform: str) -> None:
    """Raise ModelLoadError for an option or a device that does not work with layers with unlike KV (`layer_kv`)."""
    sizes = sorted({kv.head_dim for kv in spec.layer_kv})
    if platform == "tpu" and len(sizes) > 1 and any(size % 128 for size in sizes):
        raise ModelLoadError(f"KV heads of {sizes}: unlike sizes must be multiples of 128 on TPU; use a GPU or a CPU")
    _refuse(config, NOT_WITH_UNLIKE_LAYERS, "a model whose layers have unlike keys and values")


def _refuse_with_indexer(indexer: Indexer, config: EngineConfig, platform: str) -> None:
    """Raise ModelLoadError for devices and options that do not work with sparse attention."""
    if platform == "tpu":  # XLA would copy all pages, to read single tokens
        raise ModelLoadError("the model has sparse attention, which does not run on TPUs yet: use a CPU or a GPU")
    if indexer.layers and config.pipeline_parallel_size > 1:
        raise ModelLoadError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: layers of this model attend to the tokens that "
            "the layer before has chosen, which is not passed to another stage yet: leave it out"
        )
