"""HTTP server of the page: it reads run folders, on this machine alone by default.

    GET /                             the page
    GET /runs                         one entry per run
    GET /changes                      a stream of it
    GET /runs/NUMBER/history          ?from=&to= iterations
    GET /runs/NUMBER/history.csv      download
    GET /runs/NUMBER/parameters       records, arrays, network
    GET /runs/NUMBER/theta/RECORD     parameters of one record
    GET /runs/NUMBER/details          texts, incidents
    GET /runs/NUMBER/devices          of an instrument: health, guard, drift
    GET /runs/NUMBER/record           of a calibrated model: the last record, expected and measured

Nothing is written. Only the page's own files and data of known runs are served, and the headers of
every answer forbid the page to load anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import socket
from collections.abc import AsyncIterator, Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluctua.watch.folders import RunLibrary, UnreadableRun, encode

if TYPE_CHECKING:
    from starlette.applications import Starlette

EVERY = 1.0
"""Seconds between two readings of the folders, for all pages together."""
PULSE = 15.0
"""Seconds after which a stream without changes sends a sign of life."""
MAX_STREAMS = 32
PORT = 8765
PAGE = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "network.js": ("network.js", "text/javascript; charset=utf-8"),
    "plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "uPlot.LICENSE": ("uPlot.LICENSE", "text/plain; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Changes:
    """Changes of the folders, read once per second for all open pages, and never without one."""

    def __init__(self, library: RunLibrary):
        self.library = library
        self.streams = 0
        self.changed = asyncio.Event()  # set once, at the next change
        self.overview: bytes = b""
        self.task: asyncio.Task[None] | None = None

    async def read_overview(self) -> bytes:
        """Read the runs as they are now."""
        self.overview = encode(await asyncio.to_thread(self.library.overview))
        return self.overview

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: the runs, whenever something in their folders changed."""
        if self.task is None or self.task.done():
            self.overview = b""  # of the last page that was open, some time ago
            self.task = asyncio.create_task(self._watch())
        shown = b""
        while True:
            changed = self.changed
            if self.overview and self.overview != shown:
                shown = self.overview
                yield b"data: " + shown + b"\n\n"
            try:
                async with asyncio.timeout(PULSE):
                    await changed.wait()
            except TimeoutError:
                yield b": still here\n\n"

    async def _watch(self) -> None:
        while self.streams:
            before = self.overview
            with contextlib.suppress(OSError, ValueError):  # a folder that goes while it is read
                await self.read_overview()
            if self.overview != before:
                self.changed.set()
                self.changed = asyncio.Event()
            await asyncio.sleep(EVERY)


def make_application(roots: list[Path], hosts: list[str] | None = None) -> Starlette:
    """Make the ASGI application of the page of some folders.

    Args:
        roots: folders with run folders in them, or run folders.
        hosts: names under which the page is requested; those of this machine if not given. Others
            are refused, so that no page from elsewhere can read this one.
    Returns: the application.
    """
    check_installed()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    library = RunLibrary(roots)
    library.find()
    changes = Changes(library)
    files = resources.files("fluctua.watch") / "page"

    async def page(request: Any) -> Response:
        name = request.path_params.get("name", "")
        if name not in PAGE:
            return JSONResponse({"error": "there is no such page."}, 404, HEADERS)
        file, kind = PAGE[name]
        return Response((files / file).read_bytes(), headers=HEADERS | {"Content-Type": kind})

    async def runs(request: Any) -> Response:
        return Response(
            await changes.read_overview(), media_type="application/json", headers=HEADERS
        )

    class Stream(StreamingResponse):
        """A stream that is counted from its creation to its end."""

        def __init__(self) -> None:
            super().__init__(changes.stream(), media_type="text/event-stream", headers=HEADERS)
            changes.streams += 1

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                changes.streams -= 1

    async def stream(request: Any) -> Response:
        if changes.streams >= MAX_STREAMS:
            return JSONResponse({"error": f"{MAX_STREAMS} pages are open already."}, 503, HEADERS)
        return Stream()

    def answer(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def endpoint(request: Any) -> Response:
            try:
                tree = await asyncio.to_thread(lambda: encode(read(request)))
            except (UnreadableRun, OSError) as error:
                return JSONResponse({"error": str(error)}, 404, HEADERS)
            except (ValueError, KeyError, OverflowError, csv.Error) as error:  # of damaged files
                return JSONResponse(
                    {"error": f"a file of this run is damaged ({error})."}, 404, HEADERS
                )
            return Response(tree, media_type="application/json", headers=HEADERS)

        return endpoint

    async def table(request: Any) -> Response:
        number = request.path_params["number"]
        try:
            name = library.run(number).name.replace("/", "-")
            text = await asyncio.to_thread(lambda: "".join(library.table(number)))
        except (ValueError, OSError) as error:
            return JSONResponse({"error": str(error)}, 404, HEADERS)
        attachment = f'attachment; filename="{_clean_name(name)}-history.csv"'
        return Response(
            text, headers=HEADERS | {"Content-Type": "text/csv", "Content-Disposition": attachment}
        )

    def number(request):
        return request.path_params["number"]

    def limit(request, name, default):
        return float(request.query_params.get(name, default))

    reads = {
        "history": lambda r: library.history(
            number(r), limit(r, "from", "-inf"), limit(r, "to", "inf")
        ),
        "parameters": lambda r: library.parameters(number(r)),
        "details": lambda r: library.details(number(r)),
        "devices": lambda r: library.devices(number(r)),
        "record": lambda r: library.record(number(r)),
    }
    routes = [
        Route("/runs", runs),
        Route("/changes", stream),
        *(Route(f"/runs/{{number}}/{name}", answer(read)) for name, read in reads.items()),
        Route(
            "/runs/{number}/theta/{record}",
            answer(lambda r: library.theta(number(r), _parse_integer(r.path_params["record"]))),
        ),
        Route("/runs/{number}/history.csv", table),
        Route("/", page),
        Route("/{name}", page),
    ]
    allowed = hosts or ["localhost", "127.0.0.1", "[::1]"]
    return Starlette(
        routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed)]
    )


def serve(
    roots: list[Path], host: str = "127.0.0.1", port: int = 0, ready: Callable[[str], None] = print
) -> None:
    """Serve the page until it is stopped.

    Args:
        roots: folders with run folders in them, or run folders.
        host: address of this machine to listen on; others than the loopback show the runs to the
            network.
        port: 0 takes `PORT`, or any free one where that is taken.
        ready: called with the address once it is known.

    """
    app = make_application(roots, None if host in ("127.0.0.1", "localhost", "::1") else ["*"])
    import uvicorn

    with contextlib.closing(_open_socket(host, port)) as listening:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def check_installed() -> None:
    """Raise if the packages that the page needs are missing."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise ValueError("the page needs Starlette and uvicorn: pip install 'fluctua[watch]'.")


def _open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be 0 to 65535; got {port}.")
    for choice in [port] if port else [PORT, 0]:
        try:
            return socket.create_server(
                (host, choice), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            failure = error
    raise ValueError(
        f"port {port or PORT} of {host} cannot be listened on: {failure.strerror}. "
        "Take another --port or --host."
    )


def _parse_integer(text: str) -> int:
    """Parse a number of an address; Python refuses those of thousands of digits."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UnreadableRun(f"a record is a whole number; got {text[:20]!r}.")
    return int(text)


def _clean_name(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
