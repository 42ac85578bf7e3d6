"""A tokenizer like BERT's for the tiny encoders: one token a word, and types for pairs of texts."""

import tokenizers
import transformers

from tests.golden.encoders import NO, YES


def save_word_tokenizer(folder):
    """Save it. [CLS] text [SEP], and [CLS] text [SEP] text [SEP] with types. Words: w3 to w319, and no and yes."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{i}": i for i in range(3, 320)}
    vocabulary |= {"no": vocabulary.pop(f"w{NO}"), "yes": vocabulary.pop(f"w{YES}")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    ).save_pretrained(folder)
    return folder
