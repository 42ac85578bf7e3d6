"""The benchmarks' workloads: their sizes, equal for equal seeds, and errors for workloads that cannot run."""

import json

import pytest

from jpaged.cli.bench.workloads import WorkloadFlags
from jpaged.errors import RequestError


def make(flags: WorkloadFlags, **options):
    return flags.requests(**{"vocab_size": 500, "max_model_len": 2048, "seed": 0, "encode": None} | options)


def sizes(requests):
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


def test_random_has_the_default_sizes():
    requests = make(WorkloadFlags())
    assert sizes(requests) == [(1024, 128)] * 1000
    assert all(0 <= token_id < 500 for request in requests for token_id in request.prompt_token_ids)
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1000


def test_random_range_and_prefix():
    requests = make(WorkloadFlags(num_prompts=200, input_len=100, output_len=20, random_range_ratio=0.5, prefix_len=30))
    prompts, outputs = zip(*sizes(requests), strict=True)
    assert (min(prompts), max(prompts)) == (80, 180)
    assert (min(outputs), max(outputs)) == (10, 30)
    assert len({tuple(request.prompt_token_ids[:30]) for request in requests}) == 1


def test_random_total_is_uniform_with_enough_output():
    flags = WorkloadFlags(dataset_name="random-total", total_len_min=256, total_len_max=1024, num_prompts=2000)
    requests = make(flags)
    totals = [prompt + output for prompt, output in sizes(requests)]
    assert (min(totals), max(totals)) == (256, 1024)
    assert abs(sum(totals) / len(totals) - 640) < 20
    assert min(output for _, output in sizes(requests)) == 16
    assert min(prompt for prompt, _ in sizes(requests)) >= 1


def test_same_seed_same_workload():
    flags = WorkloadFlags(num_prompts=3, input_len=9, random_range_ratio=0.9)
    assert make(flags, seed=1) == make(flags, seed=1) != make(flags, seed=2)


def encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def conversation(question: str, answer: str) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_is_filtered(tmp_path):
    path = tmp_path / "sharegpt.json"
    entries = [
        conversation("q" * 10, "a" * 20),
        conversation("q" * 3, "a" * 20),          # prompt too short
        conversation("q" * 10, "a" * 3),          # answer too short
        conversation("q" * 1025, "a" * 20),       # prompt too long
        conversation("q" * 1000, "a" * 1100),     # too long together
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    path.write_text(json.dumps(entries))
    assert sizes(make(WorkloadFlags(dataset_path=path, num_prompts=1), encode=encode_bytes)) == [(10, 20)]
    flags = WorkloadFlags(dataset_path=path, num_prompts=2, output_len=7)
    assert sorted(sizes(make(flags, encode=encode_bytes))) == [(10, 7), (1000, 7)]
    with pytest.raises(RequestError, match="only 1 conversations"):
        make(WorkloadFlags(dataset_path=path, num_prompts=2), encode=encode_bytes)


@pytest.mark.parametrize(
    ("flags", "parameter"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": -1}, "output_len"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"prefix_len": -1}, "prefix_len"),
        ({"input_len": 2000, "output_len": 100}, "input_len"),
        ({"dataset_name": "random-total", "total_len_min": 16}, "total_len_min"),
        ({"dataset_name": "random-total", "total_len_min": 30, "total_len_max": 20}, "total_len_min"),
        ({"dataset_name": "sharegpt"}, "dataset_path"),
    ],
)
def test_flags_that_do_not_fit(flags, parameter):
    with pytest.raises(RequestError) as refused:
        make(WorkloadFlags(**flags))
    assert refused.value.parameter == parameter


def test_files_without_conversations(tmp_path):
    for text in ("", "{}", "[1]", '[{"conversations": [1, 2]}]'):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(RequestError):
            make(WorkloadFlags(dataset_path=path, num_prompts=1), encode=list)
