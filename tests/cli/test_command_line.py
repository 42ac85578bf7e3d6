"""The command line: complete and fast help, every way to name the model, errors in one line."""

import dataclasses
import itertools
import logging
import re
import subprocess
import sys
import types

import pytest

from jpaged import cli
from jpaged.cli.flags import engine as flags
from jpaged.cli.flags import groups
from jpaged.cli.flags.access import AccessFlags
from jpaged.cli.flags.chat import ChatFlags
from jpaged.cli.flags.config_file import words_of
from jpaged.cli.flags.sampling import SamplingFlags
from jpaged.config import SCHEDULING_POLICIES, EngineConfig
from jpaged.engine.scheduling.waiting_queue import POLICIES
from pallas_kernels.gated_dot import IMPLEMENTATIONS as GATED_DOT
from pallas_kernels.paged_attention import IMPLEMENTATIONS

COMMANDS = ["generate", "chat", "serve", "run-batch", "bench throughput", "bench latency", "plan"]


def run(*args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jpaged", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_engine_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in EngineConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert "{None}" not in text
    assert "Maximum number of requests that run at once" in text  # the docstring of the field


def test_help_of_scheduling_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    for shown in (
        "--scheduling-policy {fcfs,priority,shortest_first}", "--target-step-ms FLOAT", "--max-queued-requests INT",
        "--max-queued-tokens INT", "--swap-space FLOAT", "--fused-layers {true,false}", "an encoder (such as BERT)",
        "--max-num-partial-prefills INT", "(default: fcfs)",
    ):  # fmt: skip
        assert shown in text
    assert not any("\n" in doc for doc in flags.field_docs(EngineConfig).values())
    assert tuple(POLICIES) == SCHEDULING_POLICIES


@pytest.mark.parametrize(("field", "known"), [("attention", IMPLEMENTATIONS), ("gated_dot", GATED_DOT)])
def test_help_names_every_implementation(field, known):
    words = re.findall(r"\w+", flags.field_docs(EngineConfig)[f"{field}_implementation"])
    assert set(known) <= set(words)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("convert", "They have the original bytes, unless"),
        ("generate", "false: when no running beam has a better score so far"),
        ("serve", "0.0.0.0 accepts them from all networks"),
        ("plan", "Without --target, the device is an NVIDIA GPU"),
        ("simulate", "the number of clients that each send"),
    ],
)
def test_help_has_no_line_breaks_of_docstrings(command, text, monkeypatch, capsys):
    """tyro keeps the line breaks of a field's docstring unless the command removes them."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert text in capsys.readouterr().out


def test_help_imports_no_jax():
    code = (
        "import sys; from jpaged.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'transformers', 'flax', 'starlette'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_flags_used_most_come_first_and_the_others_in_groups(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    order = re.findall(r"^\W{1,4}(--[a-z][a-z-]+|[a-z][a-z-]+ options)[ ,]", capsys.readouterr().out, re.MULTILINE)
    first = ["--host", "--port", "--api-key-file", "--served-model-name", "--max-model-len", "--max-num-seqs"]
    assert order[:6] == first
    assert order.index("--tensor-parallel-size") < order.index("sampling options") < 12
    assert order.index("memory options") < order.index("--block-size") < order.index("scheduling options")


def test_every_flag_of_several_commands_has_a_group():
    known = {*groups.MOST_USED, *itertools.chain(*groups.GROUPS.values())}
    for cls in (EngineConfig, SamplingFlags, ChatFlags, AccessFlags):
        assert {field.name for field in dataclasses.fields(cls)} <= known


@pytest.mark.parametrize(
    ("args", "says"), [(["generate", "demo", "--temprature", "1"], "--temperature"), (["servee"], "did you mean serve")]
)
def test_a_mistake_is_answered_before_the_engine_is_imported(args, says):
    code = (
        "import sys; from jpaged.cli import main\n"
        f"try: main({args})\n"
        "except SystemExit as ended: assert ended.code == 2\n"
        "heavy = {'jax', 'llguidance', 'jpaged.engine.engine'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert says in done.stderr + done.stdout


def test_without_arguments_there_is_help(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "generate" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jpaged 0.")


@pytest.mark.parametrize(
    ("words", "model", "prompts"),
    [
        (["demo", "a", "b"], "demo", ["a", "b"]),
        (["--model", "demo", "a", "b"], "demo", ["a", "b"]),
        (["a", "--model=demo"], "demo", ["a"]),
        (["demo", "--max-tokens", "3", "a"], "demo", ["a"]),
        (["demo", "a", "--max-tokens", "3", "b", "--ignore-eos", "c"], "demo", ["a", "b", "c"]),
        (["--max-tokens", "3", "--", "demo", "-a"], "demo", ["-a"]),
        (["demo", "--", "-a"], "demo", ["-a"]),
        (["demo", "a", "--max-tokens", "3", "--", "-b", "--max-tokens", "--", "c"], "demo",
         ["a", "-b", "--max-tokens", "--", "c"]),
        (["--model", "demo", "--row-buckets", "8", "--", "-a"], "demo", ["-a"]),
    ],
)
def test_generate_takes_model_and_prompts_in_any_order(words, model, prompts):
    command = cli.parse(["generate", *words])
    positional, got = command.model_and_prompts()
    assert flags.engine_options(command.engine, positional)["model"] == model
    assert got == prompts


def test_generate_without_prompts_uses_the_first_ones():
    for words in (["demo"], ["--model", "demo"]):
        assert len(cli.parse(["generate", *words]).model_and_prompts()[1]) == 6


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "generate"])
def test_model_as_argument_or_flag(command):
    needed = ["-i", "in.jsonl", "-o", "out.jsonl"] if command == "run-batch" else []
    for words in (["demo"], ["--model", "demo"], ["--max-num-seqs", "4", "demo"]):
        parsed = cli.parse([*command.split(), *words, *needed])
        parsed = getattr(parsed, "command", parsed)
        assert flags.engine_options(parsed.engine, parsed.model_argument)["model"] == "demo"


def test_engine_flags_become_options():
    words = ["serve", "demo", "--row-buckets", "8", "16", "--no-enable-prefix-caching", "--dtype", "float32"]
    parsed = cli.parse(words)
    options = flags.engine_options(parsed.engine, parsed.model_argument)
    assert options["row_buckets"] == (8, 16)
    assert options["enable_prefix_caching"] is False
    assert options["dtype"] == "float32"
    assert EngineConfig(**options)
    assert options["seed"] == EngineConfig(model="demo").seed


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("True", True), ("1", True), ("false", False), ("False", False), ("0", False)]
)
def test_a_boolean_without_a_default_has_a_value(word, value):
    parsed = cli.parse(["serve", "demo", "--fused-layers", word])
    assert flags.engine_options(parsed.engine, parsed.model_argument)["fused_layers"] is value
    assert words_of("fused-layers", value) == ["--fused-layers", str(value).lower()]
    assert words_of("enable-prefix-caching", value) == [f"--{'' if value else 'no-'}enable-prefix-caching"]


def test_a_boolean_is_not_any_word(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["serve", "demo", "--fused-layers", "maybe"])
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "'maybe' is neither true (or 1) nor false (or 0)" in said


def test_chat_flags_of_serve_reach_the_server(monkeypatch):
    served = []
    config = EngineConfig(model="demo")
    monkeypatch.setattr("jpaged.async_llm.AsyncLLM", lambda **options: types.SimpleNamespace(config=config))
    serve = "jpaged.serving.web.process.serve"
    monkeypatch.setattr(serve, lambda app, *args, **how: served.append(app.state.server) or 0)
    words = ["serve", "demo", "--port", "0", "--tool-call-parser", "mistral", "--reasoning-tags", "[THINK]", "[/THINK]"]
    assert cli.main([*words, "--chat-template-kwargs", "mood", "tone"]) == 0
    assert cli.main(["serve", "demo", "--port", "0", "--reasoning-parser", "qwen3"]) == 0
    told, default = served
    assert (told.chat.tool_calls.name, told.chat.reasoning.start) == ("mistral", "[THINK]")
    assert told.template_kwargs == ("mood", "tone")
    assert (told.root, told.config) == ("demo", config)
    assert (default.chat.tool_calls, default.chat.reasoning.end) == (None, "</think>")
    assert default.template_kwargs == ("enable_thinking", "thinking", "reasoning_effort")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate"], "model: name a folder"),
        (["serve"], "model: name a folder"),
        (["bench", "latency"], "model: name a folder"),
        (["chat", "one", "--model", "two"], "name one"),
        (["generate", "demo", "--temperature", "-1"], "temperature must be a finite number from 0, got -1.0"),
        (["generate", "demo", "--top-p", "0"], "top_p"),
        (["generate", "demo", "--max-tokens", "0"], "max_tokens"),
        (["generate", "demo", "--output-json", "/nowhere/x.json"], "output_json"),
        (["generate", "demo", "--n", "65"], ", got 65"),
        (["generate", "demo", "--n", "3", "--best-of", "2"], "best_of must"),
        (["generate", "demo", "--n", "3"], "jpaged: temperature: every answer would be the same"),
        (["generate", "demo", "--n", "3"], ", got 0.0"),
        (["generate", "demo", "--use-beam-search"], "beam_width"),
        (["generate", "demo", "--beam-width", "4"], "beam_width needs use_beam_search=True: leave it out, got 4"),
        (["generate", "demo", "--early-stopping", "never"], "early_stopping"),
        (["serve", "demo", "--port", "0", "--scheduling-policy", "fair"], "must be fcfs, priority, shortest_first"),
        (["serve", "demo", "--port", "0", "--max-queued-requests", "0"], "max_queued_requests must"),
        (["serve", "demo", "--port", "0", "--target-step-ms", "-5"], ", got -5.0"),
        (["chat", "demo", "--top-k", "-3"], "top_k"),
        (["serve", "demo", "--log-format", "xml"], "log_format must be text or json, got 'xml'"),
        (["serve", "demo", "--otlp-traces-endpoint", "nowhere"], "must be a URL of OTLP over HTTP"),
        (["serve", "demo", "--port", "0", "--metrics-port", "70000"], "--metrics-port takes 0 to 65535"),
        (["serve", "demo", "--chat-template", "/nowhere/x.jinja"], "chat_template"),
        (["serve", "demo", "--tool-call-parser", "qwen9"], "must be one of hermes, llama3_json, mistral"),
        (["serve", "demo", "--reasoning-parser", "qwen9"], "must be one of deepseek_r1, "),
        (["serve", "demo", "--reasoning-tags", "<a>", "<a>"], "start and end must differ"),
        (["serve", "demo", "--host", "256.0.0.1"], "cannot listen"),
        (["serve", "demo", "--port", "99999"], "--port takes 0 to 65535"),
        (["serve", "demo", "--shutdown-timeout", "-1"], ", got -1"),
        (["bench", "latency", "demo", "--batch-size", "0"], "batch_size"),
        (["plan"], "model: name a folder"),
        (["plan", "demo", "--device-memory", "24 parsecs"], "must be a size above 0: 24GiB"),
        (["plan", "demo", "--target", "h900"], "must be one of h200, h100"),
        (["plan", "demo", "--target", "cpu", "--device-memory", "1GiB"], "no meaning on CPU"),
        (["plan", "demo", "--target", "cpu", "--request-len", "0"], ", got 0"),
        (["plan", "demo", "--output-json", "/nowhere/x.json"], "output_json"),
        (["plan", "/nowhere/model", "--target", "l4"], "/nowhere/model"),
    ],
)
def test_our_errors_are_one_line(args, says, capsys):
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("jpaged: ")
    assert len(error.splitlines()) == 1


def test_a_command_that_fails_leaves_no_empty_file(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for path in (new, old):
        assert cli.main(["plan", "/nowhere/model", "--target", "l4", "--output-json", str(path)]) == 2
    assert not new.exists()
    assert old.read_text() == "{}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "demo", "--temprature", "1"], "--temperature"),
        pytest.param(["serve", "demo", "another"], "another", marks=pytest.mark.slow),
        (["serve", "demo", "--", "another"], "another"),
        pytest.param(["generate", "demo", "--temprature", "1", "--", "-a"], "--temperature", marks=pytest.mark.slow),
        (["bench", "latency", "demo", "--batch-size", "many"], "many"),
        pytest.param(["serve", "demo", "--target-step-ms", "fast"], "fast", marks=pytest.mark.slow),
        pytest.param(["generate", "demo", "--early-stopping", "soon"], "never", marks=pytest.mark.slow),
        (["chat", "demo", "--n", "2"], "--n"),
        pytest.param(["chat", "demo", "--use-beam-search"], "--use-beam-search", marks=pytest.mark.slow),
        (["nothing"], "generate"),
    ],
)
def test_unknown_words_are_refused(args, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert says in printed.err + printed.out


@pytest.mark.slow
def test_missing_model_is_one_line():
    done = run("generate", "/nowhere/model", "hi")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "/nowhere/model" in done.stderr


def test_a_command_leaves_logging_as_the_caller_set_it():
    loggers = [logging.getLogger(name) for name in ("jpaged", "pallas_kernels", "transformers")]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    assert cli.main(["plan"]) == 2
    assert cli.main(["simulate", "--cost-model", "demo-cpu", "--num-requests", "4", "--rate", "inf"]) == 0
    assert [(logger.level, logger.filters) for logger in loggers] == before


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    command = f"{sys.executable} -m jpaged simulate --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""
