"""The server as a process that cannot reach any network: a tour of its routes works, and nothing connects elsewhere.

If the system allows it, both processes run in their own network namespace, with loopback only. An audit hook in every
Python process records and refuses each connection and each name look-up that leads elsewhere.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import serve_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]

HOOK = """
import sys

def guard(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "unix"
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in ("unix", "127.0.0.1", "localhost", "", None):
        with open(FILE, "a") as file:
            file.write(f"{event} {host}\\n")
        raise OSError(f"{event} {host} is refused")

sys.addaudithook(guard)
"""

TOUR = r'''
import json, os, pathlib, signal, subprocess, sys

import httpx

def raise_loopback():
    # 127.0.0.1 is down in a new network namespace
    import fcntl, socket, struct
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14s", b"lo", 0x1 | 0x40, b"")  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS

# `jpaged serve`, with the programs that greedy requests need: compiling the others takes 20 s of processor time.
SERVE = """
import sys
from jpaged.cli import main
from jpaged.engine.step_plan import SamplerVariant
from tests.support.tiny_engine import sampling_programs

with sampling_programs(SamplerVariant.GREEDY):
    sys.exit(main(sys.argv[1:]))
"""

if "isolated" in sys.argv:
    raise_loopback()
sizes = ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--row-buckets", "8",
         "--token-buckets", "64", *(word for word in sys.argv[1:] if word != "isolated")]
keys = os.environ | {"JPAGED_API_KEY": "talk", "JPAGED_ADMIN_KEY": "look"}
command = [sys.executable, "-c", SERVE, "serve", "demo", "--port", "0", *sizes]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=keys)
url = ""
for line in server.stdout:
    if line.startswith(("serving: ", "ready: ")):
        url = line.split()[1].removesuffix("/v1")
        break
API, ADMIN = {"Authorization": "Bearer talk"}, {"Authorization": "Bearer look"}
seen = {}
with httpx.Client(base_url=url, timeout=120, verify=False, trust_env=False) as client:
    def ask(name, method, path, headers=API, **body):
        answer = client.request(method, path, headers=headers, json=body or None)
        seen[name] = answer.status_code
        return answer

    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    message = {"role": "user", "content": "def add("}
    ask("health", "GET", "/health", {})
    ask("no key", "GET", "/v1/models", {})
    ask("models", "GET", "/v1/models")
    ask("completion", "POST", "/v1/completions", prompt="def add(", max_tokens=8, temperature=0)
    stream = ask("stream", "POST", "/v1/completions", prompt="def add(", max_tokens=8, temperature=0, stream=True)
    seen["stream ends"] = stream.text.endswith("data: [DONE]\n\n")
    ask("chat", "POST", "/v1/chat/completions", messages=[message], max_tokens=8, temperature=0)
    ask("large body", "POST", "/v1/completions", prompt="a" * 300_000, max_tokens=1)
    ask("image", "POST", "/v1/chat/completions", messages=[{"role": "user", "content": [image]}])
    ask("remote schema", "POST", "/v1/completions", prompt="x", max_tokens=4,
        structured_outputs={"json": {"$ref": "https://example.com/a.json"}})
    ask("embedding", "POST", "/v1/embeddings", input="a")
    ask("inspect", "GET", "/admin/inspect", ADMIN)
    ask("pause", "POST", "/admin/pause", ADMIN)
    ask("resume", "POST", "/admin/resume", ADMIN)
    ask("after the pause", "POST", "/v1/completions", prompt="def add(", max_tokens=8, temperature=0)
tables = [pathlib.Path(f"/proc/{server.pid}/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
inodes = set()
for descriptor in pathlib.Path(f"/proc/{server.pid}/fd").iterdir():
    try:
        inodes.add(os.readlink(descriptor))
    except OSError:
        pass
listening = [row.split()[1] for rows in tables for row in rows
             if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in inodes]
server.send_signal(signal.SIGTERM)
rest = server.stdout.read()
print(json.dumps({"seen": seen, "status": server.wait(60), "listening": listening, "port": int(url.rsplit(":", 1)[1])}))
'''


def may_isolate() -> bool:
    """Whether this user may make a network namespace."""
    try:
        return subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def test_the_hook_refuses_and_notes_a_connection(tmp_path):
    attempts = tmp_path / "attempts.txt"
    (tmp_path / "sitecustomize.py").write_text(f"FILE = {str(attempts)!r}\n{HOOK}")
    code = "import socket; socket.socket().connect(('192.0.2.1', 80))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 1
    assert attempts.read_text() == "socket.connect 192.0.2.1\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads sockets from /proc")
def test_a_server_without_a_network_serves_and_tries_to_leave_nowhere(tmp_path):
    attempts = tmp_path / "attempts.txt"
    (tmp_path / "sitecustomize.py").write_text(f"FILE = {str(attempts)!r}\n{HOOK}")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE",)}
    isolated = may_isolate()
    flags = [*["isolated"] * isolated, *serve_flags.serve_flags()]
    command = ["unshare", "--map-root-user", "--net"] * isolated + [sys.executable, "-c", TOUR, *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    bad = {"no key": 401, "large body": 400, "image": 400, "remote schema": 400, "embedding": 400}
    expected = dict.fromkeys(result["seen"], 200) | bad | {"stream ends": True}
    if result["seen"]["health"] == 503:
        expected["health"] = 503  # programs are still being compiled
    assert result["seen"] == expected
    assert result["status"] == 0
    assert not attempts.exists(), attempts.read_text()
    # One port, on loopback: 127.0.0.1 in hexadecimal, lowest byte first.
    assert result["listening"] == [f"0100007F:{result['port']:04X}"]
