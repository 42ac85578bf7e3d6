"""GET /metrics, on the server's port and on a separate port."""

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.serving.admin.metrics import ServerMetrics
from jpaged.serving.peers import Peers


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format, or as OpenMetrics if the client accepts that."""
    server_metrics: ServerMetrics = request.app.state.metrics
    accept = request.headers.get("accept", "")
    peers: Peers | None = request.app.state.peers
    others = [] if peers is None else [report.http for report in await peers.reports()]
    # milliseconds: streams go on meanwhile
    text, content_type = await run_in_threadpool(server_metrics.text, accept, others)
    return Response(text, headers={"content-type": content_type})


def metrics_app(server_metrics: ServerMetrics, peers: Peers | None = None) -> Starlette:
    """Make an application that has the metrics and nothing else, for `--metrics-port`. It requires no key.

    peers: the server's other front ends.
    """
    app = Starlette(routes=[Route("/metrics", metrics), Route("/metrics/", metrics)])
    app.state.metrics, app.state.peers = server_metrics, peers
    return app
