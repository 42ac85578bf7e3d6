"""Options of `create_app`: keys, CORS, allowed hosts, logs, and which optional routes exist."""

import dataclasses
import pathlib

from jpaged.serving.files.store import FileStore


@dataclasses.dataclass(frozen=True, slots=True)
class CrossOrigin:
    """CORS settings. origins: allowed to read answers, such as https://chat.example.com. `*`: all; empty: none."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AppOptions:
    """Options of `create_app`.

    api_keys:      if not empty, every route requires one, except `auth.OPEN_PATHS`, the page and the admin routes.
    admin_keys:    if not empty, the routes of `routes_admin` exist. They require one of these keys, and no API key.
    allowed_hosts: Host headers to accept: names, addresses, and `*.example.com`. None: any.
    root_path:     path prefix that a proxy adds, such as /llm.
    profile_dir:   folder for profiles. None: the admin routes that record one do not exist.
    ui:            serve the page at /ui. Its files need no key, but its data does.
    tokenizer_info: serve GET /tokenizer_info, which shows the chat template.
    access_log:    log a line per HTTP request.
    disable_log_stats: do not log statistics every 10 seconds.
    keep_responses: store the answers of /v1/responses, for clients to retrieve.
    files: folder of /v1/files and /v1/batches. None: these routes do not exist.
    keeper: socket of the front end that keeps responses, files and batches. None: this application does.
    forwards_files: the keeper has /v1/files and /v1/batches.
    weights_dirs: checkpoints below them may replace the weights while the server runs. Needs an admin key.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    cross_origin: CrossOrigin = CrossOrigin()
    root_path: str = ""
    profile_dir: pathlib.Path | None = None
    ui: bool = True
    tokenizer_info: bool = False
    access_log: bool = False
    disable_log_stats: bool = False
    keep_responses: bool = True
    files: FileStore | None = None
    keeper: str | None = None
    forwards_files: bool = False
    weights_dirs: tuple[pathlib.Path, ...] = ()
