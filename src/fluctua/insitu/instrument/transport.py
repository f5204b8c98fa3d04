"""Lines to an instrument, over a bare socket or through VISA: write, query, query a block.

`connect("TCPIP::127.0.0.1::5025::SOCKET")` goes through PyVISA (`pip install 'fluctua[lab]'`), as
would a GPIB or USB address; `connect("tcp://127.0.0.1:5025")` needs nothing but Python. Without a
vendor's VISA library PyVISA's pure-Python backend is used.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.protocol import CommandRejected, InstrumentError, InvalidReply
from fluctua.insitu.instrument.scpi import read_block


class Transport(Protocol):
    """Protocol of a line to an instrument; a failure of the line is an `InstrumentError`.

    `connect` opens one over a socket or VISA. Write one for another bus.

    >>> class Serial:  # around an open port of pyserial
    ...     def __init__(self, port): self.port = port
    ...     def write(self, message): self.port.write(message.encode() + bytes([10]))
    ...     def query(self, message):
    ...         self.write(message)
    ...         return self.port.readline().decode().strip()
    ...     def query_block(self, message, max_bytes): raise NotImplementedError
    ...     def close(self): self.port.close()
    """

    def write(self, message: str) -> None:
        """Send one message."""

    def query(self, message: str) -> str:
        """Send one message and return the answer, without the end of its line."""

    def query_block(self, message: str, max_bytes: int) -> bytes:
        """Send one message and return the bytes of the definite-length block that answers it."""

    def close(self) -> None:
        """Close the line; does not raise."""


NOT_A_NUMBER = 9.9e37
"""SCPI's number for infinity; 9.91e37 is its NaN."""


def query_numbers(line: Transport, message: str, count: int | None = None) -> np.ndarray:
    """Query a message and return the comma-separated numbers of its answer.

    Raises `InvalidReply` where the answer is no such list, `CommandRejected` where the instrument
    has no value (nan, inf, 9.91e37).

    Args:
        line: to the instrument.
        message: such as "SOUR:OMEG?".
        count: how many are expected; None takes any.

    Returns: (K,).

    >>> class Line:  # in place of `insitu.instrument.connect("tcp://192.168.0.7:5025")`
    ...     def query(self, message): return "0.5,0.25"
    >>> insitu.instrument.query_numbers(Line(), "SOUR:OMEG?", count=2)
    array([0.5 , 0.25])
    """
    answer = line.query(message)
    values = []
    for text in answer.split(","):
        value = scpi.parse_number(text.strip())
        if text.strip().lower().lstrip("+-") in ("nan", "inf", "infinity") or (
            value and abs(value) >= NOT_A_NUMBER
        ):
            raise CommandRejected(
                f"{message} was answered by {answer[:60]!r}: the instrument has no value for it"
            )
        if value is None:
            raise InvalidReply(
                f"{message} was answered by {answer[:60]!r}, where decimal numbers were expected"
            )
        values.append(value)
    if count is not None and len(values) != count:
        raise InvalidReply(
            f"{message} was answered by {len(values)} numbers, where {count} were expected"
        )
    return np.array(values)


def query_number(line: Transport, message: str, *, least: float = -np.inf) -> float:
    """Query a message and return the number of its answer; see `query_numbers`.

    Args:
        line: to the instrument.
        message: such as "SOUR:OMEG?".
        least: a smaller number is refused.

    Returns: the number.

    >>> class Line:  # in place of `insitu.instrument.connect("tcp://192.168.0.7:5025")`
    ...     def query(self, message): return "0.5"
    >>> insitu.instrument.query_number(Line(), "SOUR:POW?", least=0.0)
    0.5
    """
    value = float(query_numbers(line, message, 1)[0])
    if value < least:
        raise CommandRejected(
            f"{message} was answered by {value:g}, where {least:g} or more was expected"
        )
    return value


def query_integer(line: Transport, message: str) -> int:
    """Query a message and return the whole number of its answer; see `query_numbers`.

    Args:
        line: to the instrument.
        message: such as "ACQ:COUN?".

    Returns: the number.

    >>> class Line:  # in place of `insitu.instrument.connect("tcp://192.168.0.7:5025")`
    ...     def query(self, message): return "20"
    >>> insitu.instrument.query_integer(Line(), "ACQ:COUN?")
    20
    """
    value = query_number(line, message)
    if value != int(value):
        raise InvalidReply(
            f"{message} was answered by {value:g}, where a whole number was expected"
        )
    return int(value)


def connect(address: str, *, timeout: float = 30.0) -> Transport:
    """Open a line to an instrument, over a socket or VISA.

    Args:
        address: `tcp://host:port`, or any VISA resource.
        timeout: seconds without an answer.

    Returns: the line, open.

    >>> from fluctua.insitu.bench.box import Bench
    >>> from fluctua.insitu.bench.server import background  # or: fluctua virtual-bench --port PORT
    >>> with background(Bench()) as port:
    ...     line = insitu.instrument.connect(f"tcp://127.0.0.1:{port}", timeout=5.0)
    ...     print(line.query("*IDN?"))
    ...     line.close()
    fluctua,virtual bench,...
    """
    if address.lower().startswith("tcp://"):
        return Socket(address, timeout=timeout)
    if "::" not in address:
        raise ValueError(
            "an address is tcp://HOST:PORT, or a VISA resource such as "
            f"TCPIP::192.168.0.7::5025::SOCKET or GPIB0::12::INSTR; got {address!r}."
        )
    return Visa(address, timeout=timeout)


class Socket:
    """SCPI over a bare TCP socket."""

    def __init__(self, address: str, *, timeout: float = 30.0):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit() or len(port) > 5 or int(port) >= 2**16:
            raise ValueError(
                f"an address is tcp://HOST:PORT, such as tcp://127.0.0.1:5025; got {address!r}."
            )
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=timeout)
        except OSError as error:
            raise InstrumentError(f"no connection to {address}: {error}") from error
        # A command after a command would otherwise wait for a delayed acknowledgement: 40 ms each.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb", buffering=2**16)

    def write(self, message: str) -> None:
        """Send one message."""
        try:
            self._socket.sendall(message.encode("ascii") + b"\n")
        except OSError as error:
            raise InstrumentError(
                f"the line failed while {message[:40]!r} was sent: {error}"
            ) from error

    def query(self, message: str) -> str:
        """Send one message and return one line."""
        self.write(message)
        try:
            line = self._file.readline(2**20)
        except OSError as error:
            raise InstrumentError(f"no answer to {message[:40]!r}: {error}") from error
        if not line.endswith(b"\n"):
            raise InstrumentError(f"the connection was closed before {message[:40]!r} was answered")
        if not line.isascii():
            raise InvalidReply(
                f"{message[:40]!r} was answered by bytes that are not ASCII: {line[:40]!r}"
            )
        return line.decode("ascii").strip()

    def query_block(self, message: str, max_bytes: int) -> bytes:
        """Send one message and return one block, without the end of its line."""
        self.write(message)
        try:
            data = read_block(self._read_exactly, max_bytes)
            self._read_exactly(1)
        except (OSError, ValueError) as error:
            raise InstrumentError(
                f"{message[:40]!r} was not answered by a whole block: {error}"
            ) from error
        return data

    def _read_exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError(
                f"the connection was closed {count - len(data):,} bytes before the end."
            )
        return data

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


class Visa:
    """SCPI through PyVISA, with VISA's addresses: "TCPIP::127.0.0.1::5025::SOCKET".

    backend: "" takes a vendor's library if one is installed and else pure Python; "@py" always
        takes pure Python.
    """

    def __init__(self, address: str, *, timeout: float = 30.0, backend: str = ""):
        try:
            import pyvisa
        except ImportError:
            raise ImportError(
                f"{address} is a VISA resource, and PyVISA is not installed. Do: pip install "
                "'fluctua[lab]'; or, for a SCPI socket, give the address as tcp://HOST:PORT."
            ) from None
        # a closed line raises a VISA error, an OSError, or (while connecting) a plain Exception
        self._failures = (pyvisa.errors.Error, OSError, ValueError)
        try:
            resource: Any = pyvisa.ResourceManager(backend).open_resource(
                address, open_timeout=int(1000 * timeout)
            )
        except Exception as error:
            message = " ".join(str(error).split())  # some are of several lines
            raise InstrumentError(f"no connection to {address}: {message}") from error
        resource.timeout = 1000 * timeout
        resource.write_termination = resource.read_termination = "\n"
        resource.chunk_size = 2**20
        self._resource = resource

    def write(self, message: str) -> None:
        """Send one message."""
        with self._explain_failures(message):
            self._resource.write(message)

    def query(self, message: str) -> str:
        """Send one message and return one line."""
        with self._explain_failures(message):
            return self._resource.query(message).strip()

    def query_block(self, message: str, max_bytes: int) -> bytes:
        """Send one message and return one block, without the end of its line."""
        with self._explain_failures(message), self._read_binary():
            self._resource.write(message)
            data = read_block(self._resource.read_bytes, max_bytes)
            self._resource.read_bytes(1)
            return data

    @contextmanager
    def _read_binary(self) -> Iterator[None]:
        """Read bytes: a newline within a block is not the end of the answer."""
        self._resource.read_termination = None
        try:
            yield
        finally:
            self._resource.read_termination = "\n"

    @contextmanager
    def _explain_failures(self, message: str) -> Iterator[None]:
        """Raise failures of the line as `InstrumentError`, with the message that was sent."""
        try:
            yield
        except self._failures as error:
            raise InstrumentError(f"the line failed at {message[:40]!r}: {error}") from error

    def close(self) -> None:
        """Close the resource."""
        with suppress(Exception):
            self._resource.close()
