"""The virtual bench on a TCP port. asyncio: one thread for all connections, another for the simulation.

Nobody who connects can take it down, make it grow or keep others out: lines, commands a line, answers, connections and
waiting times are all limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from fluctua.insitu.bench.box import Bench
from fluctua.insitu.bench.session import MOST_ANSWER, Reply, Session
from fluctua.insitu.instrument.scpi import error

LINE_LIMIT = 64 * 2**10
"""Bytes of one message."""
CLIENT_LIMIT = 16
MOST_WAITING = 4 * MOST_ANSWER
"""Bytes of all answers that clients have not collected yet."""
BOOTING = 0.2
"""Seconds for which a restarting box turns connections away."""


class Server:
    """Serves one bench.

    Args:
        idle: seconds after which a silent connection is closed.
        patience: seconds to wait for a client to collect an answer, and to finish a line that it began. When all
            connections are taken, one that was silent for longer makes room for a new one.
        stall: seconds for which a stalled answer keeps its connection.

    """

    def __init__(self, bench: Bench, *, idle: float = 3600.0, patience: float = 60.0, stall: float = 3600.0):
        self.bench, self.idle, self.patience, self.stall = bench, idle, patience, stall
        self.clients: dict[asyncio.StreamWriter, float] = {}  # when each was last heard of; inf: it is being served
        self.waiting = 0
        self.booting = False

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Begin to listen; port 0 lets the system choose."""
        self.turn = asyncio.Lock()  # the box does one thing at a time
        return await asyncio.start_server(self._connection, host, port, limit=LINE_LIMIT)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.booting or not self._has_room():
            writer.transport.abort()
            return
        self.clients[writer] = time.monotonic()
        session = Session(self.bench)
        try:
            async for line in self._lines(reader, session):
                self._heard(writer, math.inf)
                if not await self._answer(line, session, reader, writer):
                    break
                self._heard(writer, time.monotonic())
        except TimeoutError:
            writer.transport.abort()  # not close, which would keep what was not collected
        except (OSError, asyncio.CancelledError):
            pass  # a client that left is no concern of the others; cancelled: the bench is closing
        finally:
            self.clients.pop(writer, None)
            with contextlib.suppress(Exception):
                writer.close()

    async def _answer(
        self, line: bytes, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Carry out one message and send its answer. Returns whether the connection stays."""
        async with self.turn:
            room = min(MOST_ANSWER, max(LINE_LIMIT, MOST_WAITING - self.waiting))  # a word has always room
            reply = await asyncio.to_thread(session.execute, line, room)
            self.waiting += len(reply.data)
        try:
            return await self._deliver(reply, reader, writer)
        finally:
            self.waiting -= len(reply.data)

    def _heard(self, writer: asyncio.StreamWriter, when: float) -> None:
        if writer in self.clients:  # not one that has just been closed
            self.clients[writer] = when

    def _has_room(self) -> bool:
        """Whether one more connection is served; the longest silent one is closed for it if need be."""
        if len(self.clients) < CLIENT_LIMIT:
            return True
        oldest = min(self.clients, key=self.clients.__getitem__)
        if time.monotonic() - self.clients[oldest] < self.patience:
            return False
        del self.clients[oldest]
        oldest.transport.abort()
        return True

    async def _lines(self, reader: asyncio.StreamReader, session: Session) -> AsyncIterator[bytes]:
        """Complete lines. One that is too long is complained about and skipped; a last one without end is dropped."""
        rest, skipping, begun = b"", False, 0.0
        while True:
            half = skipping or rest != b""  # waited for from its beginning, whether it comes byte by byte or not at all
            left = begun + self.patience - time.monotonic() if half else self.idle
            chunk = await asyncio.wait_for(reader.read(LINE_LIMIT), max(left, 0))
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if skipping or len(line) > LINE_LIMIT:
                    session.complain(error(-363, f"a message has at most {LINE_LIMIT} bytes"))
                    skipping = False
                else:
                    yield line.rstrip(b"\r")
            if lines or not half:
                begun = time.monotonic()
            if len(rest) > LINE_LIMIT:
                rest, skipping = b"", True

    async def _deliver(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send an answer, or fail to as the fault has it. Returns whether the connection stays."""
        if reply.then == "stall":
            self._heard(writer, time.monotonic())  # the client may be gone: others need not wait for it
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
    """Listen until cancelled. listening: told the port."""
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
    """A bench in a thread of this process, for tests and notebooks; yields its port.

    >>> with background(Bench()) as port:
    ...     instrument = VirtualBench(f"tcp://127.0.0.1:{port}")
    """
    loop = asyncio.new_event_loop()
    ready: list[int] = []
    begun = threading.Event()

    def share_port(port: int) -> None:
        ready.append(port)
        begun.set()

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
    if not begun.wait(60):
        raise RuntimeError("the bench did not begin to listen within a minute.")
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
