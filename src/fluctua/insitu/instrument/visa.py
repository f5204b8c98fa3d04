"""Any VISA resource as a `Transport`: LAN, GPIB, USB or serial, through PyVISA and whatever backend it finds.

Without a vendor's VISA library the pure-Python backend is used. Install both with `pip install 'fluctua[lab]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fluctua.insitu.instrument.protocol import InstrumentError
from fluctua.insitu.instrument.scpi import read_block


class Visa:
    """SCPI through PyVISA. backend: "" takes a vendor's library where there is one and else
    pure Python, which "@py" takes always.

    >>> Visa("TCPIP::127.0.0.1::5025::SOCKET").query("*IDN?")
    """

    def __init__(self, address: str, *, timeout: float = 30.0, backend: str = ""):
        try:
            import pyvisa
        except ImportError:
            raise ImportError(
                f"{address} is a VISA resource, and PyVISA is not installed. Do: pip install 'fluctua[lab]'; or, for a "
                "SCPI socket, give the address as tcp://HOST:PORT."
            ) from None
        # a closed line shows as a VISA error, as an OSError, or (while connecting) as a plain Exception
        self._failures = (pyvisa.errors.Error, OSError, ValueError)
        try:
            resource: Any = pyvisa.ResourceManager(backend).open_resource(address, open_timeout=int(1000 * timeout))
        except Exception as error:
            said = " ".join(str(error).split())  # some are of several lines
            raise InstrumentError(f"no connection to {address}: {said}") from error
        resource.timeout = 1000 * timeout
        resource.write_termination = resource.read_termination = "\n"
        resource.chunk_size = 2**20
        self._resource = resource

    def write(self, message: str) -> None:
        """Send one message."""
        with self._explained(message):
            self._resource.write(message)

    def query(self, message: str) -> str:
        """One line."""
        with self._explained(message):
            return self._resource.query(message).strip()

    def query_block(self, message: str, most: int) -> bytes:
        """One block and the end of its line."""
        with self._explained(message), self._binary():
            self._resource.write(message)
            data = read_block(self._resource.read_bytes, most)
            self._resource.read_bytes(1)
            return data

    @contextmanager
    def _binary(self) -> Iterator[None]:
        """A newline among the bytes of a block is not the end of the answer."""
        self._resource.read_termination = None
        try:
            yield
        finally:
            self._resource.read_termination = "\n"

    @contextmanager
    def _explained(self, message: str) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise InstrumentError(f"the line failed at {message[:40]!r}: {error}") from error

    def close(self) -> None:
        """Close."""
        with suppress(Exception):
            self._resource.close()
