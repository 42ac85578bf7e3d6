"""Replicas of `jpaged serve` on a Ray cluster, as an application of Ray Serve. Needs `pip install 'jpaged[ray]'`.

    serve run jpaged.ray_serve:build model=demo device=cpu replicas=2

docs/deploy.md and deploy/ray/serve.yaml show how to deploy it.

Imported late: Ray, which the command line of this module needs and a checkpoint does not.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from jpaged.cli import parse
from jpaged.cli.flags.config_file import words_of
from jpaged.cli.flags.engine import engine_options
from jpaged.cli.serve import Serve
from jpaged.config import EngineConfig
from jpaged.errors import RequestError

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.applications import Starlette

DEVICES = {"cpu": None, "gpu": "GPU", "tpu": "TPU"}  # name -> the cluster's resource
# Flags of the server's process, which Ray Serve replaces. Value: what to do.
RAYS_OWN = dict.fromkeys(("host", "port"), "is Ray's: set it in http_options of the Serve config") | dict.fromkeys(
    ("uds", "metrics_port", "max_connections_per_address", "headless", "detect_nodes", "nnodes", "node_rank",
     "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    "belongs to the process of jpaged serve, and a replica has none: leave it out",
)  # fmt: skip


def build(args: Mapping[str, Any]) -> "Application":
    """Make the application. `serve run` and a Serve config file call it.

    args: flags of `jpaged serve` by name, such as model and max_model_len, and
          - device:   cpu, gpu or tpu: the cluster's resource that a replica takes
          - replicas: number of replicas; default 1
          - max_ongoing_requests: requests that a replica runs or queues; further ones wait at Ray. Default 1,024
    A replica takes the devices of all its engines (`EngineConfig.devices_per_engine`). Text values are read as YAML.
    Raises RequestError for a flag that `jpaged serve` does not have, or that Ray Serve replaces.
    """
    given = {name.lstrip("-").replace("-", "_"): _value(value) for name, value in args.items()}
    replicas, most = _number(given, "replicas", 1), _number(given, "max_ongoing_requests", 1_024)
    device = given.pop("device", None)
    if device not in DEVICES:
        raise RequestError("device", device, f"must be {', '.join(DEVICES)}")
    flags = flags_of(given)
    command = command_of(flags)

    from ray import serve

    def application() -> "Starlette":
        return load(flags)

    class Replica:
        async def check_health(self) -> None:
            """Raise EngineError when the engine is not healthy: Ray Serve then replaces the replica."""
            await load(flags).state.server.engine.check_health()

    count, resource = devices_of(command), DEVICES[device]
    actor: dict[str, Any] = {"num_cpus": 1}
    if resource == "GPU":
        actor["num_gpus"] = count
    elif resource is not None:
        actor["resources"] = {resource: count}
    deployment = serve.deployment(
        serve.ingress(application)(Replica), name="jpaged", num_replicas=replicas, max_ongoing_requests=most,
        ray_actor_options=actor, graceful_shutdown_timeout_s=command.shutdown_timeout,
    )  # fmt: skip
    return deployment.bind()


def devices_of(command: Serve) -> int:
    """Return the number of devices of all engines of a replica."""
    config = EngineConfig(**engine_options(command.engine, command.model_argument))
    return config.devices_per_engine * config.data_parallel_size


@functools.cache
def load(flags: tuple[str, ...]) -> "Starlette":
    """Load the model of a replica, once per process. flags: words of a `jpaged serve` command line."""
    return command_of(flags).application()


def flags_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return command-line words for flags of `jpaged serve`. Raises RequestError for a flag that Ray Serve replaces."""
    for name, known in RAYS_OWN.items():
        if name in given:
            raise RequestError(name, given[name], known)
    return tuple(word for name, value in given.items() for word in words_of(name.replace("_", "-"), value))


def command_of(flags: Sequence[str]) -> Serve:
    """Return the command that has these flags. Raises RequestError for a flag or a value that it does not accept."""
    try:
        return parse(["serve", *flags])
    except SystemExit:
        raise RequestError("args", " ".join(flags), "is not accepted by jpaged serve, see the message above") from None


def _value(value: Any) -> Any:
    """Parse a value of `serve run NAME=VALUE`, which passes text."""
    return yaml.safe_load(value) if isinstance(value, str) else value


def _number(given: dict[str, Any], name: str, default: int) -> int:
    """Remove a positive whole number from the arguments, and return it."""
    value = given.pop(name, default)
    if not isinstance(value, int) or value < 1:
        raise RequestError(name, value, "must be a whole number of at least 1")
    return value
