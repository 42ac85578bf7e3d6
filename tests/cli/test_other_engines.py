"""Flags of vLLM's command line: accepted if they change nothing, otherwise "not supported yet"."""

import itertools

import pytest

from jpaged import LLM, cli
from jpaged.cli.flags.other_engines import without_neutral
from jpaged.errors import RequestError
from jpaged.frontend.engine_config import engine_config

ACCEPTED = [
    ["--num-scheduler-steps", "1"], ["--num-scheduler-steps=1"], ["--enforce-eager"],
    ["--no-enforce-eager"], ["--num_scheduler_steps", "1"],
    ["--enable-chunked-prefill"], ["--cpu-offload-gb", "0.0"], ["--quantization", "None"],
]  # fmt: skip
REFUSED = [
    (["--num-scheduler-steps", "2"], "leave it out, or 1, got 2"),
    (["--num-scheduler-steps"], "num_scheduler_steps: not supported yet"),
    (["--no-enable-chunked-prefill"], "enable_chunked_prefill: not supported yet"),
    (["--cpu-offload-gb", "4"], "cpu_offload_gb: not supported yet"),
    (["--kv-transfer-config", '{"kv_role": "kv_both"}'], "kv_transfer_config: not supported yet"),
]


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench throughput", "plan"])
def test_flags_that_ask_for_nothing(command):
    line = [*command.split(), "demo"]
    for words in ACCEPTED:
        assert without_neutral([*line, *words]) == without_neutral([*line[:-1], *words, "demo"]) == line
    assert cli.parse([*line, *itertools.chain(*ACCEPTED)]) == cli.parse(line)


@pytest.mark.parametrize(("words", "says"), REFUSED)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_flags_that_ask_for_more_are_not_supported_yet(command, words, says, capsys):
    assert cli.main([command, "demo", *words]) == 2
    error = capsys.readouterr().err
    assert ": not supported yet: " in error
    assert says in error


def test_flags_of_the_server():
    assert cli.parse(["serve", "demo", "--enable-auto-tool-choice"]) == cli.parse(["serve", "demo"])
    with pytest.raises(RequestError, match=r"^enable_auto_tool_choice: not supported yet.*, got False"):
        cli.parse(["serve", "demo", "--no-enable-auto-tool-choice"])
    with pytest.raises(SystemExit):
        cli.parse(["chat", "demo", "--enable-auto-tool-choice"])


def test_words_after_two_dashes_and_other_commands_are_kept():
    for line in (["generate", "demo", "--", "--enforce-eager"], ["convert", "demo", "--enforce-eager"], []):
        assert without_neutral(line) == line


def test_names_of_flags_that_jpaged_has():
    asked = ["--max-num-queued-reqs", "8", "--max-num-queued-tokens=100", "--kv-offloading-size", "0.5"]
    ours = ["--max-queued-requests", "8", "--max-queued-tokens=100", "--swap-space", "0.5"]
    asked += ["--kv-offloading-backend", "native"]
    assert cli.parse(["serve", "demo", *asked]) == cli.parse(["serve", "demo", *ours])
    config = engine_config("demo", {"max_num_queued_reqs": 8, "max_num_queued_tokens": None, "kv_offloading_size": 0.5})
    assert (config.max_queued_requests, config.max_queued_tokens, config.swap_space) == (8, None, 0.5)
    with pytest.raises(RequestError, match="vLLM's name for swap_space"):
        engine_config("demo", {"swap_space": 1, "kv_offloading_size": 1})


def test_python_agrees():
    with pytest.raises(RequestError, match=r"^num_scheduler_steps: not supported yet"):
        LLM("nowhere", num_scheduler_steps=2)


def test_short_flags():
    assert cli.parse(["generate", "demo", "-tp", "4"]).engine.tensor_parallel_size == 4
    assert cli.parse(["generate", "demo", "-tp=4"]).engine.tensor_parallel_size == 4
    assert cli.parse(["serve", "demo", "-pp", "2"]).engine.pipeline_parallel_size == 2
    assert cli.parse(["serve", "demo", "-dp", "2"]).engine.data_parallel_size == 2


@pytest.mark.parametrize("words", [["--quantization", "int8"], ["--quantization=int8"], ["-q", "int8"]])
def test_quantization(words):
    assert cli.parse(["generate", "demo", *words]).engine.quantization == "int8"


def test_unknown_quantization(capsys):
    assert cli.main(["generate", "demo", "-q", "int2"]) == 2
    assert "must be one of int8, int4, fp8, w8a8, the format of a quantised checkpoint" in capsys.readouterr().err
