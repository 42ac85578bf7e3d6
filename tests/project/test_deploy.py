"""Files of deploy/: the command line accepts their commands, and the server has the routes that they probe."""

import pathlib
from typing import Any

import pytest
import yaml

from jpaged import ray_serve
from jpaged.cli import parse
from jpaged.cli.flags.engine import engine_options
from jpaged.errors import RequestError
from jpaged.serving.application import ROUTES

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"


def containers(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and container of everything that runs jpaged."""
    pods = []
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()):
        spec = document.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
        pods += [template["spec"] for template in templates if template]
    return [(pod, each) for pod in pods for each in pod["containers"] if each["name"] == "jpaged"]


def command(container: dict[str, Any]) -> Any:
    return parse(container["args"])


@pytest.mark.parametrize("name", ["deployment.yaml", "leaderworkerset.yaml"])
def test_pods_start_a_server_and_probe_it(name):
    pod, container = containers(name)[0]
    serve = command(container)
    assert serve.host == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] > serve.shutdown_timeout
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == serve.port
    assert ports.get("metrics") == serve.metrics_port
    paths = {route.path for route in ROUTES}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == "http"
        assert get["path"] in paths


def test_leader_and_worker_of_a_group_agree():
    """One command, which takes the rank from the controller, and as many devices as the cards of all pods."""
    (_, leader), (_, worker) = containers("leaderworkerset.yaml")
    assert leader["args"] == worker["args"]
    serve = command(leader)
    assert serve.detect_nodes
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/leaderworkerset.yaml").read_text())
    size = next(documents)["spec"]["leaderWorkerTemplate"]["size"]
    cards = int(leader["resources"]["limits"]["nvidia.com/gpu"])
    assert worker["resources"] == leader["resources"]
    assert serve.engine.tensor_parallel_size == cards * size


def test_the_ray_config_has_flags_of_the_server():
    [application] = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())["applications"]
    module, _, name = application["import_path"].partition(":")
    assert module == ray_serve.__name__
    assert callable(getattr(ray_serve, name))
    own = {"device", "replicas", "max_ongoing_requests"}
    given = {key: value for key, value in application["args"].items() if key not in own}
    serve = ray_serve.command_of(ray_serve.flags_of(given))
    assert engine_options(serve.engine, serve.model_argument)["model"] == given["model"]


def test_a_replica_takes_the_devices_of_its_engines():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "prefill_context_parallel_size": 4}
    flags = {"model": "demo", "data_parallel_size": 5} | sizes
    assert ray_serve.devices_of(ray_serve.command_of(ray_serve.flags_of(flags))) == 120
    assert ray_serve.devices_of(ray_serve.command_of(ray_serve.flags_of({"model": "demo"}))) == 1


def test_bad_arguments_of_the_ray_application(capsys):
    with pytest.raises(RequestError, match=r"^port is Ray's: set it in http_options of the Serve config, got 8001"):
        ray_serve.flags_of({"model": "demo", "port": 8001})
    for device in ({}, {"device": "H200"}):
        with pytest.raises(RequestError, match="must be cpu, gpu, tpu"):
            ray_serve.build({"model": "demo"} | device)
    with pytest.raises(RequestError, match="replicas must be a whole number of at least 1, got 0"):
        ray_serve.build({"model": "demo", "device": "cpu", "replicas": "0"})
    with pytest.raises(RequestError, match="nnodes"):
        ray_serve.flags_of({"model": "demo", "nnodes": 2})
    with pytest.raises(RequestError, match="--max-modellen 5"):
        ray_serve.command_of(ray_serve.flags_of({"model": "demo", "max_modellen": 5}))
    assert "max-model-len" in capsys.readouterr().err
