"""Encoders: vectors and scores equal Transformers', and do not depend on the load. Refused calls and files. On CPU."""

import json
import shutil

import numpy as np
import pytest

from jpaged import LLM, ModelLoadError, PoolingParams, RequestError
from jpaged.engine.strategies.pooled_outputs import activation_of
from jpaged.loading.convert import convert, export
from jpaged.loading.sentence_transformers import SentenceFiles
from jpaged.models.families import spec_of
from jpaged.text.pairs import _AFTER, _BEFORE
from tests.golden.checkpoints import prompts, write_checkpoint
from tests.golden.encoders import (
    BERT,
    CLASSIFIERS,
    EMBEDDERS,
    RERANKER,
    RERANKERS,
    SEED,
    recorded,
    sha256_of,
    token_types,
)
from tests.support.word_tokenizer import save_word_tokenizer

pytestmark = pytest.mark.codegen

COSINE = 1e-5   # limit of 1 - cosine
SCORE = 1e-4
OPTIONS = {
    "dtype": "float32", "token_buckets": (32, 160), "row_buckets": (4,), "max_model_len": 160, "max_num_seqs": 4,
}  # fmt: skip
SCORES = PoolingParams(activation=False)


def golden_prompts(variant, *, pairs=False):
    asked = [{"prompt_token_ids": ids} for ids in prompts(variant.config["vocab_size"])]
    if pairs:
        asked = [{**one, "token_type_ids": token_types(len(one["prompt_token_ids"]))} for one in asked]
    return asked


def pooled_by(folder, mode):
    """Write Sentence Transformers' files for a pooling mode."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (kind, path) in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    key = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}[mode]
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({key: True, "word_embedding_dimension": 64}))


def largest_angle(outputs, wanted):
    """Largest 1 - cosine, in float64."""
    ours, theirs = (np.array(rows, np.float64) for rows in ([o.outputs.embedding for o in outputs], wanted))
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return (1 - (ours * theirs).sum(1) / lengths).max()


@pytest.mark.parametrize(
    ("variant", "mode"),  # by default one; all of them in .ci/run
    [
        pytest.param(v, mode, id=f"{v.name}-{mode}", marks=[pytest.mark.slow] * (v is not BERT or mode != "mean"))
        for v in EMBEDDERS for mode in ("mean", "cls")
    ],
)  # fmt: skip
def test_an_embedding_is_transformers_pooled_vector(variant, mode, tmp_path):
    """All prompts at once, and each alone, give the same bits. Token vectors are those that the mean is made of."""
    assert write_checkpoint(variant, SEED, tmp_path) == sha256_of(variant)
    if mode == "cls":  # without files, an encoder is pooled by the mean
        pooled_by(tmp_path, mode)
    asked = golden_prompts(variant)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        llm.engine.runner.wait_until_ready()
        together = llm.embed(asked, use_tqdm=False)
        alone = [llm.embed(one, use_tqdm=False)[0] for one in asked]
        tokens = llm.encode(
            asked, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False
        )
        assert largest_angle(together, recorded(variant, mode)) < COSINE
        assert [o.outputs for o in alone] == [o.outputs for o in together]
        for each, whole in zip(tokens, together, strict=True):
            states = each.outputs.data
            assert states.shape == (len(each.prompt_token_ids), llm.spec.hidden_size)
            made = states.mean(0) if mode == "mean" else states[0]
            assert np.abs(made / np.linalg.norm(made) - whole.outputs.embedding).max() < 1e-6
        stats = llm.stats()
        assert stats.compiles_after_ready == stats.generated_tokens == stats.used_blocks == stats.prefix_hit_tokens == 0


@pytest.mark.parametrize(
    "variant", [pytest.param(v, id=v.name, marks=pytest.mark.slow) for v in CLASSIFIERS]
)
def test_a_classifier_gives_transformers_scores(variant, tmp_path):
    """Also of pairs, if the model has token types."""
    assert write_checkpoint(variant, SEED, tmp_path) == sha256_of(variant)
    has_types = variant.config.get("type_vocab_size", 1) > 1
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for pairs in (False, True)[: 1 + has_types]:
            asked = golden_prompts(variant, pairs=pairs)
            outputs = llm.classify(asked, pooling_params=SCORES, use_tqdm=False)
            wanted = recorded(variant, "pairs" if pairs else "scores")
            assert np.abs(np.array([o.outputs.probs for o in outputs]) - wanted).max() < SCORE
        if not has_types:
            with pytest.raises(RequestError, match="token_type_ids: the model has no token types"):
                llm.classify(golden_prompts(variant, pairs=True), use_tqdm=False)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return save_word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def reranker(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    write_checkpoint(RERANKER, SEED, folder)
    with LLM(str(folder), tokenizer=str(words), **OPTIONS) as llm:
        yield llm


QUERY, DOCUMENTS = "w5 w6 w12", ["w8 w9", "w5 w6 w12 w40 w41", "w100"]


def test_a_cross_encoder_scores_pairs(reranker):
    """`LLM.score` gives the tokens of the two texts types 0 and 1. Scores are Transformers'."""
    outputs = reranker.classify(golden_prompts(RERANKER, pairs=True), pooling_params=SCORES, use_tqdm=False)
    assert np.abs(np.array([o.outputs.probs for o in outputs]) - recorded(RERANKER, "pairs")).max() < SCORE
    scores = reranker.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, scores, strict=True):
        first = [1, *(int(word[1:]) for word in QUERY.split()), 2]
        second = [*(int(word[1:]) for word in document.split()), 2]
        assert output.prompt_token_ids == first + second
        asked = {"prompt_token_ids": first + second, "token_type_ids": [0] * len(first) + [1] * len(second)}
        [typed, plain] = reranker.classify([asked, {"prompt_token_ids": first + second}], use_tqdm=False)
        assert output.outputs.score == typed.outputs.probs[0] != plain.outputs.probs[0]
    assert reranker.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)[1].outputs == scores[1].outputs


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate("w5"), "runner: the engine does not generate: call classify"),
        (lambda llm: llm.embed("w5"), "task: the model is a sequence classifier"),
        (lambda llm: llm.encode("w5", pooling_task="token_classify"), "task: the model's score matrix is for whole"),
        (lambda llm: llm.score("w5"), "documents is missing"),
        (lambda llm: llm.score([], ["w5"]), "query must be a text"),
        (lambda llm: llm.score(5, ["w5"]), "query must be a text"),
        (lambda llm: llm.score("w5", {"text": "w6"}), "documents must be a text"),
        (lambda llm: llm.score("w5", ["w6", "\ud800"]), "documents is not valid Unicode: surrogates not allowed at"),
        (lambda llm: llm.score(["w5", "w6"], ["w5"] * 3), "query must be one text, or one for each"),
        (lambda llm: llm.score("w5", "w6", instruction="x"), "instruction: the model takes none"),
        (lambda llm: llm.classify(" ".join(["w5"] * 200)), "prompt has .*tokens, a prompt takes at most 160: "),
        (lambda llm: llm.classify({"prompt": "w5", "token_type_ids": [0]}), "token_type_ids goes with prompt_token_"),
        (lambda llm: llm.classify({"prompt_token_ids": [5, 6], "token_type_ids": [0]}), "token_type_ids must be a li"),
        (lambda llm: llm.classify({"prompt_token_ids": [5, 6], "token_type_ids": [1, 0]}), "token_type_ids must be 0"),
    ],
)
def test_refused_calls(reranker, call, says):
    with pytest.raises(RequestError, match=says):
        call(reranker)


def test_long_texts_are_cut_if_the_caller_asks(reranker):
    text, keep = " ".join(["w5"] * 200), PoolingParams(truncate_prompt_tokens=-1)
    [cut] = reranker.classify(text, pooling_params=keep, use_tqdm=False)
    assert cut.prompt_token_ids == [1] + [5] * 158 + [2]
    pair = {"prompt_token_ids": [5] * 8 + [6] * 8, "token_type_ids": [0] * 8 + [1] * 8}
    for side, kept in (("left", [5] * 2 + [6] * 8), ("right", [5] * 8 + [6] * 2)):
        params = PoolingParams(truncate_prompt_tokens=10, truncation_side=side)
        [ours] = reranker.classify(pair, pooling_params=params, use_tqdm=False)
        types = [int(token == 6) for token in kept]
        [wanted] = reranker.classify({"prompt_token_ids": kept, "token_type_ids": types}, use_tqdm=False)
        assert ours.outputs == wanted.outputs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runner": "generate"}, "runner='generate': the model is an encoder and has no lm_head"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: is for decoders, and the model is an encoder"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8': is for decoders"),
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens=100: must be at least max_model_len=160"),
        ({"max_model_len": 257}, "max_model_len=257: the model takes at most 256"),
    ],
)
def test_refused_options(options, says, tmp_path):
    write_checkpoint(BERT, SEED, tmp_path)
    with pytest.raises(ModelLoadError, match=says):
        LLM(str(tmp_path), **OPTIONS | options)


@pytest.mark.slow
def test_files_of_sentence_transformers(tmp_path, words):
    """Pooling, prompts and the length of a text come from the folder. Other modules are refused by name."""
    write_checkpoint(BERT, SEED, tmp_path)
    pooled_by(tmp_path, "cls")
    prompts_file, length_file = tmp_path / "config_sentence_transformers.json", tmp_path / "sentence_bert_config.json"
    prompts_file.write_text(json.dumps({"prompts": {"query": "w12 w8 ", "": ""}, "default_prompt_name": "query"}))
    length_file.write_text(json.dumps({"max_seq_length": 32}))
    options = OPTIONS | {"max_model_len": None, "token_buckets": (32,)}
    with LLM(str(tmp_path), tokenizer=str(words), **options) as llm:
        assert (llm.spec.encoder.pooling.value, llm.engine.runner.max_model_len) == ("cls", 32)
        for name, ids in ((None, [12, 8, 5]), ("query", [12, 8, 5]), ("", [5])):
            [output] = llm.embed("w5", pooling_params=PoolingParams(prompt_name=name, dimensions=8), use_tqdm=False)
            assert (output.prompt, output.prompt_token_ids) == ("w5", [1, *ids, 2])
            assert len(output.outputs.embedding) == 8
            assert abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-6
        with pytest.raises(RequestError, match=r"prompt_name must be one of query, , the model's prompts"):
            llm.embed("w5", pooling_params=PoolingParams(prompt_name="passage"))
        with pytest.raises(RequestError, match="prompt_name goes with a text"):
            llm.embed([[5]], pooling_params=PoolingParams(prompt_name="query"))
        one, two = (llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in ("w5", "w6"))
        [score] = llm.score("w5", "w6", use_tqdm=False)
        assert abs(score.outputs.score - np.dot(one, two)) < 1e-6
    for file, values, says in (
        (length_file, {"max_seq_length": 0}, "max_seq_length=0 must be a whole number above 0"),
        (prompts_file, {"prompts": ["x"]}, "prompts=.* must be an object of texts"),
        (prompts_file, {"default_prompt_name": "x"}, "default_prompt_name='x' must be one of none"),
        (tmp_path / "1_Pooling" / "config.json", {"pooling_mode_max_tokens": True}, "pooling by max_tokens is not"),
        (tmp_path / "1_Pooling" / "config.json", {"include_prompt": False}, "include_prompt=false is not supported"),
        (tmp_path / "modules.json", [{"type": "models.Dense", "path": "2_Dense"}], "'models.Dense'"),
        (tmp_path / "modules.json", [{"type": "Pooling", "path": "../x"}], "path='../x' must be a folder next to"),
    ):
        before = file.read_text()
        file.write_text(json.dumps(values))
        with pytest.raises(ModelLoadError, match=says):
            SentenceFiles.read(tmp_path).applied(spec_of(BERT.config), tmp_path)
        file.write_text(before)


@pytest.mark.parametrize(
    "variant", [pytest.param(v, id=v.name, marks=pytest.mark.slow) for v in RERANKERS]
)
def test_a_causal_model_scores_by_two_tokens(variant, tmp_path, words):
    """Qwen3-Reranker's way, with vLLM's options: the probability of yes, among yes and no."""
    assert write_checkpoint(variant, SEED, tmp_path) == sha256_of(variant)
    shutil.copytree(words, tmp_path, dirs_exist_ok=True)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }  # fmt: skip
    options = {"dtype": "float32", "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(str(tmp_path), hf_overrides=overrides, **options) as llm:
        outputs = llm.classify(golden_prompts(variant), use_tqdm=False)
        assert np.abs(np.array([o.outputs.probs for o in outputs]) - recorded(variant, "scores")).max() < SCORE
        [score] = llm.score("w5", "w6", instruction="w9", use_tqdm=False)
        text = _BEFORE + "<Instruct>: w9\n<Query>: w5\n<Document>: w6" + _AFTER
        [alone] = llm.classify(text, use_tqdm=False)
        assert score.prompt_token_ids == alone.prompt_token_ids
        assert score.outputs.score == alone.outputs.probs[0]
    for tokens, says in ((["no"], "must be two tokens"), (["no", "maybe"], "has no token 'maybe'")):
        with pytest.raises(ModelLoadError, match=says):
            LLM(str(tmp_path), hf_overrides=overrides | {"classifier_from_token": tokens}, **options)


def test_the_activation_of_a_cross_encoder():
    """Sentence Transformers names it in config.json, under a new key or an old one."""
    name = "torch.nn.modules.{}"
    new = {"sentence_transformers": {"activation_fn": name.format("linear.Identity")}}
    assert activation_of(new, 1).value == "none"
    old = {"sbert_ce_default_activation_function": name.format("activation.Sigmoid")}
    assert activation_of(old, 3).value == activation_of({}, 1).value == "sigmoid"
    with pytest.raises(ModelLoadError, match="activation_fn='x' is not supported"):
        activation_of({"sentence_transformers": {"activation_fn": "x"}}, 1)


@pytest.mark.slow
def test_weights_of_an_encoder(tmp_path):
    """Updates, sleep, conversion and quantisation work as for decoders. The first layer of ModernBERT has no norm."""
    [variant] = (one for one in EMBEDDERS if one.name == "modernbert")
    first, second, converted, restored = (tmp_path / name for name in ("first", "second", "converted", "restored"))
    write_checkpoint(variant, SEED, first)
    write_checkpoint(variant, SEED + 1, second)
    texts, options = [[5, 6, 7], [8] * 20], OPTIONS | {"token_buckets": (32,), "max_model_len": 32}

    def vectors(llm):
        return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]

    with LLM(str(first), **options) as llm:
        wanted = vectors(llm)
        llm.update_weights(str(second))
        assert vectors(llm) != wanted
        llm.update_weights(str(first))
        assert vectors(llm) == wanted
        llm.sleep()
        llm.wake_up()
        assert vectors(llm) == wanted
        assert llm.stats().compiles_after_ready == 0
        assert llm.inspect().pool.used_blocks == 0
    convert(str(first), converted)
    with LLM(str(converted), **options) as llm:
        assert vectors(llm) == wanted
    export(str(converted), restored)
    assert (restored / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    with LLM(str(first), quantization="int8", data_parallel_size=2, **options) as llm:
        for exact, rounded in zip(wanted, vectors(llm), strict=True):
            assert 0.99 < np.dot(exact, rounded) < 1 - 1e-7
