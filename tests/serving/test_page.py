"""The page at /ui: headers, caching, keys, and built files that match the sources. Needs no node."""

import hashlib
import json
import os
import pathlib
import re
import subprocess

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from jpaged.serving.admin.routes_ui import CONTENT_TYPES, FOLDER, POLICY
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving.page_workspace import UI, make_workspace
from tests.support.http_server import running

MAX_BYTES = 300_000
SOURCES = ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts")
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest() -> dict:
    return json.loads((FOLDER / "manifest.json").read_text())


def test_the_built_files_are_those_of_the_sources():
    """Run `npm ci && npm run build` in ui/ after a change there."""
    paths = sorted([*SOURCES, *(str(path.relative_to(UI)) for path in (UI / "src").rglob("*") if path.is_file())])
    lines = "".join(f"{sha256((UI / path).read_bytes())}  {path}\n" for path in paths)
    assert manifest()["sources"] == sha256(lines.encode()), "serving/page is stale: npm run build in ui/"
    built = {path.name: sha256(path.read_bytes()) for path in FOLDER.iterdir() if path.name != "manifest.json"}
    assert manifest()["files"] == built
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES


def test_headers_and_types(url):
    assert {pathlib.Path(name).suffix for name in FILES} == {".html", ".js", ".css", ".svg"}
    for name in ("", *FILES):
        answer = httpx.get(f"{url}/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == CONTENT_TYPES[pathlib.Path(name or "index.html").suffix]
        assert answer.content == (FOLDER / (name or "index.html")).read_bytes()
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        hashed = name.startswith("page-")
        assert ("immutable" in answer.headers["cache-control"]) == hashed
        assert hashed or answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = httpx.get(f"{url}/ui/{name}", headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert httpx.get(f"{url}/ui/{name}", headers={"If-None-Match": '"other"'}).status_code == 200
        assert httpx.head(f"{url}/ui/{name}").content == b""


def test_the_policy_is_strict():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["img-src"] == "'self'"
    assert rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert "*" not in POLICY


def test_the_files_name_no_other_host_and_no_inline_code():
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", index)
    assert sorted(re.findall(r'(?:src|href)="([^"]*)"', index)) == sorted(f"./{n}" for n in FILES if n != "index.html")
    script = next(FOLDER.glob("*.js")).read_text()
    assert not re.search(r"\b(?:localStorage|sessionStorage|indexedDB)\b|document\.cookie|\beval\(", script)
    assert set(re.findall(r"https?://[\w./]*", next(FOLDER.glob("*.css")).read_text())) == set()


@pytest.mark.parametrize("path", ["/ui/manifest.json", "/ui/licenses.md", "/ui/nothing.js", "/ui/../routes_ui.py"])
def test_other_files_are_not_served(url, path):
    assert httpx.get(f"{url}{path}").status_code == 404
    assert httpx.post(f"{url}/ui/").status_code == 405


def test_the_page_needs_no_key_and_its_data_do(engine):
    app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(api_keys=("talk",), admin_keys=("look",)))
    with running(app) as url:
        assert httpx.get(f"{url}/ui").headers["location"] == "ui/"
        browser = httpx.get(f"{url}/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (browser.status_code, browser.headers["location"]) == (307, "ui/")
        assert httpx.get(f"{url}/").status_code == 401
        for name in ("", *FILES):
            assert httpx.get(f"{url}/ui/{name}").status_code == 200
        for path in ("/v1/models", "/admin/inspect", "/ui/other", "/ui/../v1/models", "/uix", "/ui//"):
            assert httpx.get(f"{url}{path}").status_code == 401, path


def test_below_a_prefix(engine):
    """The redirect and the links of the page are relative."""
    app = Starlette(routes=[Mount("/deep/model", create_app(Server(engine=engine, model_names=("echo",))))])
    with running(app) as url, httpx.Client(follow_redirects=True) as client:
        answer = client.get(f"{url}/deep/model/ui")
        assert str(answer.url) == f"{url}/deep/model/ui/"
        assert client.get(f"{url}/deep/model/", headers={"Accept": "text/html"}).url == answer.url
        for link in re.findall(r'(?:src|href)="([^"]*)"', answer.text):
            assert client.get(answer.url.join(link)).status_code == 200


def test_the_page_can_be_switched_off(engine):
    with running(create_app(Server(engine=engine, model_names=("echo",)), AppOptions(ui=False))) as url:
        for name in ("/ui", "/ui/", *(f"/ui/{name}" for name in FILES)):
            assert httpx.get(f"{url}{name}").status_code == 404
        assert httpx.get(f"{url}/", headers={"Accept": "text/html"}).status_code == 404
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_building_again_gives_the_committed_files(tmp_path):
    workspace = make_workspace(tmp_path, "the page was NOT BUILT AGAIN and compared")
    environment = os.environ | {"OUT_DIR": str(tmp_path / "page")}
    command = ["npm", "run", "build"]
    done = subprocess.run(
        command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    committed = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert built.keys() == committed.keys()
    assert built == committed
