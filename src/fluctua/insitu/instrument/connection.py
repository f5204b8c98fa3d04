"""An instrument in a thread of its own: a driver that never returns does not stop the training.

A driver may wait inside a vendor's library, which cannot be interrupted. Its thread is then left
behind. It is a daemon thread, which does not keep the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from fluctua.insitu.instrument.protocol import Instrument, InstrumentError

CLOSING = 5.0
"""Seconds that `close` of a driver may take."""

Answer = TypeVar("Answer")


class DriverTimeout(InstrumentError):
    """A driver that did not return within the time limit."""


class Connection:
    """Open an instrument, use it and close it, all in one thread, each within a time limit."""

    def __init__(self, connect: Callable[[], Instrument]):
        self._connect = connect
        self._instrument: Instrument | None = None
        self._hung = False
        self._closed = False
        self._calls: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._serve, name="instrument", daemon=True).start()

    def use(self, act: Callable[[Instrument], Answer], seconds: float) -> Answer:
        """Return act(instrument), opening the instrument first if it is not open.

        Raises `DriverTimeout` after so many seconds.
        """
        answer: Future[Answer] = Future()
        self._calls.put((act, answer))
        wait([answer], min(seconds, threading.TIMEOUT_MAX))
        if not answer.done():
            self._hung = True
            raise DriverTimeout(f"the driver did not return within {seconds:g} s")
        return answer.result()

    def close(self) -> None:
        """Close the instrument, from another thread if its own does not return."""
        self._closed = True
        if self._instrument is not None:
            if not self._hung:
                with suppress(Exception):
                    self.use(_close, CLOSING)
            if self._hung:
                threading.Thread(
                    target=_close, args=(self._instrument,), name="closing", daemon=True
                ).start()
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            act, answer = call
            try:
                if self._instrument is None:
                    self._instrument = self._connect()
                    if self._closed:  # it opened too late
                        _close(self._instrument)
                answer.set_result(act(self._instrument))
            except BaseException as error:
                answer.set_exception(error)


def _close(instrument: Instrument) -> None:
    with suppress(Exception):
        instrument.close()
