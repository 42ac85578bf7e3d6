"""Fuzz a server with schemathesis, from its OpenAPI document, while 16 streams run. Linux only.

    python -m venv FOLDER && FOLDER/bin/pip install schemathesis==4.32.5
    python tools/schema_fuzz.py --schemathesis FOLDER/bin/schemathesis --output benchmarks/results/schema_fuzz.json

It starts `jpaged serve demo` with an API key and an admin key, and reads /openapi.json. schemathesis then sends
requests that follow the document, and requests that do not. It reports each server error, and each answer with a
status, type, header or body that the document does not describe.

There are three runs. The first has the routes that need the API key or none. The third has the admin routes that pause,
drain or put to sleep, the second all other admin routes. 16 streams repeat during the first two runs. Each text must
equal the text of `jpaged.LLM`. The third run would end the streams, so they run once more after it.

The fuzzed document differs in two ways. `model` may only be the served name: otherwise most requests would name a
missing model. Keys are sent in the header Authorization only: schemathesis would send a wrong key in one header next to
the right key in another header, and expect 401.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attack import NUM_STREAMS, OPTIONS, serving, stream_body, streamed
from drawn_requests import ask

from jpaged.cli.common.results import machine

API, ADMIN = {"Authorization": "Bearer talk"}, {"Authorization": "Bearer look"}  # `ignored_auth` needs the capital
HOLDING = ("pause", "resume", "sleep", "wake_up", "drain")  # path suffixes of the third run
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "use_after_free", "ignored_auth",
)  # fmt: skip
X_SCHEMES = {"x_api_key", "x_admin_key"}  # security schemes that the fuzzed document lacks
PHASES = "coverage,fuzzing"  # of schemathesis. The phase `stateful` follows links: only API routes have any
LLM_OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 32, "row_buckets": (32,), "token_buckets": (64,),
    "max_num_batched_tokens": 64,
}  # fmt: skip


def offline_answers() -> list[tuple[str, str | None]]:
    """Text and finish reason of each stream, from `jpaged.LLM`."""
    import jpaged

    answers = []
    with jpaged.LLM("demo", **LLM_OPTIONS) as llm:
        for number in range(NUM_STREAMS):
            fields = stream_body(number)
            structure = fields.pop("structured_outputs", None)
            prompt, _ = fields.pop("prompt"), fields.pop("stream")
            format = None if structure is None else jpaged.StructuredOutputsParams(**structure)
            params = jpaged.SamplingParams(**fields, structured_outputs=format)
            answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            answers.append((answer.text, answer.finish_reason))
    return answers


def answered(port: int) -> dict[str, dict[str, int]]:
    """Count the server's answers so far, by route and status class. The streams are included."""
    counts: dict[str, dict[str, int]] = {}
    text = ask(port, "GET", "/metrics", headers=API)[1].decode()
    for route, status, count in re.findall(r'http_requests_total{handler="([^"]*)".*status="(\dxx)"} ([\d.]+)', text):
        statuses = counts.setdefault(route, {})
        statuses[status] = statuses.get(status, 0) + int(float(count))
    return counts


class Streams:
    """16 streams that run again and again until `stop`."""

    def __init__(self, port: int, wanted: list[tuple[str, str | None]]):
        self.wrong: list[list[Any]] = []
        self._ended = [0] * NUM_STREAMS
        self._port, self._wanted = port, wanted
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_STREAMS)
        self._runs = [self._pool.submit(self._run, number) for number in range(NUM_STREAMS)]

    def _run(self, number: int) -> None:
        while True:  # at least once
            try:
                got = streamed(self._port, number, API)
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                got = (repr(error), None)
            self._ended[number] += 1
            if got != self._wanted[number]:
                self.wrong.append([number, *got])
            if self._stop.is_set():
                return

    def stop(self) -> list[int]:
        """Wait for the running streams. Returns how often each of the 16 streams ended."""
        self._stop.set()
        for run in self._runs:
            run.result()
        self._pool.shutdown()
        return self._ended


def fuzz(
    document: Path, port: int, options: argparse.Namespace, paths: Sequence[str], key: Mapping[str, str],
    phases: str, seconds: int,
) -> dict[str, Any]:  # fmt: skip
    """Run schemathesis on some paths. Returns its counts and findings."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            options.schemathesis, "run", str(document), "--url", f"http://127.0.0.1:{port}",
            "--checks", ",".join(CHECKS), "--max-examples", str(options.examples), "--seed", str(options.seed),
            "--continue-on-failure",
            "--max-failures", "200", "--no-color", "--no-shrink", "--generation-database", "none",
            "--phases", phases, "--max-time", str(seconds), "--request-timeout", "60",
            *(part for path in paths for part in ("--include-path", path)),
        ]  # fmt: skip
        for name, each in key.items():
            command += ["--header", f"{name}: {each}"]
        start = time.monotonic()
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=os.environ)
    print(ran.stdout[-6_000:], ran.stderr[-2_000:])
    cases = re.search(r"([\d,]+) generated", ran.stdout)
    if cases is None:
        sys.exit("schemathesis did not run")
    failures = ran.stdout.partition("= FAILURES =")[2].partition("= WARNINGS =")[0]
    return {
        "status": ran.returncode, "requests": int(cases[1].replace(",", "")),
        "operations": int(re.search(r"Tested: (\d+)", ran.stdout)[1]),  # ty: ignore[not-subscriptable]
        "seconds": round(time.monotonic() - start), "failures": failures[:40_000],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", metavar="FILE", help="the schemathesis command")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--examples", type=int, default=30, help="requests of each operation in a phase")
    parser.add_argument("--max-seconds", type=int, default=600, help="limit of the first run, a sixth for the others")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    version = subprocess.run([options.schemathesis, "--version"], capture_output=True, text=True, check=True).stdout
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        wanted = pool.submit(offline_answers).result()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*OPTIONS, "--api-key", "talk", "--admin-key", "look"]) as (_, port),
    ):
        document = Path(folder) / "openapi.json"
        described = json.loads(ask(port, "GET", "/openapi.json", headers=API)[1])
        security = {path: next(iter(methods.values()))["security"] for path, methods in described["paths"].items()}
        admin = [path for path, accepted in security.items() if {"admin_key": []} in accepted]
        holding = [path for path in admin if path.endswith(HOLDING) and not path.startswith("/is_")]
        for schema in described["components"]["schemas"].values():
            if "model" in schema.get("properties", {}) and schema.get("additionalProperties") is False:
                schema["properties"]["model"] = {"enum": [None, "demo"]}
        for methods in described["paths"].values():
            for operation in methods.values():
                operation["security"] = [one for one in operation["security"] if not one.keys() & X_SCHEMES]
        document.write_text(json.dumps(described))
        streams = Streams(port, wanted)
        open_or_api = sorted(described["paths"].keys() - set(admin))
        with_api_key = fuzz(document, port, options, open_or_api, API, f"{PHASES},stateful", options.max_seconds)
        few = options.max_seconds // 6
        others = fuzz(document, port, options, sorted(set(admin) - set(holding)), ADMIN, PHASES, few)
        ended = streams.stop()
        pausing = fuzz(document, port, options, sorted(holding), ADMIN, PHASES, few)
        for method, path in (("POST", "/admin/wake_up"), ("POST", "/admin/resume"), ("DELETE", "/admin/drain")):
            ask(port, method, path, headers=ADMIN)
        again = Streams(port, wanted)
        again.stop()
        statuses = answered(port)
    report = {
        "command": f"python tools/schema_fuzz.py --examples {options.examples} "
        f"--max-seconds {options.max_seconds} --seed {options.seed}",
        "machine": machine(), "schemathesis": version.split()[-1], "paths": len(described["paths"]),
        "api_routes": with_api_key, "other_admin_routes": others, "pausing_admin_routes": pausing,
        "streams_ended": sum(ended), "answers": statuses,
        "streams_wrong": streams.wrong, "streams_wrong_afterwards": again.wrong,
    }  # fmt: skip
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print({key: each for key, each in report.items() if key != "machine"})
    failed = [run["status"] for run in (with_api_key, others, pausing) if run["status"]]
    sys.exit(bool(failed or streams.wrong or again.wrong))


if __name__ == "__main__":
    main()
