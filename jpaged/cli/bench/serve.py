"""`jpaged bench serve`: sends a workload to a running server and measures its answers, as `vllm bench serve` does.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import asyncio
import dataclasses
import datetime
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

import tyro

from jpaged.cli.bench.workloads import BenchRequest, OptionalInt, WorkloadFlags
from jpaged.cli.common.results import check_writable, needs_matplotlib
from jpaged.cli.flags.client_tls import SERVER_TLS_DEFAULTS, ServerTlsArguments
from jpaged.cli.flags.engine import ModelArgument, one_line_help
from jpaged.errors import JPagedError, RequestError
from jpaged.load_client.arrivals import Arrivals, RampUp
from jpaged.load_client.backends import BACKENDS, Backend, LoadRequest
from jpaged.load_client.connection import Endpoint, LoadError
from jpaged.load_client.drafts import DraftCounts, fetch
from jpaged.load_client.http_get import get
from jpaged.load_client.metrics import NAMES, BenchmarkMetrics, details, parse_goodput, summarise
from jpaged.load_client.run import Run, Target, send_all

OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
OptionalFile = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT [TEXT ...]", help_behavior_hint="")]
Numbers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]", help_behavior_hint="")]

NO_LIMIT = 2**31 - 1  # maximum tokens of a request, if the server does not report its max_model_len
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs",
)  # fmt: skip
GET_SECONDS = 10.0  # timeout of GET /v1/models
MAX_ERRORS = 10  # maximum number of errors printed after a run


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchServe(WorkloadFlags):
    """Send requests to any server with OpenAI's API, and print the table of `vllm bench serve`.

    A server and a client on one machine share its cores.

    Example: jpaged bench serve --port 8000 --num-prompts 200 --input-len 256 --output-len 64 --ignore-eos

    Example: jpaged bench serve --max-concurrency 1 8 64 --plot serve.png --save-result
    """

    model_argument: ModelArgument = None
    """Model name in requests. Default: the first model that the server lists."""

    model: OptionalText = None
    """The same as the positional MODEL."""

    served_model_name: OptionalText = None
    """Model name in requests, if it differs from the tokenizer's name."""

    tokenizer: OptionalText = None
    """Tokenizer of the workload: a folder, a Hugging Face hub id, a .gguf file, or demo. Default: the model's name."""

    backend: Annotated[
        Literal["openai", "vllm", "openai-chat", "openai-embeddings"],
        tyro.conf.arg(metavar="{" + ",".join(BACKENDS) + "}"),
    ] = "openai"
    """Kind of endpoint. openai and vllm: streamed completions. openai-chat: streamed chats."""

    base_url: OptionalText = None
    """The server's address, e.g. https://example.org. Default: http://HOST:PORT."""

    host: str = "127.0.0.1"
    """The server's host."""

    port: int = 8000
    """The server's port."""

    endpoint: OptionalText = None
    """Path of the endpoint. Default: the path of --backend, such as /v1/completions."""

    header: Words = ()
    """More headers, as NAME=VALUE. The environment variable OPENAI_API_KEY adds the Authorization header."""

    server_tls: ServerTlsArguments = SERVER_TLS_DEFAULTS

    request_rate: float = math.inf
    """Requests per second. inf: all at once."""

    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps between requests. 1: Poisson. Below 1: bursts. inf: equal gaps."""

    ramp_up_strategy: Annotated[RampUp | None, tyro.conf.arg(metavar="{linear,exponential}", help_behavior_hint="")] = (
        None
    )
    """Raise the rate from --ramp-up-start-rps to --ramp-up-end-rps during the run."""

    ramp_up_start_rps: OptionalFloat = None
    """Requests per second at the start of a ramp."""

    ramp_up_end_rps: OptionalFloat = None
    """Requests per second at the end of a ramp."""

    max_concurrency: Numbers = ()
    """Maximum number of requests in flight. Several values: one run for each. Default: no limit."""

    num_warmups: int = 0
    """Requests that are sent before the run and not measured."""

    ready_check_timeout_sec: int = 0
    """Seconds to wait for a server that is still starting."""

    seed: int = 0
    """Seed of the workload and of the arrival times."""

    ignore_eos: bool = False
    """Generate exactly --output-len tokens: do not stop at an end-of-sequence token."""

    temperature: OptionalFloat = None
    """Sampling temperature. For this and the next seven flags, the default is the server's."""

    top_p: OptionalFloat = None
    """Sample only from the most likely tokens whose probabilities add up to this."""

    top_k: OptionalInt = None
    """Sample only from this number of most likely tokens."""

    min_p: OptionalFloat = None
    """Sample only from tokens with at least this fraction of the highest probability."""

    frequency_penalty: OptionalFloat = None
    """Subtracted from the logit of each token, once per occurrence in the answer."""

    presence_penalty: OptionalFloat = None
    """Subtracted from the logit of each token that is already in the answer."""

    repetition_penalty: OptionalFloat = None
    """Above 1, tokens that are in the prompt or the answer become less likely."""

    logprobs: OptionalInt = None
    """Number of log-probabilities to request per token. In a chat, this is top_logprobs."""

    extra_body: OptionalText = None
    """More fields of every request body, as a JSON object."""

    percentile_metrics: OptionalText = None
    """Metrics to print: ttft, tpot, itl and e2el, with commas. Default: ttft,tpot,itl, and e2el with embeddings."""

    metric_percentiles: str = "99"
    """Percentiles to print, with commas between them."""

    goodput: Words = ()
    """Limits of a good request in milliseconds, as ttft:200 tpot:50 e2el:5000. Prints the good requests per second."""

    disable_tqdm: bool = False
    """Show no progress bar."""

    plot: OptionalFile = None
    """Plot TTFT, inter-token latency and throughput over --max-concurrency as a PNG file. Needs matplotlib."""

    save_result: bool = False
    """Write the metrics to a JSON file in --result-dir."""

    save_detailed: bool = False
    """Also write the times and the text of each request."""

    append_result: bool = False
    """Append the metrics of each run to the file as one line, instead of replacing the file."""

    result_dir: OptionalFile = None
    """Folder of the result file. Default: the current folder."""

    result_filename: OptionalText = None
    """Name of the result file. Default: made from the label, the rate, the concurrency, the model and the time."""

    label: OptionalText = None
    """Name of this benchmark, for the result file. Default: the backend."""

    metadata: Words = ()
    """More fields of the result file, as NAME=VALUE."""

    request_id_prefix: str = "bench-"
    """Prefix of each request's X-Request-Id header."""

    def run(self) -> int:
        """Run the workload for each concurrency. Returns 1 if a request failed."""
        self._check()
        cards = self._cards()
        model = self._model(cards)
        load = self._loader(model, cards)
        requests = load(0)
        target = self._target(model)
        arrivals = self._arrivals()
        percentiles = _percentiles(self.metric_percentiles)
        runs: list[BenchmarkMetrics] = []
        for number, limit in enumerate(self.max_concurrency or (None,)):
            if number:  # new random ids, which the server's prefix cache does not have
                requests = load(number)
            run, drafts = self._send(target, requests, arrivals, limit)
            metrics = summarise(
                run, metrics=self._metrics(), percentiles=percentiles, goodput=parse_goodput(self.goodput),
                max_concurrency=limit, request_rate=self.request_rate, drafts=drafts,
            )  # fmt: skip
            _print_errors(run)
            print(metrics.table(target.backend.generates))
            runs.append(metrics)
            if self.save_result or self.append_result:
                self._save(metrics, run, model)
        if self.plot is not None:
            from jpaged.load_client.plots import plot_concurrency

            plot_concurrency(runs, f"{model}: {len(requests)} requests a run, {target.endpoint.path}", self.plot)
            print(f"drawn: {self.plot}")
        return 1 if any(metrics.failed for metrics in runs) else 0

    # -- requests and target

    def _check(self) -> None:
        """Raise RequestError for flags that cannot work, before anything is sent."""
        if self.model_argument is not None and self.model is not None:
            raise RequestError("model", self.model, f"a second model next to {self.model_argument}: name one")
        for name in ("num_warmups", "ready_check_timeout_sec"):
            if getattr(self, name) < 0:
                raise RequestError(name, getattr(self, name), "must be at least 0")
        for limit in self.max_concurrency:
            if limit < 1:
                raise RequestError("max_concurrency", limit, "must be at least 1")
        if self.plot is not None:
            needs_matplotlib("plot", self.plot)
            if not {"ttft", "itl"} <= set(self._metrics()):
                raise RequestError("plot", str(self.plot), "draws ttft and itl: leave --percentile-metrics out")
        check_writable(self.plot, "plot")
        if self.result_dir is not None and not self.result_dir.is_dir():
            raise RequestError("result_dir", str(self.result_dir), "is not a folder")
        self._arrivals()
        self._metrics()
        self._fields()
        _pairs("metadata", self.metadata)
        _percentiles(self.metric_percentiles)
        parse_goodput(self.goodput)

    @property
    def _backend(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def _base(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        base = f"http://{host}:{self.port}" if self.base_url is None else self.base_url
        return base.rstrip("/").removesuffix("/v1")

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")  # as in vLLM: the list of processes would show a flag with the key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return headers | _pairs("header", self.header)

    def _arrivals(self) -> Arrivals:
        return Arrivals(
            rate=self.request_rate, burstiness=self.burstiness, ramp_up=self.ramp_up_strategy,
            start_rate=self.ramp_up_start_rps, end_rate=self.ramp_up_end_rps,
        )  # fmt: skip

    def _metrics(self) -> list[str]:
        default = "ttft,tpot,itl" if self._backend.generates else "e2el"
        metrics = (self.percentile_metrics or default).split(",")
        for metric in metrics:
            if metric not in NAMES:
                raise RequestError("percentile_metrics", metric, f"must be one of {', '.join(NAMES)}")
        return metrics

    def _fields(self) -> dict[str, Any]:
        """Fields of every request body. Raises RequestError."""
        fields = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.backend == "openai-chat" and "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if fields and not self._backend.generates:
            raise RequestError(next(iter(fields)), next(iter(fields.values())), f"does not go with {self.backend}")
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise RequestError("extra_body", self.extra_body, f"is not JSON: {error}") from None
        if not isinstance(extra, dict):
            raise RequestError("extra_body", self.extra_body, "must be a JSON object")
        return fields | extra

    def _target(self, model: str) -> Target:
        url = self._base + "/" + (self.endpoint or self._backend.path).lstrip("/")
        endpoint = Endpoint.parse(url, tls=self.server_tls.context(), headers=self._headers())
        name = self.served_model_name or model
        return Target(
            endpoint=endpoint, backend=self._backend, model=name, fields=self._fields(),
            request_id_prefix=self.request_id_prefix,
        )  # fmt: skip

    def _cards(self) -> list[dict[str, Any]]:
        """Models that the server lists. Waits up to --ready-check-timeout-sec for it. Raises RequestError."""
        url = f"{self._base}/v1/models"
        Endpoint.parse(url)
        until, tls = time.monotonic() + self.ready_check_timeout_sec, self.server_tls.context()
        while True:
            try:
                status, body = get(url, self._headers(), tls=tls, timeout=GET_SECONDS)
                if status != HTTPStatus.OK:
                    refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
                    hint = "set OPENAI_API_KEY to a key of the server" if refused else "is --base-url right?"
                    raise RequestError("base_url", url, f"answers with status {status}: {hint}")
                return json.loads(body)["data"]
            except (LoadError, ValueError, KeyError, TypeError) as error:
                if time.monotonic() < until:
                    time.sleep(0.5)
                    continue
                accepted = f"no OpenAI-compatible server answers there ({error}): is it running? " \
                    "--ready-check-timeout-sec waits for one that is starting"  # fmt: skip
                raise RequestError("base_url", url, accepted) from None

    def _model(self, cards: Sequence[dict[str, Any]]) -> str:
        model = self.model_argument or self.model
        if model is not None:
            return model
        if not cards:
            raise RequestError("model", None, "the server lists no models: name one")
        return cards[0]["id"]

    def _loader(self, model: str, cards: Sequence[dict[str, Any]]) -> Callable[[int], list[LoadRequest]]:
        """Return a function from a run's number, from 0, to its requests."""
        tokenizer = _tokenizer(self.tokenizer or model)
        name = self.served_model_name or model
        lengths = [card.get("max_model_len") for card in cards if card.get("id") == name]
        longest = lengths[0] if lengths and isinstance(lengths[0], int) else NO_LIMIT

        def draw(number: int) -> list[LoadRequest]:
            drawn = self.requests(
                vocab_size=len(tokenizer), max_model_len=longest, seed=self.seed + number, encode=tokenizer.encode
            )
            return [self._request(one, tokenizer.decode) for one in drawn]

        return draw

    def _request(self, one: BenchRequest, decode: Callable[[list[int]], str]) -> LoadRequest:
        prompt: str | list[int] = one.prompt_token_ids if one.text is None else one.text
        if isinstance(prompt, list) and not self._backend.takes_token_ids:
            prompt = decode(prompt)
        return LoadRequest(prompt, one.output_len)

    # -- the run and its results

    def _drafts(self) -> DraftCounts | None:
        return fetch(self._base, self._headers(), tls=self.server_tls.context(), timeout=GET_SECONDS)

    def _send(
        self, target: Target, requests: Sequence[LoadRequest], arrivals: Arrivals, limit: int | None
    ) -> tuple[Run, DraftCounts | None]:
        """Send a run's requests. Returns also the drafts of the run; None if the server does not speculate."""
        import numpy as np
        from tqdm import tqdm

        first = asyncio.run(send_all(target, requests[:1], [0.0]))  # a mistake costs one request, not a run
        if (error := first.answers[0].error) is not None:
            raise RequestError("base_url", target.endpoint.path, f"the first request failed: {error}")
        if self.num_warmups:
            warm = [requests[index % len(requests)] for index in range(self.num_warmups)]
            asyncio.run(send_all(target, warm, [0.0] * len(warm), max_concurrency=limit))
        times = arrivals.times(len(requests), np.random.default_rng(self.seed))
        before = self._drafts()
        hidden = self.disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(requests), disable=hidden, unit="request", dynamic_ncols=True) as bar:
            bar.set_description("Requests" if limit is None else f"{limit} at a time")
            run = asyncio.run(send_all(target, requests, times, max_concurrency=limit, update=bar.update))
        after = None if before is None else self._drafts()
        return run, None if before is None or after is None else after.since(before)

    def _save(self, metrics: BenchmarkMetrics, run: Run, model: str) -> None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        label = self.label or self.backend
        concurrency = "" if metrics.max_concurrency is None else f"-concurrency{metrics.max_concurrency}"
        name = self.result_filename
        if name is None:
            name = f"{label}-{self.request_rate:g}qps{concurrency}-{model.split('/')[-1]}-{now}.json"
        rate = "inf" if math.isinf(self.request_rate) else self.request_rate
        fields: dict[str, Any] = {
            "date": now, "endpoint_type": self.backend, "backend": self.backend, "label": label, "model_id": model,
            "tokenizer_id": self.tokenizer or model, "num_prompts": self.num_prompts,
            **_pairs("metadata", self.metadata), "request_rate": rate, "burstiness": self.burstiness,
            "max_concurrency": metrics.max_concurrency,
        }  # fmt: skip
        fields |= metrics.fields() | (details(run) if self.save_detailed else {})
        # Several runs with one file name would overwrite each other.
        path = (self.result_dir or pathlib.Path()) / name
        append = self.append_result or (self.result_filename is not None and len(self.max_concurrency) > 1)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(_finite(fields)) + "\n")
        print(f"written: {path}")


def _tokenizer(name: str) -> Any:
    """Load the workload's tokenizer. Raises RequestError if there is none."""
    from jpaged.loading.hub import DEMO, find_model, find_tokenizer
    from jpaged.loading.tokenizer import load_tokenizer

    hint = "name a folder, a hub id or demo with --tokenizer"
    try:
        tokenizer = load_tokenizer(find_model(name) if name == DEMO else find_tokenizer(name))
    except JPagedError as error:
        raise RequestError("tokenizer", name, f"{error}; {hint}") from None
    if tokenizer is None:
        raise RequestError("tokenizer", name, f"has no tokenizer: {hint}")
    return tokenizer


def _pairs(parameter: str, pairs: Sequence[str]) -> dict[str, str]:
    """Split NAME=VALUE words. Raises RequestError."""
    split = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise RequestError(parameter, pair, "must be NAME=VALUE")
        split[name.strip()] = value.strip()
    return split


def _percentiles(text: str) -> list[float]:
    try:
        cuts = [float(word) for word in text.split(",")]
    except ValueError:
        cuts = [-1.0]
    if not all(0 <= cut <= 100 for cut in cuts):
        raise RequestError("metric_percentiles", text, "must be numbers from 0 to 100, with commas between them")
    return cuts


def _print_errors(run: Run) -> None:
    errors = [answer.error for answer in run.answers if answer.error is not None]
    for error in errors[:MAX_ERRORS]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > MAX_ERRORS:
        print(f"and {len(errors) - MAX_ERRORS} more failed", file=sys.stderr)


def _finite(value: Any) -> Any:
    """Replace NaN by null: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
