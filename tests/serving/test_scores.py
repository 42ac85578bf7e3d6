"""/score, /rerank, /classify, /pooling, and the fields of /v1/embeddings: a fake engine, and tiny models."""

import base64

import httpx
import numpy as np
import pytest
import tokenizers
import transformers

from jpaged import LLM
from jpaged.params.pooling import PooledModel
from tests.golden.checkpoints import write_checkpoint
from tests.golden.encoders import BERT, RERANKER
from tests.golden.pooling import BARE_QWEN3, CLASSIFIERS, QWEN3_CLASSIFIER, SEED
from tests.serving.http_client import answer, param
from tests.serving.pooling_server import OPTIONS, served, third
from tests.support.word_tokenizer import save_word_tokenizer

ONE_LABEL = next(one for one in CLASSIFIERS if one.name == "llama-classifier")


@pytest.fixture
def engine(engine):
    engine.pooling = PooledModel("embed", 4)
    return engine


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    """A tokenizer of single bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    folder = str(tmp_path_factory.mktemp("bytes"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def cosine(first: str, second: str) -> float:
    return float(np.float32(third(*first.encode())) @ np.float32(third(*second.encode())))


@pytest.mark.parametrize("names", ["text_1 text_2", "data_1 data_2", "queries documents", "queries items"])
def test_one_text_against_several_and_pairs(url, names):
    one, other = names.split()
    made = answer(url, "/score", **{one: "ab", other: ["cd", "ef"]})
    assert [entry["score"] for entry in made["data"]] == [cosine("ab", "cd"), cosine("ab", "ef")]
    assert [(entry["index"], entry["object"]) for entry in made["data"]] == [(0, "score"), (1, "score")]
    assert made["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
    made = answer(url, "/v1/score", **{one: ["ab", "xy"], other: ["cd", "ef"]})
    assert [entry["score"] for entry in made["data"]] == [cosine("ab", "cd"), cosine("xy", "ef")]


def test_rerank(url):
    documents = ["aa", "zz", {"text": "mm"}]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        made = answer(url, path, query="ab", documents=documents)["results"]
        assert [one["index"] for one in made] == [1, 2, 0]
        assert [one["document"]["text"] for one in made] == ["zz", "mm", "aa"]
        assert made[0]["relevance_score"] == cosine("ab", "zz")
    made = answer(url, "/rerank", query="ab", documents=documents, top_n=1, return_documents=False)["results"]
    assert made == [{"index": 1, "relevance_score": cosine("ab", "zz")}]
    cut = answer(url, "/rerank", query="ab", documents=["cd--", "efgh"], max_tokens_per_doc=2)
    assert cut["usage"]["prompt_tokens"] == 6
    assert [one["document"]["text"] for one in cut["results"]] == ["efgh", "cd--"]


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "items": "c"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": [{"image": "http://a/b.png"}]}, "documents[0].image"),
        ("/classify", {}, "input"),
        ("/pooling", {"input": "a", "task": "score"}, "task"),
    ],
)
def test_what_is_refused(url, path, body, wanted):
    assert param(url, path, **body) == wanted


def test_an_engine_that_generates_refuses(url, engine):
    engine.pooling = None
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/classify", {"input": "a"})):
        assert param(url, path, **body) == "runner"


def test_classify(url, engine):
    engine.pooling = PooledModel("classify", 2, ("bad", "good"))
    made = answer(url, "/classify", input=["a", "b"])
    wanted = {"label": "good", "probs": [0.25, 0.75], "num_classes": 2}
    assert made["data"] == [{"index": 0} | wanted, {"index": 1} | wanted]
    answer(url, "/classify", input="a", use_activation=False)
    assert engine.seen_pooling[-1].activation is False
    assert answer(url, "/pooling", input="a")["data"] == [{"index": 0, "object": "pooling", "data": [0.25, 0.75]}]
    assert param(url, "/score", text_1="a", text_2="b") == "model"  # two labels


def test_fields_of_embeddings(url, engine):
    def embed(**fields) -> dict:
        return answer(url, "/v1/embeddings", **fields)["data"][0]["embedding"]

    values = np.float32(third(97, 98))
    raw = {name: base64.b64decode(embed(input="ab", encoding_format="base64", **fields)) for name, fields in {
        "half": {"embed_dtype": "float16"}, "brain": {"embed_dtype": "bfloat16"}, "big": {"endianness": "big"},
        "native": {"endianness": "native"},
    }.items()}  # fmt: skip
    assert np.frombuffer(raw["half"], "<f2").tolist() == values.astype(np.float16).tolist()
    import ml_dtypes

    assert np.frombuffer(raw["brain"], ml_dtypes.bfloat16).tolist() == values.astype(ml_dtypes.bfloat16).tolist()
    assert np.frombuffer(raw["big"], ">f4").tolist() == values.tolist()
    assert np.frombuffer(raw["native"], "=f4").tolist() == values.tolist()
    embed(input="ab", use_activation=False, truncate_prompt_tokens=1, truncation_side="right")
    asked = engine.seen_pooling[-1]
    assert (asked.normalize, asked.truncate_prompt_tokens, asked.truncation_side) == (False, 1, "right")
    assert embed(input="ab", add_special_tokens=False) == third(97, 98)
    assert embed(messages=[{"role": "user", "content": "x"}]) == third(*b"<user>x<assistant>")
    assert engine.tokenizer.seen_options["add_generation_prompt"] is False


def test_an_embedding_model_scores_by_cosine(tmp_path):
    write_checkpoint(BARE_QWEN3, SEED, tmp_path)
    ids = [5, 6, 7, 8]
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        [short] = llm.embed([{"prompt_token_ids": ids[:2]}], use_tqdm=False)
    with served(tmp_path, runner="pooling") as url:
        said = answer(url, "/v1/embeddings", input=ids, truncate_prompt_tokens=2, truncation_side="right")
        assert said["data"][0]["embedding"] == short.outputs.embedding
        assert said["usage"]["prompt_tokens"] == 2
        assert answer(url, "/pooling", input=ids[:2])["data"][0]["data"] == short.outputs.embedding
        assert param(url, "/classify", input=ids) == "task"
        refused = httpx.post(f"{url}/score", json={"text_1": "a", "text_2": "b"})
        assert refused.status_code == 400  # this model has no tokenizer
        assert "tokenizer" in refused.json()["error"]["message"]


@pytest.mark.parametrize("variant", [pytest.param(QWEN3_CLASSIFIER, marks=pytest.mark.slow), ONE_LABEL])
def test_classifiers(variant, tmp_path, tokenizer_folder):
    write_checkpoint(variant, SEED, tmp_path)
    pair = ("red", "blue")
    with served(tmp_path, tokenizer=tokenizer_folder) as url:
        texts = {"text_1": pair[0], "text_2": pair[1]}
        if variant is QWEN3_CLASSIFIER:
            assert param(url, "/score", **texts) == "model"
            made = answer(url, "/classify", input=[5, 6])["data"][0]
            assert made["label"] == ("bad", "fair", "good")[int(np.argmax(made["probs"]))]
            return
        score = answer(url, "/score", **texts)["data"][0]["score"]
        ids = [answer(url, "/tokenize", prompt=text, add_special_tokens=False)["tokens"] for text in pair]
        alone = answer(url, "/classify", input=ids[0] + ids[1])["data"][0]
        assert (score, alone["label"]) == (alone["probs"][0], "LABEL_0")
        assert answer(url, "/rerank", query=pair[0], documents=[pair[1]])["results"][0]["relevance_score"] == score


ENCODER = {"max_model_len": 64, "max_num_seqs": 4, "row_buckets": (4,)}


@pytest.mark.slow
def test_a_cross_encoder(tmp_path):
    """Scores are those of `LLM.score`. A long document is cut if the client asks, and otherwise refused."""
    write_checkpoint(RERANKER, SEED, tmp_path)
    save_word_tokenizer(tmp_path)
    query, documents = "w5 w6", ["w8 w9", "w5 w6 w40", "w100"]
    with LLM(str(tmp_path), **OPTIONS | ENCODER) as llm:
        wanted = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
    with served(tmp_path, **ENCODER) as url:
        made = answer(url, "/rerank", query=query, documents=documents)["results"]
        assert {one["index"]: one["relevance_score"] for one in made} == dict(enumerate(wanted))
        assert [one["relevance_score"] for one in made] == sorted(wanted, reverse=True)
        scored = answer(url, "/v1/score", text_1=query, text_2=documents)
        assert [one["score"] for one in scored["data"]] == wanted
        assert scored["usage"]["prompt_tokens"] == 3 * 5 + 2 + 3 + 1
        long = " ".join(["w8", "w9"] * 40)
        assert param(url, "/rerank", query=query, documents=[long]) == "documents"
        cut = answer(url, "/rerank", query=query, documents=[long], max_tokens_per_doc=2)["results"]
        assert cut[0]["relevance_score"] == wanted[0]
        assert param(url, "/v1/embeddings", input="w5") == "task"
        assert param(url, "/v1/completions", prompt="w5") == "runner"


@pytest.mark.slow
def test_prompts_of_an_encoder(tmp_path):
    """`prompt_name` puts a text of config_sentence_transformers.json before the input."""
    write_checkpoint(BERT, SEED, tmp_path)
    save_word_tokenizer(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "w12 "}}')
    with served(tmp_path, **ENCODER) as url:
        named, whole = (
            answer(url, "/v1/embeddings", **fields)
            for fields in ({"input": "w5", "prompt_name": "query"}, {"input": "w12 w5"})
        )
        assert named["data"] == whole["data"]
        assert named["usage"]["prompt_tokens"] == 4
        assert param(url, "/v1/embeddings", input="w5", prompt_name="x") == "prompt_name"
