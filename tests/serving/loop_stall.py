"""The longest stall of the event loop during a request."""

import asyncio
import time

MAX_STALL = 0.1  # seconds


async def ask(app, path: str, body: bytes) -> tuple[int, bytes, float]:
    """Send one request to the application. Returns (status, the answer, the longest stall in seconds)."""
    pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)][::-1]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    status, answer, longest, done = 0, b"", 0.0, False

    async def receive() -> dict:
        if not pieces:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def send(message: dict) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    async def tick() -> None:
        nonlocal longest
        last = time.process_time()
        while not done:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.process_time() - last), time.process_time()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await asyncio.wait_for(app(scope, receive, send), 60)
    done = True
    await ticking
    return status, answer, longest
