"""Except for the ways named here, the package cannot run code from data or reach the network.

docs/security.md has the promises. A test here checks that each test named there exists.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.project.source_tree import ROOT, SHIPPED, imports_of, python_files

# Modules that run code from data, start processes, load libraries, or open connections.
MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "codeop", "pty", "torch",
    "multiprocessing", "subprocess", "ctypes", "cffi", "socket", "socketserver", "ssl", "ftplib", "smtplib", "poplib",
    "imaplib", "telnetlib", "xmlrpc", "urllib.request", "http.client", "http.server", "requests", "httpx", "aiohttp",
    "urllib3", "websockets", "grpc", "zmq", "huggingface_hub", "fsspec",
}  # fmt: skip
NAMES = {"eval", "exec", "compile", "__import__"}  # called as functions
OS = {"system", "popen", "execv", "execve", "execvp", "spawnv", "spawnl", "fork", "posix_spawn"}  # of the module os
METHODS = {
    "connect", "connect_ex", "create_connection", "open_connection", "create_subprocess_exec",
    "create_subprocess_shell", "urlopen", "urlretrieve", "import_module", "snapshot_download", "hf_hub_download",
    "start_server", "exec_module", "load_library",
}  # fmt: skip
# (file, what) -> reason. Everything else is a failure, and so is an entry that matches nothing.
ALLOWED = {
    ("jpaged/__init__.py", "call import_module"): "imports the module of a public name, from a table of names",
    ("jpaged/answers/__init__.py", "call import_module"): "imports the modules of a package under its old name",
    ("jpaged/cli/__init__.py", "call import_module"): "imports the module of a command, from a table of names",
    ("jpaged/speculation_config.py", "call import_module"): "imports the function that the operator names",
    ("jpaged/child_process.py", "import subprocess"): "starts this interpreter, without a shell",
    ("jpaged/cli/bench/startup.py", "import subprocess"): "starts this interpreter to measure a cold start",
    ("pallas_kernels/cpu_kernels.py", "import subprocess"): "starts this interpreter to compile kernels",
    ("jpaged/chat/time_limit.py", "import ctypes"): "raises an exception in a thread whose template takes too long",
    ("pallas_kernels/native/library.py", "import ctypes"): "gives XLA the addresses of functions that numba compiled",
    ("pallas_kernels/native/library.py", "call import_module"): "imports a kernel from a table of names",
    ("pallas_kernels/paged_attention/__init__.py", "call import_module"): "imports one module, when it is needed",
    ("pallas_kernels/quantized_dot/__init__.py", "call import_module"): "the same",
    ("jpaged/cli/inspect.py", "import ssl"): "a type",
    ("jpaged/cli/flags/client_tls.py", "import ssl"): "a type",
    ("jpaged/load_client/http_get.py", "import http.client"): "asks the server that the user names",
    ("jpaged/load_client/http_get.py", "import ssl"): "the same",
    ("jpaged/load_client/http_get.py", "import urllib.request"): "the same",
    ("jpaged/load_client/drafts.py", "import ssl"): "a type",
    ("jpaged/load_client/connection.py", "import ssl"): "sends load to the server that the user names",
    ("jpaged/load_client/connection.py", "call create_connection"): "the same",
    ("jpaged/loading/check.py", "import torch"): "a tool for porters compares with Transformers; not part of a server",
    ("jpaged/loading/hub.py", "import huggingface_hub"): "downloads a model that is named by its hub id, at the start",
    ("jpaged/loading/hub.py", "call snapshot_download"): "downloads a model that is named by its hub id, at the start",
    ("jpaged/runtime/memory/host_memory.py", "import ctypes"): "calls the C library's malloc_trim",
    ("jpaged/runtime/parallel/process_group.py", "import socket"): "meets the other processes of an engine (--nnodes)",
    ("jpaged/runtime/parallel/process_group.py", "import multiprocessing"): "sends them plans",
    ("jpaged/runtime/parallel/process_group.py", "import pickle"): "reads types of plans only; a test sends others",
    ("jpaged/runtime/parallel/process_group.py", "call create_connection"): "connects to the user's process",
    ("jpaged/cli/serve.py", "import socket"): "a type",
    ("jpaged/frontend/remote/channel.py", "import socket"): "a pair of sockets with a child process",
    ("jpaged/frontend/remote/host.py", "import socket"): "the same",
    ("jpaged/frontend/remote/questions.py", "import socket"): "the same",
    ("jpaged/frontend/remote/remote_engine.py", "import socket"): "the same",
    ("jpaged/frontend/remote/messages.py", "import pickle"): "reads types of a table only; a test sends others",
    ("jpaged/unpickling.py", "import pickle"): "accepts the types of a table only",
    ("serving/front_end.py", "import socket"): "inherits sockets from its parent",
    ("serving/front_end.py", "import pickle"): "reads its settings, which its parent writes",
    ("serving/front_end.py", "call connect"): "reads from an inherited socket",
    ("serving/front_end.py", "call import_module"): "imports the application while the engine loads",
    ("serving/front_ends.py", "import socket"): "makes pairs of sockets for its child processes",
    ("serving/front_ends.py", "import pickle"): "writes the settings of its child processes",
    ("serving/front_ends.py", "import subprocess"): "starts this interpreter, without a shell",
    ("serving/web/connection.py", "import socket"): "the names of an option",
    ("serving/web/process.py", "import socket"): "listens on the server's own address",
    ("serving/web/process.py", "import ssl"): "listens with TLS",
    ("serving/web/process.py", "call connect_ex"): "asks whether a process listens on the Unix socket that it replaces",
    ("serving/web/tls.py", "import ssl"): "reads the server's certificate",
}


def risky(path: pathlib.Path) -> Iterator[str]:
    """Yield what a file imports and calls that could run foreign code or open a connection."""
    for name in imports_of(path):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            if (module := ".".join(parts[:length])) in MODULES:
                yield f"import {module}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in NAMES | METHODS:
            yield f"call {node.func.id}"
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            called = (owner, node.func.attr)
            if node.func.attr in METHODS or called in {("os", name) for name in OS} | {("torch", "load")}:
                yield f"call {node.func.attr}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
            if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and value is not False:
                yield f"argument {keyword.arg}"


def test_the_package_runs_no_foreign_code_and_opens_no_connections():
    found = {(str(path.relative_to(ROOT)), what) for path in python_files(*SHIPPED) for what in risky(path)}
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from multiprocessing import connection", "import torch.nn", "eval('1')", "os.system('x')",
        "subprocess.run('x', shell=True)", "np.load(f, allow_pickle=True)", "torch.load(f)", "s.connect(a)",
        "socket.create_connection(a)", "AutoTokenizer.from_pretrained(p, trust_remote_code=flag)",
        "from urllib.request import urlopen",
    ],
)  # fmt: skip
def test_the_scan_finds(line, monkeypatch):
    path = ROOT / "jpaged" / "planted.py"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self, **how: line)
    assert list(risky(path))


def test_every_loader_of_transformers_stays_local():
    """Classes of Transformers download what they do not find, unless an argument forbids it."""
    for path in python_files(*SHIPPED):
        if path.name == "check.py" and path.parent.name == "loading":
            continue  # see ALLOWED
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                local = given.get("local_files_only")
                assert isinstance(local, ast.Constant), f"{path}:{node.lineno}"
                assert local.value is True, f"{path}:{node.lineno}"


def named_tests(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`", text))


def test_every_promise_names_a_test_that_exists():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = named_tests(text)
    assert len(named) > 25
    for file, name in sorted(named):
        path = ROOT / file
        assert path.is_file(), file
        body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
        for part in name.split("::"):
            matches = [node for node in body if getattr(node, "name", None) == part]
            assert matches, f"{file} has no {name}"
            body = getattr(matches[0], "body", [])
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| Promise")]
    assert rows
    for row in rows:
        assert named_tests(row), f"a promise without a test: {row}"
