"""Encoders: vectors and scores equal Transformers', and do not depend on the load. Refused calls and files. On CPU."""

import json

import numpy as np
import pytest

from jpaged import LLM, PoolingParams, RequestError
from tests.golden.checkpoints import prompts, write_checkpoint
from tests.golden.encoders import (
    BERT,
    CLASSIFIERS,
    EMBEDDERS,
    RERANKER,
    SEED,
    recorded,
    sha256_of,
    token_types,
)

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
    "variant", [pytest.param(v, id=v.name, marks=[pytest.mark.slow] * (v is not RERANKER)) for v in CLASSIFIERS]
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
