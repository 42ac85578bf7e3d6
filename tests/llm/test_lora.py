"""LLM with LoRA adapters: PEFT's answers, the same bits in any batch, and the ways to name an adapter."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from jpaged import LLM, LoRARequest, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError, RequestError
from jpaged.lora.request import LoRARequest as VllmsName
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import write_checkpoint
from tests.loading.recorded_adapters import Recorded, recorded, tensors_of
from tests.support.drafting import Recorded as KnownAnswers
from tests.support.drafting import always_drafting
from tests.support.tiny_engine import sampling_programs

OPTIONS = {
    "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "skip_tokenizer_init": True, "max_model_len": 64,
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 22, "row_buckets": [8],
    "token_buckets": [32], "dtype": "float32",
}  # fmt: skip
NAMES = ("llama", "llama-qv", "llama-patterns", "llama-one-layer")


@dataclasses.dataclass
class Served:
    """An engine on a tiny checkpoint, and folders of adapters."""

    llm: LLM
    records: dict[str, Recorded]
    folders: dict[str, str]

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + NAMES.index(name), self.folders[name])

    def answers(self, prompt, names, **params):
        """(token ids, log-probabilities) of a prompt with each adapter, in one batch."""
        params = {"temperature": 0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True} | params
        requests = [self.request(name) for name in names]
        outputs = self.llm.generate(
            [prompt] * len(names), SamplingParams(**params), use_tqdm=False, lora_request=requests
        )  # fmt: skip
        return [of(output) for output in outputs]


def of(output):
    answer = output.outputs[0]
    logprobs = [entries[token].logprob for entries, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    return list(answer.token_ids), logprobs


def written(tmp_path, names) -> tuple[dict[str, Recorded], dict[str, str]]:
    records = {name: recorded(name) for name in names}
    first = records[names[0]]
    write_checkpoint(CHECKPOINTS[first.variant.base], first.values["base_seed"], tmp_path / "model")
    return records, {name: str(one.write(tmp_path / name)) for name, one in records.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    records, folders = written(folder, NAMES)
    with sampling_programs(SamplerVariant.FULL):
        llm = LLM(str(folder / "model"), **OPTIONS)
    with llm:
        yield Served(llm, records, folders)


def check_recorded(found, values):
    """PEFT's greedy tokens, and its log-probabilities, up to rounding."""
    token_ids, logprobs = found
    assert token_ids == values["tokens"]
    np.testing.assert_allclose(logprobs, values["logprobs"], atol=2e-4)


def test_answers_are_pefts(served):
    prompt = served.records["llama"].values["prompt"]
    found = served.answers(prompt, [*NAMES, None], max_tokens=16)  # more adapters than slots
    for name, one in zip(NAMES, found, strict=False):
        values = served.records[name].values
        assert values["prompt"] == prompt
        check_recorded(one, values)
    assert found[-1][0] == served.records["llama"].values["base_tokens"]
    assert served.llm.stats().compiles_after_ready == 0


def test_an_answer_has_the_same_bits_in_any_batch(served):
    prompt = list(range(40, 64))
    alone = [served.answers(prompt, [name])[0] for name in (*NAMES, None)]
    served.llm.reset_prefix_cache()
    names = [*NAMES, None, *NAMES[::-1], None]
    for name, found in zip(names, served.answers(prompt, names), strict=True):
        assert found == alone[(*NAMES, None).index(name)]


def test_prefixes_are_shared_within_an_adapter_only(served):
    prompt = [7, *range(100, 140)]
    params = SamplingParams(temperature=0, max_tokens=1)

    def cached(name):
        request = served.request(name)
        [output] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        return output.num_cached_tokens

    served.llm.reset_prefix_cache()
    assert [cached(name) for name in ("llama", None, "llama-qv")] == [0, 0, 0]
    assert [cached(name) for name in ("llama", None, "llama-qv")] == [32, 32, 32]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "speculates"),
    [
        ("qwen3.5", True), ("qwen3-next", False), ("lfm2", False), ("granite4-hybrid", True), ("nemotron-h", False),
        ("nemotron-h-latent", False), ("falcon-h1", False), ("gemma4", True), ("gemma4-moe", False), ("gemma3n", True),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_recurrent_and_unlike_layers_have_adapters_and_a_prefix_belongs_to_one(name, speculates, tmp_path):
    """A prefix is found with the adapter that computed it. The answer has the same bits then, also with drafts."""
    records, folders = written(tmp_path, (name,))
    values = records[name].values
    prompt, longer = values["prompt"], (values["prompt"][::-1] * 3)[:41]
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True)
    adapter = LoRARequest(name, 1, folders[name])
    with sampling_programs(SamplerVariant.FULL):
        plain = LLM(str(tmp_path / "model"), **OPTIONS)
    with plain:
        found = plain.generate([prompt] * 2, params, use_tqdm=False, lora_request=[adapter, None])
        check_recorded(of(found[0]), values)
        assert of(found[1])[0] == values["base_tokens"]

        def ask(llm, request):
            (output,) = llm.generate([longer], params, use_tqdm=False, lora_request=request)
            return of(output), output.num_cached_tokens

        (cold, none), (base, still_none) = ask(plain, adapter), ask(plain, None)
        assert none == still_none == 0
        assert cold[0] != base[0]
        assert [ask(plain, adapter), ask(plain, None)] == [(cold, 32), (base, 32)]
    if speculates:
        drafter = KnownAnswers([[*longer, *answer[0]] for answer in (cold, base)], vocab_size=320)
        options = {"speculative_config": {"method": "custom", "function": drafter}, **OPTIONS}
        with always_drafting(), LLM(str(tmp_path / "model"), **options) as llm:
            llm.wait_until_ready()
            for cached in (0, 32):
                assert [ask(llm, adapter), ask(llm, None)] == [(cold, cached), (base, cached)]
            assert llm.stats().speculation.accepted_tokens > 0


def test_a_reload_serves_the_new_adapter_and_none_of_the_old_blocks(served, tmp_path):
    prompt, folder = list(range(60, 100)), tmp_path / "changing"
    shutil.copytree(served.folders["llama"], folder)
    request = LoRARequest("changing", 90, str(folder))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)

    def answer(request):
        [output] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        return of(output), output.num_cached_tokens

    old, _ = answer(request)
    shutil.rmtree(folder)
    shutil.copytree(served.folders["llama-qv"], folder)
    assert answer(request) == (old, 32), "the folder is read once"
    wanted, _ = answer(served.request("llama-qv"))
    assert answer(dataclasses.replace(request, load_inplace=True)) == (wanted, 0)
    assert answer(request) == (wanted, 32)
    assert served.llm.remove_lora("changing")
    assert not served.llm.remove_lora(90)


def test_live_arrays_are_an_adapter(served):
    arrays = tensors_of(Path(served.folders["llama"]))
    assert served.llm.add_lora("live", arrays, lora_alpha=4)
    prompt = list(range(10, 30))
    request = LoRARequest("live", max(served.llm.list_loras()))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    [output] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
    assert of(output) == served.answers(prompt, ["llama"])[0]
    served.llm.add_lora("live", {name: 0 * array for name, array in arrays.items()}, lora_alpha=4)
    [output] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
    assert of(output) == served.answers(prompt, [None])[0]
    served.llm.remove_lora("live")


def test_live_arrays_have_the_number_of_their_request_and_stay_if_new_ones_are_bad(served):
    arrays, request = tensors_of(Path(served.folders["llama"])), LoRARequest("live", 70)
    assert served.llm.add_lora(request, arrays, lora_alpha=4)
    assert 70 in served.llm.list_loras()
    prompt = list(range(10, 30))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    with pytest.raises(ModelLoadError, match="tensor foo"):
        served.llm.add_lora("live", {"foo": np.zeros((2, 2))}, lora_alpha=4)
    [output] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
    assert of(output) == served.answers(prompt, ["llama"])[0]
    with pytest.raises(RequestError, match="number of adapter 'live'"):
        served.llm.add_lora(LoRARequest("other", 70), arrays, lora_alpha=4)
    with pytest.raises(RequestError, match="lora_path must be empty"):
        served.llm.add_lora(LoRARequest("other", 71, "folder"), arrays, lora_alpha=4)
    with pytest.raises(RequestError, match="one or more matrices"):
        served.llm.add_lora("other", {}, lora_alpha=4)
    assert served.llm.remove_lora(70)


def test_several_answers_and_beams_have_the_adapter(served):
    prompt, request = list(range(10, 30)), served.request("llama")
    one = served.answers(prompt, ["llama"])[0]
    params = SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=8, logprobs=0, ignore_eos=True)
    [mixed] = served.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
    [base] = served.llm.generate([prompt], params, use_tqdm=False)
    assert [a.token_ids for a in mixed.outputs] != [a.token_ids for a in base.outputs]
    greedy = SamplingParams(temperature=0, n=2, max_tokens=8, logprobs=2, ignore_eos=True)
    [output] = served.llm.generate([prompt], greedy, use_tqdm=False, lora_request=request)
    assert [list(answer.token_ids) for answer in output.outputs] == [one[0], one[0]]


def test_prompt_logprobs_are_the_adapters(served):
    """A score has the bits of the log-probability that sampling reports at the same position."""
    prompt = list(range(10, 30))
    token_ids, logprobs = served.answers(prompt, ["llama"])[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = served.llm.generate(
        [prompt + token_ids], params, use_tqdm=False, lora_request=served.request("llama")
    )  # fmt: skip
    scored = [entries[token].logprob for entries, token in
              zip(output.prompt_logprobs[len(prompt) :], token_ids, strict=True)]  # fmt: skip
    assert scored == logprobs


def test_answers_stay_the_same_after_sleep(served):
    prompt = list(range(70, 90))
    before = served.answers(prompt, [*NAMES, None])
    served.llm.sleep()
    served.llm.wake_up()
    assert served.answers(prompt, [*NAMES, None]) == before


@pytest.mark.slow
def test_adapters_stay_when_the_weights_are_replaced(served, tmp_path):
    """Answers are those of a fresh engine with the new weights. With the old weights again, they are the old ones."""
    prompt, names = list(range(30, 50)), [*NAMES, None]
    base = served.records["llama"]
    write_checkpoint(CHECKPOINTS[base.variant.base], base.values["base_seed"] + 1, tmp_path / "new")
    with sampling_programs(SamplerVariant.FULL), LLM(str(tmp_path / "new"), **OPTIONS) as fresh:
        wanted = Served(fresh, served.records, served.folders).answers(prompt, names)
    before = served.answers(prompt, names)
    served.llm.update_weights(tmp_path / "new")
    assert served.answers(prompt, names) == wanted
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    assert all(a != b for a, b in zip(before, wanted, strict=True))
    served.llm.update_weights(Path(served.folders["llama"]).parent / "model")
    assert served.answers(prompt, names) == before


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda s: "llama", "must be a jpaged.LoRARequest"),
        (lambda s: {"lora_name": "llama"}, "must be a jpaged.LoRARequest"),
        (lambda s: LoRARequest("unknown", 77), "unknown adapter"),
        (lambda s: LoRARequest("llama", 77, s.folders["llama"]), "has 1"),
        (lambda s: LoRARequest("other", 1, s.folders["llama"]), "is the number of adapter 'llama'"),
        (lambda s: LoRARequest("llama", 1, s.folders["llama-qv"]), "set load_inplace"),
        (lambda s: [None, None], "a list of 2"),
    ],
)
def test_a_wrong_request_is_refused(served, request_of, says):
    served.answers([1, 2], ["llama"])
    with pytest.raises(RequestError, match=says):
        served.llm.generate([[1, 2]], use_tqdm=False, lora_request=request_of(served))


def test_a_folder_that_cannot_be_read_leaves_no_name_behind(served, tmp_path):
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="adapter_config"):
            served.llm.generate([[1, 2]], use_tqdm=False, lora_request=LoRARequest("none", 55, str(tmp_path)))
    assert 55 not in served.llm.list_loras()
    assert served.answers([1, 2], [None])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (("", 1), "lora_name"), (("\ud800", 1), "surrogates"), (("x\ny", 1), "lora_name must have no line breaks"),
        (("x", 0), "lora_int_id"), (("x", True), "lora_int_id"), (("x", 1, 3), "lora_path"),
    ],
)  # fmt: skip
def test_a_request_names_its_wrong_field(values, says):
    with pytest.raises(RequestError, match=says):
        LoRARequest(*values)
    assert VllmsName is LoRARequest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_loras": 0}, "max_loras"), ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"), ({"lora_dtype": "int8"}, "lora_dtype"),
        ({"enable_lora": True, "deterministic": True}, "deterministic"),
        ({"enable_lora": True, "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(options, says):
    with pytest.raises(RequestError, match=says):
        LLM("demo", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "llama-mha-rslora", "llama-embeddings", "llama-tied-embedding", "llama-tied-head", "llama-tied-both", "phi3",
    "gpt2", "qwen2", "qwen3", "gemma2", "falcon-new", "gpt-neox", "opt-350m", "mixtral-fused", "mixtral-down",
    "mixtral-experts", "gpt-oss", "qwen2-moe",
])  # fmt: skip
def test_answers_are_pefts_for_every_family(name, tmp_path):
    records, folders = written(tmp_path, [name])
    values, params = records[name].values, SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True)
    with sampling_programs(SamplerVariant.FULL):
        llm = LLM(str(tmp_path / "model"), **OPTIONS)
    with llm:
        adapted, base = llm.generate(
            [values["prompt"]] * 2, params, use_tqdm=False, lora_request=[LoRARequest("a", 1, folders[name]), None]
        )  # fmt: skip
    check_recorded(of(adapted), values)
    assert of(base)[0] == values["base_tokens"]


@pytest.mark.slow
def test_an_answer_has_the_bits_of_the_adapters_own_engine(served):
    """Another number of slots, another largest rank, other programs."""
    prompt = list(range(40, 64))
    mixed = dict(zip(NAMES, served.answers(prompt, NAMES), strict=True))
    model = str(Path(served.folders["llama"]).parent / "model")
    for name, rank in (("llama", 2), ("llama-patterns", 5)):
        found = mixed[name]
        with sampling_programs(SamplerVariant.FULL):
            llm = LLM(model, **OPTIONS | {"max_loras": 1, "max_lora_rank": rank, "max_num_seqs": 3})
        with llm:
            own = Served(llm, served.records, served.folders)
            assert own.answers(prompt, [name])[0] == found


@pytest.mark.slow
def test_drafts_change_no_answer(served):
    """Verify steps compute each token with its row's adapter, and drafts are accepted."""
    prompt = [5, 6, 7, 8] * 6
    wanted = served.answers(prompt, [*NAMES, None], max_tokens=24)
    model = str(Path(served.folders["llama"]).parent / "model")
    drafts = KnownAnswers([prompt + tokens for tokens, _ in wanted], wrong=5)
    speculation = {"method": "custom", "function": drafts, "num_speculative_tokens": 3}
    with always_drafting(), LLM(model, **OPTIONS | {"max_loras": 4}, speculative_config=speculation) as llm:
        llm.wait_until_ready()
        own = Served(llm, served.records, served.folders)
        assert own.answers(prompt, [*NAMES, None], max_tokens=24) == wanted
        assert llm.stats().speculation.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_a_quantised_model_has_adapters(served, quantization):
    """The adapter is added to the result of a quantised matmul. Answers are near those of the exact weights."""
    prompt, model = list(range(40, 64)), str(Path(served.folders["llama"]).parent / "model")
    with LLM(model, **OPTIONS, quantization=quantization) as llm:
        own = Served(llm, served.records, served.folders)
        found, base = own.answers(prompt, ["llama", None], max_tokens=1, logprobs=2)
    exact, exact_base = served.answers(prompt, ["llama", None], max_tokens=1, logprobs=2)
    assert found[0] == exact[0] != exact_base[0]
    assert abs(found[1][0] - exact[1][0]) < 0.2  # the base model differs as much
    assert abs(base[1][0] - exact_base[1][0]) < 0.2
