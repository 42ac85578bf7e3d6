"""Run a scripted tour of each public client against `jpaged serve demo`, each client in its own environment.

    python tools/client_tours/run.py --cache ~/.cache/jpaged-tours --output benchmarks/results/client_tours.json
    python tools/client_tours/run.py --cache ~/.cache/jpaged-tours --only openai-python vercel-ai

The first run installs the clients below `--cache`: Python packages with venv and pip, JavaScript packages with npm. It
needs a network (or a mirror that pip and npm know) and about 2 GB. One server generates text, a second one returns
embeddings. Both serve the demo model. It was not trained on chats, so tools and structured outputs are forced. Two more
servers have tiny random encoders of the tests: a bi-encoder and a cross-encoder. `openai-parsers` starts a server for
each tool parser; a structured output makes the model write two calls in the parser's dialect.

The exit status is 1 if a check fails. `--only` updates the named clients in the result file and keeps the others.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpaged.cli.common.results import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attack import serving

from jpaged.parsers.tool_formats import FORMATS
from tests.golden.checkpoints import write_checkpoint
from tests.golden.encoders import BERT, RERANKER, SEED
from tests.support.dialects import TWO
from tests.support.word_tokenizer import save_word_tokenizer

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "chat_template.jinja"
TEXT = [
    "--max-num-seqs", "16", "--row-buckets", "16", "--token-buckets", "128", "--max-num-batched-tokens", "128",
    "--chat-template", str(TEMPLATE),
]  # fmt: skip
GENERATE = [*TEXT, "--tool-call-parser", "hermes", "--enable-tokenizer-info-endpoint"]
POOLING = ["--runner", "pooling", "--max-num-seqs", "16", "--token-buckets", "128", "--max-num-batched-tokens", "128"]
ENCODE = [
    "--max-num-seqs", "4", "--row-buckets", "4", "--token-buckets", "32", "160", "--max-model-len", "160",
    "--served-model-name", "encoder",
]  # fmt: skip
TOUR_SECONDS = 600
# Calls of `get_weather` and `now`, in the dialects that the tests do not record in this form.
CITY = '{"city": "São Paulo", "days": 3}'
CALLS = TWO | {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "now", "parameters": {{}}}}',
    "pythonic": '[get_weather(city="São Paulo", days=3), now()]',
    "json": f'[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]',
}


@dataclasses.dataclass(frozen=True)
class Client:
    """A client to tour: the pinned packages of its environment, and its script."""

    name: str
    packages: tuple[str, ...]
    script: str
    per_parser: bool = False  # the script runs once for each tool parser, with a server of its own

    @property
    def is_node(self) -> bool:
        """True for npm packages, False for packages of PyPI."""
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai-python", ("openai==3.57.0",), "tour_openai.py"),
    Client("openai-parsers", ("openai==3.57.0",), "tour_openai_parsers.py", per_parser=True),
    Client("lm-eval", ("lm-eval[api]==0.4.13",), "tour_lm_eval.py"),
    Client("anthropic-python", ("anthropic==2.13.0",), "tour_anthropic.py"),
    Client("litellm", ("litellm==1.110.2",), "tour_litellm.py"),
    # The newest version with an extra `proxy` that could be installed.
    Client("litellm-proxy", ("litellm[proxy]==1.106.0",), "tour_litellm_proxy.py"),
    Client("langchain-openai", ("langchain-openai==1.7.4", "langchain-cohere==0.6.0"), "tour_langchain.py"),
    Client("instructor", ("instructor==1.17.0",), "tour_instructor.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.66.0",), "tour_pydantic_ai.py"),
    Client(
        "llama-index",
        (
            "llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0",
            "llama-index-postprocessor-cohere-rerank==0.10.0", "llama-index-postprocessor-jinaai-rerank==0.6.0",
        ),
        "tour_llama_index.py",
    ),
    Client("openai-node", ("openai@7.57.0", "zod@4.6.7"), "tour_openai_node.mjs"),
    Client(
        "vercel-ai",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        "tour_vercel_ai.mjs",
    ),
)


# -- environments -------------------------------------------------------------------------------------------------


def environment(client: Client, cache: Path) -> Path:
    """Folder with the client's packages. Installs them unless the folder has the same pins."""
    folder = cache / client.name
    pins = folder / "requirements.txt"
    wanted = "".join(f"{package}\n" for package in client.packages)
    if pins.is_file() and pins.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{client.name}: installing {' '.join(client.packages)}", flush=True)
    if client.is_node:
        _checked(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *client.packages], folder)
    else:
        _checked([sys.executable, "-m", "venv", str(folder)], folder)
        _checked([str(_python(folder)), "-m", "pip", "install", "--quiet", *client.packages], folder)
    pins.write_text(wanted)
    return folder


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _checked(command: list[str], folder: Path) -> None:
    """Run an installer in the folder. Its output is shown if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def installed(client: Client, folder: Path) -> list[str]:
    """All packages of an environment with their versions, sorted."""
    if client.is_node:
        lock = json.loads((folder / "package-lock.json").read_text())
        packages = lock["packages"].items()
        return sorted({f"{path.rpartition('node_modules/')[2]}@{entry['version']}" for path, entry in packages if path})
    listed = subprocess.run(
        [str(_python(folder)), "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(line for line in listed.stdout.split() if not line.startswith(("pip==", "setuptools==")))


# -- tours --------------------------------------------------------------------------------------------------------


def tour(client: Client, folder: Path, addresses: dict[str, str]) -> dict[str, Any]:
    """Run a client's script. Returns its checks. If the script fails or hangs, a check `script` has failed.

    addresses: environment variables with the servers' addresses, and what else the script reads.
    """
    with tempfile.TemporaryDirectory() as work:
        result = Path(work) / "result.json"
        if client.is_node:  # Node looks up a module's imports from the module's folder
            for name in (client.script, "checks.mjs"):
                shutil.copyfile(HERE / name, folder / name)
            command = ["node", str(folder / client.script), str(result)]
        else:
            command = [str(_python(folder)), str(HERE / client.script), str(result)]
        variables = os.environ | addresses | {
            "TOUR_ENGINE_PYTHON": sys.executable, "TOUR_CHAT_TEMPLATE": str(TEMPLATE), "PYTHONDONTWRITEBYTECODE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }  # fmt: skip
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "PYTHONPATH"):
            variables.pop(name, None)
        try:
            done = subprocess.run(
                command, cwd=work, env=variables, capture_output=True, text=True, timeout=TOUR_SECONDS
            )
            tail, status = done.stderr[-3000:], done.returncode
        except subprocess.TimeoutExpired:
            tail, status = f"still running after {TOUR_SECONDS} s", -1
        found: dict[str, Any] = {"passed": [], "failed": {}, "limits": {}}
        if result.is_file():
            found = json.loads(result.read_text())
        if status != 0 or not result.is_file():
            found["failed"]["script"] = f"exit status {status}: {tail}"
        return found


def parser_tours(client: Client, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Run a client's script against a server for each tool parser. The names of its checks begin with the parser's."""
    found: dict[str, Any] = {"passed": [], "failed": {}, "limits": {}}
    for name in FORMATS:
        with serving([*TEXT, "--tool-call-parser", name, *flags]) as (_, port):
            one = tour(client, folder, {"TOUR_BASE_URL": f"http://127.0.0.1:{port}", "TOUR_ANSWER": CALLS[name]})
        found["passed"] += [f"{name}: {check}" for check in one["passed"]]
        found["failed"] |= {f"{name}: {check}": why for check, why in one["failed"].items()}
    return found


@contextlib.contextmanager
def all_servers(flags: list[str]) -> Iterator[dict[str, str]]:
    """Start the servers of all clients. Yields environment variables with their addresses."""
    with contextlib.ExitStack() as stack:
        started = {"TOUR_BASE_URL": ([*GENERATE, *flags], "demo"), "TOUR_EMBEDDING_URL": ([*POOLING, *flags], "demo")}
        for variable, variant in (("TOUR_ENCODER_URL", BERT), ("TOUR_RERANKER_URL", RERANKER)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_checkpoint(variant, SEED, folder)
            save_word_tokenizer(folder)
            started[variable] = ([*ENCODE, *flags], str(folder))
        ports = {variable: stack.enter_context(serving(*one))[1] for variable, one in started.items()}
        yield {variable: f"http://127.0.0.1:{port}" for variable, port in ports.items()}


def main() -> None:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the clients' environments")
    parser.add_argument("--output", type=Path, help="result file, in JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--api-server-count", help="as for jpaged serve")
    arguments = parser.parse_args()
    flags = [] if arguments.api_server_count is None else ["--api-server-count", arguments.api_server_count]
    cache = arguments.cache.expanduser().resolve()
    chosen = [client for client in CLIENTS if client.name in arguments.only]
    folders = {client.name: environment(client, cache) for client in chosen}
    results: dict[str, Any] = {}
    if arguments.output and arguments.output.is_file():
        results = json.loads(arguments.output.read_text())["clients"]
    with contextlib.ExitStack() as stack:
        addresses = None
        for number, client in enumerate(chosen, 1):
            start = time.monotonic()
            if client.per_parser:
                found = parser_tours(client, folders[client.name], flags)
            else:
                addresses = addresses or stack.enter_context(all_servers(flags))
                found = tour(client, folders[client.name], addresses)
            results[client.name] = {
                "packages": list(client.packages), "installed": " ".join(installed(client, folders[client.name])),
                **found,
            }  # fmt: skip
            print(
                f"[{number}/{len(chosen)}] {' '.join(client.packages)}: {len(found['passed'])} passed, "
                f"{len(found['failed'])} failed, {len(found['limits'])} limits, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for name, why in found["failed"].items():
                print(f"    FAILED {name}: {why}", flush=True)
    if arguments.output:
        report = {
            "command": " ".join(["python tools/client_tours/run.py --cache FOLDER --output FILE", *flags]),
            "machine": machine(), "clients": {name: results[name] for name in names if name in results},
        }  # fmt: skip
        arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    sys.exit(any(results[client.name]["failed"] for client in chosen))


if __name__ == "__main__":
    main()
