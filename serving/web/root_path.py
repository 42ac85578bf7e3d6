"""ASGI middleware that removes a proxy's prefix and a trailing slash from paths, before any other layer reads them."""

from starlette.types import ASGIApp, Receive, Scope, Send

KEEP_SLASH = frozenset({"/", "/ui/"})  # paths of routes that end with a slash


class RemoveRootPath:
    """Serves /llm/v1/models and /v1/models alike, with the prefix /llm. Every path may also end with a slash.

    A prefix in the scope, from an outer application or Ray Serve, is also removed. Keys are checked for the new path.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        """root_path: begins with a slash, and does not end with one. Empty: none."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        path = scope.get("path", "")
        for root in (scope.get("root_path", "").rstrip("/"), self._root_path):
            if root and path.startswith(root + "/"):
                path = path.removeprefix(root)
        if path.endswith("/") and not path.endswith("//") and path not in KEEP_SLASH:
            path = path[:-1]
        if path != scope.get("path", ""):
            scope = {**scope, "path": path, "root_path": ""}
        await self._app(scope, receive, send)
