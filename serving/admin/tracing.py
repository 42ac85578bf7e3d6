"""OpenTelemetry traces: one span per prompt, sent to a collector over OTLP/HTTP. Attribute names are vLLM's.

The packages are in the extra `otel`. They are imported only when `--otlp-traces-endpoint` is given. A thread of
OpenTelemetry sends the spans in batches; when the collector does not answer, spans are dropped and requests go on.

Imported late: OpenTelemetry, which is not a dependency.
"""

import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import urlsplit

from jpaged.errors import RequestError
from jpaged.outputs import PoolingRequestOutput, RequestMetrics, RequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.serving.engine_client import EngineClient, Prompt
from jpaged.serving.web.request_context import current

SPAN_NAME = "llm_request"
TRACES_PATH = "/v1/traces"  # of OTLP/HTTP
CLOSE_SECONDS = 1.0         # to send the last spans
FLAG = "otlp_traces_endpoint"

Attributes = dict[str, str | int | float | tuple[str, ...]]


@dataclasses.dataclass(slots=True)
class _Seen:
    """Measurements of one prompt, from its outputs so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    metrics: RequestMetrics | None = None
    finished: bool = False

    def note(self, output: RequestOutput, *, deltas: bool) -> None:
        count = sum(len(answer.token_ids) for answer in output.outputs)
        self.completion_tokens = self.completion_tokens + count if deltas else count
        self.note_end(output)
        self.finish_reasons = tuple(answer.finish_reason or "" for answer in output.outputs)

    def note_end(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        self.prompt_tokens = len(output.prompt_token_ids)
        self.metrics, self.finished = output.metrics, output.finished


class RequestTracer:
    """Sends spans to a collector."""

    def __init__(self, endpoint: str, model_name: str):
        """endpoint: URL, by default with the path /v1/traces. Raises RequestError for a bad URL or no OpenTelemetry."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise RequestError(FLAG, endpoint, "must be a URL of OTLP over HTTP, as http://localhost:4318/v1/traces")
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            advice = f"needs OpenTelemetry, which is not installed ({error.name}): pip install 'jpaged[otel]'"
            raise RequestError(FLAG, endpoint, advice) from None
        target = endpoint if url.path not in ("", "/") else url._replace(path=TRACES_PATH).geturl()
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jpaged"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target)))
        self._tracer = self._provider.get_tracer("jpaged.serving")
        self._model_name = model_name

    def record(self, request_id: str, began_ns: int, attributes: Attributes, failure: str | None) -> None:
        """Send the span of a prompt that ends now. It belongs to the trace of the request's `traceparent`, if any.

        began_ns: start, in nanoseconds of `time.time_ns()`. failure: why the span counts as failed.
        """
        context = current.get()
        headers: Mapping[str, str] = {}
        if context is not None and context.traceparent:
            headers = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        names: Attributes = {"gen_ai.request.id": request_id, "gen_ai.response.model": self._model_name}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=names | attributes,
            start_time=began_ns,
        )
        if failure is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failure))
        span.end()

    def close(self) -> None:
        """Send the last spans, for at most CLOSE_SECONDS: the collector may be gone."""
        closing = threading.Thread(target=self._provider.shutdown, name="jpaged-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _TracedEngine:
    """An engine client that records a span for each prompt. All other methods are the engine's."""

    def __init__(self, engine: EngineClient, tracer: RequestTracer):
        self._engine = engine
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs, and record a span at the end."""
        deltas = sampling_params.output_kind is RequestOutputKind.DELTA
        seen, began, failure = _Seen(), time.time_ns(), None
        try:
            async with aclosing(self._engine.generate(prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    seen.note(output, deltas=deltas)
                    yield output
        except Exception as error:
            failure = type(error).__name__  # not its message, which may quote the prompt
            raise
        finally:
            attributes = _of_params(sampling_params) | _of_answer(seen)
            self._tracer.record(request_id, began, attributes, failure or _unfinished(seen))

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Yield the engine's output, and record a span at the end."""
        seen, began, failure = _Seen(), time.time_ns(), None
        try:
            async with aclosing(self._engine.encode(prompt, pooling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    seen.note_end(output)
                    yield output
        except Exception as error:
            failure = type(error).__name__
            raise
        finally:
            self._tracer.record(request_id, began, _of_answer(seen), failure or _unfinished(seen))

    def close(self) -> None:
        """Close the engine, and send the last spans."""
        self._engine.close()
        self._tracer.close()


def traced(engine: EngineClient, tracer: RequestTracer) -> EngineClient:
    """Return the engine with a span recorded for each prompt."""
    return cast(EngineClient, _TracedEngine(engine, tracer))  # its other methods are the engine's, by __getattr__


def _unfinished(seen: _Seen) -> str | None:
    return None if seen.finished else "aborted"


def _of_params(params: SamplingParams) -> Attributes:
    values = {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_tokens, "n": params.n}
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}


def _of_answer(seen: _Seen) -> Attributes:
    """Attributes of the answer. Times of events that did not happen are left out."""
    attributes: Attributes = {
        "gen_ai.usage.prompt_tokens": seen.prompt_tokens,
        "gen_ai.usage.completion_tokens": seen.completion_tokens,
    }
    if seen.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = seen.finish_reasons
        attributes["gen_ai.usage.num_sequences"] = len(seen.finish_reasons)
    if seen.metrics is not None:
        times = seen.metrics
        spans = {
            "time_in_queue": (times.arrival_time, times.first_scheduled_time),
            "time_to_first_token": (times.arrival_time, times.first_token_time),
            "e2e": (times.arrival_time, times.finished_time),
            "time_in_model_prefill": (times.first_scheduled_time, times.first_token_time),
            "time_in_model_decode": (times.first_token_time, times.last_token_time),
            "time_in_model_inference": (times.first_scheduled_time, times.last_token_time),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                attributes[f"gen_ai.latency.{name}"] = end - start
    return attributes
