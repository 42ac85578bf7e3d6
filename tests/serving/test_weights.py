"""Weights replaced over HTTP, with SGLang's and vLLM's bodies: the routes, on an engine that only counts its calls.

`tests/end_to_end/test_weights_over_http.py` has an engine with weights.
"""

from pathlib import Path

import httpx
import pytest

from jpaged import CompletionOutput
from jpaged.errors import EngineError, ModelLoadError
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.openai_api.generation import weight_spans
from jpaged.serving.server_state import Server
from tests.serving.http_client import error_of

ADMIN = {"Authorization": "Bearer look"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Checkpoints below `allowed`, without content: 1, and a file 2.gguf. One more is elsewhere."""
    made = tmp_path_factory.mktemp("weights")
    for name in ("allowed/1", "allowed/linked", "elsewhere/secret"):
        (made / name).mkdir(parents=True)
        (made / name / "model.safetensors").touch()
    (made / "allowed" / "2.gguf").touch()
    (made / "allowed" / "link").symlink_to(made / "elsewhere" / "secret")
    (made / "allowed" / "linked" / "more.safetensors").symlink_to(made / "elsewhere" / "secret" / "model.safetensors")
    return made


@pytest.fixture
def client(engine, host, folders):
    options = AppOptions(admin_keys=("look",), api_keys=("talk",), weights_dirs=(folders / "allowed",))
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), options)
    with httpx.Client(base_url=host[1], headers=ADMIN) as made:
        yield made


def test_sglangs_body_and_answer(client, engine, folders):
    path = str(folders / "allowed" / "1")
    body = {"model_path": path, "weight_version": "step-7", "load_format": "auto", "flush_cache": True,
            "torch_empty_cache": False, "is_async": False, "token_step": 0, "manifest": None}  # fmt: skip
    answer = client.post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()) == (200, {
        "success": True, "message": "Succeeded to update model weights. Weight version updated to step-7.",
        "num_paused_requests": 0, "weight_version": "step-7", "num_leaves": 3, "copied_bytes": 96, "seconds": 0.25,
    })  # fmt: skip
    talk = {"Authorization": "Bearer talk"}
    for name in ("/weight_version", "/get_weight_version", "/weight_info"):
        assert client.get(name, headers=talk).json() == {"weight_version": "step-7"}
    for name in ("/server_info", "/get_server_info"):
        assert client.get(name).json()["weight_version"] == "step-7"
    for name in ("/model_info", "/get_model_info"):
        assert client.get(name, headers=talk).json() == {
            "model_path": "echo", "tokenizer_path": "echo", "is_generation": True, "preferred_sampling_params": None,
            "weight_version": "step-7",
        }  # fmt: skip
    assert client.post("/update_weights_from_disk", json={"model_path": "2.gguf"}).json()["weight_version"] == "1"
    client.post("/pause?mode=keep")
    client.post("/update_weights_from_disk", json={"model_path": "1", "weight_version": 8})
    client.post("/update_weights_from_disk", json={"model_path": "1", "abort_all_requests": True})
    client.post("/resume")
    client.post("/update_weights_from_disk", json={"model_path": "1", "mode": "recompute"})
    updates = [call[1:] for call in engine.calls if call[0] == "update_weights"]
    assert updates == [
        (path, "step-7", "wait"), (str(folders / "allowed" / "2.gguf"), None, "wait"), (path, 8, "keep"),
        (path, None, "abort"), (path, None, "recompute"),
    ]  # fmt: skip


def test_an_update_can_leave_the_server_paused(client, engine):
    modes = ("wait", "wait", "keep"), ("recompute", "keep", "recompute"), ("abort", "abort", "keep")
    for mode, pause, update in modes:
        engine.calls.clear()
        body = {"model_path": "1", "keep_pause": True, "mode": mode}
        assert client.post("/update_weights_from_disk", json=body).json()["success"]
        assert [(call[0], call[-1]) for call in engine.calls] == [("pause", False), ("update_weights", update)]
        assert engine.calls[0][1] == pause
        client.post("/resume")
    engine.refuses = ModelLoadError("lm_head is missing")
    assert client.post("/update_weights_from_disk", json=body).status_code == 400
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_vllms_body_and_answer(client, engine, folders):
    for body in ({"update_info": {"weights_path": "1"}}, {"weight_dir": "1", "mode": "wait", "weight_version": "a"}):
        answer = client.post("/update_weights", json=body).json()
        assert answer["message"] == "Weights updated"
    path = str(folders / "allowed" / "1")
    assert engine.calls == [("update_weights", path, None, "keep"), ("update_weights", path, "a", "wait")]


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        ({"model_path": "../elsewhere/secret"}, 403, "model_path", "is not below a folder of --weights-dirs"),
        ({"model_path": "/etc"}, 403, "model_path", "is not below a folder of --weights-dirs"),
        ({"model_path": "link"}, 403, "model_path", "is not below a folder of --weights-dirs"),
        ({"model_path": "linked"}, 403, "model_path", "more.safetensors' is not below a folder of --weights-dirs"),
        ({"model_path": "3"}, 404, "model_path", "no checkpoint found for '3'"),
        ({"model_path": "1/model.safetensors"}, 404, "model_path", "must be a folder, or a .gguf file"),
        ({"model_path": "a\0b"}, 404, "model_path", "no checkpoint found"),
        ({"model_path": ""}, 400, "model_path", "1"),
        ({}, 400, "model_path", "missing required field"),
        ({"model_path": "1", "weight_version": True}, 400, "weight_version", "expected 'int | str | null'"),
        ({"model_path": "1", "weight_version": ""}, 400, "weight_version", "1"),
        ({"model_path": "1", "mode": "later"}, 400, "mode", "must be"),
        ({"model_path": "1", "mode": "keep", "abort_all_requests": True}, 400, "abort_all_requests", "contradicts"),
        ({"model_path": "1", "load_format": "pt"}, 400, "load_format", "is not supported yet"),
        ({"model_path": "1", "model_dir": "1"}, 400, "model_dir", "unknown field"),
    ],
)  # fmt: skip
def test_refused_bodies(client, engine, body, status, param, said):
    answer = client.post("/update_weights_from_disk", json=body)
    error = error_of(answer, status)
    assert (error["param"], answer.json()["success"], answer.json()["message"]) == (param, False, error["message"])
    assert said in error["message"]
    assert not engine.calls


def test_refused_by_vllms_route(client, engine):
    for body, param in (
        ({}, "update_info"), ({"update_info": {"weights_path": "1"}, "weight_dir": "1"}, "update_info"),
        ({"update_info": {"weights_path": "1", "more": 1}}, "update_info.more"),
    ):  # fmt: skip
        assert error_of(client.post("/update_weights", json=body), 400)["param"] == param
    tensors = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "packed": False}
    for body, param in (({"update_info": tensors}, "update_info.names"), (tensors, "names")):
        error = error_of(client.post("/update_weights", json=body), 400)
        assert error["param"] == param
        assert 'write a checkpoint, and send one path: {"update_info": {"weights_path": PATH}}' in error["message"]
    refused = error_of(client.post("/update_weights", json={"update_info": {"weights_path": "../x"}}), 403)
    assert refused["param"] == "update_info.weights_path"
    assert error_of(client.post("/update_weights?mode=keep", json={"weight_dir": "1"}), 400)["param"] == "mode"
    assert not engine.calls


@pytest.mark.parametrize(
    ("error", "problem", "status", "code", "message"),
    [
        (ModelLoadError("wo is missing"), None, 400, "bad_weights", "wo is missing"),
        (ModelLoadError("wo is cut"), "call update_weights", 503, "no_weights", "wo is cut; call update_weights"),
        (EngineError("the weights sleep"), None, 409, "engine_error", "the weights sleep"),
    ],
)
def test_errors_of_the_engine_are_shown_to_the_operator(client, engine, error, problem, status, code, message):
    engine.refuses, engine.weights_problem = error, problem
    answer = client.post("/update_weights_from_disk", json={"model_path": "1"})
    assert error_of(answer, status) | {"type": "", "param": ""} == {
        "message": message, "code": code, "type": "", "param": "",
    }  # fmt: skip
    assert error_of(client.post("/update_weights", json={"weight_dir": "1"}), status)["message"] == message


def test_an_update_needs_an_admin_key_and_folders(client, engine, host):
    for headers in ({"Authorization": "Bearer talk"}, {"Authorization": ""}):
        for path in ("/update_weights_from_disk", "/update_weights"):
            assert client.post(path, json={"model_path": "1"}, headers=headers).status_code == 401
    assert client.get("/weight_version", headers={"Authorization": ""}).status_code == 401
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(admin_keys=("look",)))
    error = error_of(client.post("/update_weights_from_disk", json={"model_path": "1"}), 403)
    assert error["message"] == (
        "model_path: weights cannot be replaced from files: start it with --weights-dirs FOLDER"
    )
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)))
    assert client.post("/update_weights_from_disk", json={"model_path": "1"}).status_code == 404
    assert not engine.calls


def test_versions_of_an_answer_are_spans(client, engine):
    talk = {"Authorization": "Bearer talk"}
    asked = {"prompt": "abc", "max_tokens": 3, "return_weight_versions": True}
    whole = client.post("/v1/completions", json=asked, headers=talk).json()["choices"][0]
    assert whole["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    chat = asked | {"messages": [{"role": "user", "content": "abc"}]}
    del chat["prompt"]
    whole = client.post("/v1/chat/completions", json=chat, headers=talk).json()["choices"][0]
    assert whole["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    for path, body in (("/v1/completions", asked), ("/v1/chat/completions", chat)):
        events = client.post(path, json=body | {"stream": True}, headers=talk).text
        assert events.count("weight_versions") == 1
        assert '"weight_versions":[{"version":"0","start":0,"end":3}]' in events
        assert "weight_versions" not in client.post(
            path, json=body | {"return_weight_versions": False}, headers=talk
        ).text
    tokens = {"token_ids": [65, 66], "sampling_params": {"max_tokens": 2}}
    whole = client.post("/inference/v1/generate", json=tokens, headers=talk).json()["choices"][0]
    assert whole["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
    refused = client.post("/v1/responses", json={"input": "a", "return_weight_versions": True}, headers=talk)
    assert error_of(refused, 400)["param"] == "return_weight_versions"


def test_spans_of_changes():
    def spans(changes, count):
        answer = CompletionOutput(0, "", [0] * count, None, None, weight_changes=changes)
        return [(span.version, span.start, span.end) for span in weight_spans(answer, count)]

    assert spans(((0, 0), (4, "a"), (6, 9)), 8) == [("0", 0, 4), ("a", 4, 6), ("9", 6, 8)]
    assert spans(((0, "a"),), 0) == []
