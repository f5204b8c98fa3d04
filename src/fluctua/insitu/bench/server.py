"""TCP server of the virtual bench: one thread for all connections, another for the simulation.

No connection can take it down, make it grow or keep others out: lines, commands per line, answers,
connections and waiting times are all limited. When all connections are taken, one that floods or is
silent is closed for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from fluctua.insitu.bench.box import Bench
from fluctua.insitu.bench.session import MAX_ANSWER, Reply, Session
from fluctua.insitu.instrument.scpi import make_error

LINE_LIMIT = 64 * 2**10
"""Bytes of one message."""
CLIENT_LIMIT = 16
MAX_WAITING = 4 * MAX_ANSWER
"""Bytes of all answers that clients have not collected yet."""
MAX_AHEAD = 1000
"""Messages without an answer after which a client makes room for others."""
GREETING = 2.0
"""Seconds within which a client that has sent no message yet keeps its connection from others."""
BOOTING = 0.2
"""Seconds for which a restarting box turns connections away."""


@dataclass
class Client:
    """A connection.

    last_message: time at which its last message ended; inf while it is served.
    spoke: whether it has sent a message.
    ahead: messages since it was last answered.
    """

    last_message: float
    spoke: bool = False
    ahead: int = 0


class Server:
    """Server of one bench.

    Args:
        idle: seconds after which a silent connection is closed.
        patience: seconds to wait for a client to collect an answer, and to finish a line that it
            began. When all connections are taken, one that was silent for longer makes room for a
            new one; so does one that has sent no message within `GREETING` seconds, or more than
            `MAX_AHEAD` that need no answer.
        stall: seconds for which a stalled answer keeps its connection.
    """

    def __init__(
        self, bench: Bench, *, idle: float = 3600.0, patience: float = 60.0, stall: float = 3600.0
    ):
        self.bench = bench
        self.idle = idle
        self.patience = patience
        self.stall = stall
        self.clients: dict[asyncio.StreamWriter, Client] = {}
        self.waiting = 0
        self.booting = False

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Start to listen; port 0 lets the system choose."""
        self.turn = asyncio.Lock()  # the box does one thing at a time
        return await asyncio.start_server(self._connection, host, port, limit=LINE_LIMIT)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.booting or not self._has_room():
            writer.transport.abort()
            return
        client = self.clients[writer] = Client(time.monotonic())
        session = Session(self.bench)
        try:
            async for line in self._lines(reader, session):
                client.last_message = math.inf
                client.spoke = True
                client.ahead += 1
                if (
                    not await self._answer(line, session, reader, writer)
                    or writer not in self.clients
                ):
                    break
                client.last_message = time.monotonic()
        except TimeoutError:
            writer.transport.abort()  # not close, which would keep what was not collected
        except (OSError, asyncio.CancelledError):
            pass  # the client left, or the bench is closing
        finally:
            self.clients.pop(writer, None)
            with contextlib.suppress(Exception):
                writer.close()

    async def _answer(
        self,
        line: bytes,
        session: Session,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Execute one message and send its answer. Returns whether the connection stays."""
        async with self.turn:
            # a short answer has always room
            room = min(MAX_ANSWER, max(LINE_LIMIT, MAX_WAITING - self.waiting))
            reply = await asyncio.to_thread(session.execute, line, room)
            self.waiting += len(reply.data)
        try:
            return await self._deliver(reply, reader, writer)
        finally:
            self.waiting -= len(reply.data)

    def _has_room(self) -> bool:
        """Whether one more connection is served; the longest silent one is closed if need be."""
        if len(self.clients) < CLIENT_LIMIT:
            return True
        now = time.monotonic()
        for writer, client in sorted(self.clients.items(), key=lambda item: item[1].last_message):
            patience = self.patience if client.spoke else min(GREETING, self.patience)
            if now - client.last_message >= patience or client.ahead > MAX_AHEAD:
                del self.clients[writer]
                writer.transport.abort()
                return True
        return False

    async def _lines(self, reader: asyncio.StreamReader, session: Session) -> AsyncIterator[bytes]:
        """Yield complete lines.

        A line that is too long is skipped with an error; a last one without end is dropped.
        """
        rest = b""
        skipping = False
        start = 0.0
        while True:
            # the time limit of a line counts from its beginning
            is_partial = skipping or rest != b""
            left = start + self.patience - time.monotonic() if is_partial else self.idle
            chunk = await asyncio.wait_for(reader.read(LINE_LIMIT), max(left, 0))
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if skipping or len(line) > LINE_LIMIT:
                    session.queue_error(
                        make_error(-363, f"a message has at most {LINE_LIMIT} bytes")
                    )
                    skipping = False
                elif line.strip():  # an empty line has no command
                    yield line.rstrip(b"\r")
            if lines or not is_partial:
                start = time.monotonic()
            if len(rest) > LINE_LIMIT:
                rest = b""
                skipping = True

    async def _deliver(
        self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Send an answer, or spoil it as the fault demands; whether the connection stays."""
        if reply.then == "stall":
            if writer in self.clients:  # the client may be gone: others need not wait for it
                self.clients[writer].last_message = time.monotonic()
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(self.stall):
                    while await reader.read(LINE_LIMIT):
                        pass
            return False
        if reply.then == "reboot":
            self._reboot()
            return False
        data = reply.data[: len(reply.data) // 2] if reply.then == "drop" else reply.data
        if data:
            writer.write(data)
            await asyncio.wait_for(writer.drain(), self.patience)
            if writer in self.clients:
                self.clients[writer].ahead = 0
        if reply.then == "drop":
            writer.close()
            return False
        return True

    def _reboot(self) -> None:
        self.booting = True
        for writer in self.clients:
            writer.transport.abort()
        asyncio.get_running_loop().call_later(BOOTING, setattr, self, "booting", False)


async def serve(server: Server, host: str, port: int, listening: Callable[[int], None]) -> None:
    """Listen until cancelled. listening: called with the port."""
    listener = await server.start(host, port)
    try:
        listening(listener.sockets[0].getsockname()[1])
        await asyncio.Event().wait()
    finally:  # not wait_closed, which would wait for clients to leave
        listener.close()
        for writer in server.clients:
            writer.transport.abort()


@contextlib.contextmanager
def background(bench: Bench, **options: float) -> Iterator[int]:
    """Run a bench in a thread of this process, for tests and notebooks; yields its port.

    >>> with background(Bench()) as port:
    ...     instrument = VirtualBench(f"tcp://127.0.0.1:{port}")
    """
    loop = asyncio.new_event_loop()
    ready: list[int] = []
    started = threading.Event()

    def share_port(port: int) -> None:
        ready.append(port)
        started.set()

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    task = loop.create_task(serve(Server(bench, **options), "127.0.0.1", 0, share_port))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not started.wait(60):
        raise RuntimeError("the bench did not begin to listen within a minute.")
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
