"""The page in Chromium: ui/test/browser.mjs, against the demo model and against hostile answers."""

import contextlib
import os
import shutil
import subprocess

import pytest

import jpaged
from jpaged.chat.turn import ChatFormats
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving import fake_engine
from tests.serving.demo_options import SIZES
from tests.serving.page_workspace import make_workspace
from tests.serving.tool_definitions import TEMPLATES
from tests.support.http_server import running

WHY = "the page was NOT TESTED IN A BROWSER"
HOSTILE = """<think><img src=x onerror=alert(1)> thinking</think>## A heading

| a | b |
|---|---|
| 1 | 2 |

```html
<b>code</b>
```

<script>alert(1); window.hacked = 1</script>
<img src=x onerror="window.hacked = 1"> <svg onload=alert(1)></svg> <iframe src="javascript:alert(1)"></iframe>
<style>body { display: none }</style> <math><mtext></mtext></math> <form action="https://evil.example/"></form>

[script](javascript:alert(1)) [data](data:text/html,<script>alert(1)</script>) [vb](vbscript:x)
[link](https://evil.example/?q=1) ![image](https://evil.example/pixel.png "t") [u](JaVaScRiPt&colon;alert(1))
[break](https://evil.example"onmouseover="alert(1))

<tool_call>{"name": "look", "arguments": {"q": "<b>x</b>"}}</tool_call>"""


def chromium() -> str:
    """The path of Chromium. Skips the test without it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip(f"{WHY}: chromium is not installed")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_in_a_browser(tmp_path):
    environment = os.environ | {"CHROMIUM": chromium()}
    workspace = make_workspace(tmp_path, WHY)
    hostile = fake_engine.FakeEngine(step_seconds=0, says=HOSTILE)
    hostile.tokenizer.chat_template = TEMPLATES["hermes"]
    formats = ChatFormats.named(reasoning_parser="deepseek_r1")
    plain = fake_engine.FakeEngine()
    plain.tokenizer.chat_template = None
    servers = (
        (Server(engine=jpaged.AsyncLLM("demo", **SIZES), model_names=("demo",)), ("talk",), ("look",)),
        (Server(engine=hostile, model_names=("<img src=x onerror=alert(1)>", "other"), chat=formats), (), ()),
        (Server(engine=plain, model_names=("plain",)), (), ()),
    )
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(running(create_app(server, AppOptions(api_keys=api, admin_keys=admin))))
            for server, api, admin in servers
        ]
        command = ["node", "test/browser.mjs", *urls]
        done = subprocess.run(
            command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed" in done.stdout
