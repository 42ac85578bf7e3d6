"""ASGI middleware that removes a proxy's prefix and a slash at the end from paths, before anything looks at them."""

from starlette.types import ASGIApp, Receive, Scope, Send

KEEP_SLASH = frozenset({"/", "/ui/"})  # paths of routes that end with a slash


class RemoveRootPath:
    """Serves /llm/v1/models and /v1/models alike, with the prefix /llm. A proxy may pass the prefix on, or remove it.

    /health/ is served as /health, and so are all routes.

    The application that this one is mounted in, and Ray Serve, name their prefix in the scope: it is removed as well.
    Keys are checked after this: they are checked for the path that is routed.
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
