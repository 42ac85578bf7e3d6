"""Small tokenizers with the added tokens of real tokenizers, special or not, in the order of the real ids.

The added tokens follow a byte-level vocabulary of 300 tokens.
"""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 384  # of a model for any of the tokenizers, which are smaller
TEXT = 'a call: {"name": "forecast", "arguments": {"unit": "C", "days": 1}} true false null the of and to 0 1 2024'
PLAIN = {
    "qwen3": (
        "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
        "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    ),
}  # fmt: skip
SPECIAL = {
    "qwen3": (
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
        "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
        "<|image_pad|>", "<|video_pad|>",
    ),
    "llama3": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|reserved_special_token_3|>",
    ),
    "mistral": (
        "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
        "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]",
        "[/THINK]",
    ),
    "gpt-oss": (
        "<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>",
        "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
        "<|reserved_200009|>", "<|call|>", "<|endofprompt|>",
    ),
}  # fmt: skip
ENDS = {
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "mistral": ("</s>",),
    "gpt-oss": ("<|return|>", "<|endoftext|>", "<|call|>"),
}
NAMES = tuple(SPECIAL)


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of one of NAMES."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[name]])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN.get(name, ())])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDS[name][0])


def ids(name: str, *texts: str) -> tuple[int, ...]:
    return tuple(tokenizer(name).convert_tokens_to_ids(list(texts)))
