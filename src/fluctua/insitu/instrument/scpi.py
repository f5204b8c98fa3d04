"""Messages of IEEE 488.2: definite-length blocks, decimal numbers, commands and errors.

    #<n><length in n digits><bytes>         #3256…  is a block of 256 bytes

Used by drivers and by the virtual bench.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Array

MAX_DIGITS = 9
"""The length of a block has one to nine digits."""
_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?")


def make_block(data: bytes) -> bytes:
    """Wrap bytes in a definite-length block.

    >>> make_block(b"abc")
    b'#13abc'
    """
    length = str(len(data))
    if len(length) > MAX_DIGITS:
        raise ValueError(
            f"a definite-length block holds less than a gigabyte; got {len(data):,} "
            "bytes. Send parts."
        )
    return f"#{len(length)}{length}".encode() + data


def read_block(read: Callable[[int], bytes], max_bytes: int) -> bytes:
    """Read a definite-length block and return its bytes.

    Args:
        read: read(k) returns exactly k bytes or raises.
        max_bytes: a longer block is refused.

    >>> read_block(io.BytesIO(make_block(b"abc")).read, max_bytes=100)
    b'abc'
    """
    mark = read(1)
    if mark != b"#":
        raise ValueError(
            f"a block must begin with '#'; got {mark!r}. Is an error message in its place?"
        )
    digits = read(1)
    if not b"1" <= digits <= b"9":
        raise ValueError(
            f"after '#' a block has the number of digits of its length, 1 to 9; got {digits!r}."
        )
    length = read(int(digits))
    if not length.isdigit():
        raise ValueError(f"the length of a block must be decimal digits; got {length!r}.")
    if int(length) > max_bytes:
        raise ValueError(
            f"a block of {int(length):,} bytes is announced; at most {max_bytes:,} were expected."
        )
    return read(int(length))


def format_numbers(values: Array) -> str:
    """Write numbers separated by commas, with all digits that reading them back needs."""
    return ",".join(repr(float(v)) for v in np.ravel(np.asarray(values, np.float64)))


def parse_number(text: str) -> float | None:
    """Parse a finite decimal number; None for nan, inf, hexadecimal and digits of other scripts."""
    if len(text) > 100 or not _NUMBER.fullmatch(text) or not text.isascii():
        return None
    value = float(text)
    return value if np.isfinite(value) else None


class MessageUnit(NamedTuple):
    """One command of a message: `SOURce:OMEGa 0.1,0.2` has one header and two arguments.

    header: in capitals, "SOURCE:OMEGA".
    query: whether it ended in `?`.
    arguments: as text.
    """

    header: str
    query: bool
    arguments: tuple[str, ...]


def split_message(message: str) -> Iterator[MessageUnit]:
    """Yield the commands of one line; the path of a compound header carries on (SCPI-99, 6.2.4).

    >>> [unit.header for unit in split_message("SOUR:OMEG 1;KAPP 2;*CLS;:SYST:ERR?")]
    ['SOUR:OMEG', 'SOUR:KAPP', '*CLS', 'SYST:ERR']
    """
    path = ""
    for part in message.split(";"):
        part = part.strip()
        if not part:
            continue
        header, _, rest = part.partition(" ")
        query = header.endswith("?")
        header = header.rstrip("?").upper() if header.count("?") <= 1 else header.upper()
        if not header.startswith("*"):
            header = header[1:] if header.startswith(":") else path + header
            path = header[: header.rfind(":") + 1]
        arguments = tuple(a.strip() for a in rest.split(",")) if rest.strip() else ()
        yield MessageUnit(header, query, arguments)


def compile_pattern(command: str) -> re.Pattern[str]:
    """Compile `SYSTem:ERRor[:NEXT]`: each word in its short form, the capitals, or in full.

    >>> bool(compile_pattern("SYSTem:ERRor[:NEXT]").fullmatch("SYST:ERROR"))
    True
    """
    optional = command.replace("[", "(?:").replace("]", ")?")
    return re.compile(re.sub(r"([*A-Z]+)([a-z]*)", _match_short_or_full, optional))


def _match_short_or_full(word: re.Match[str]) -> str:
    short = re.escape(word[1])
    rest = word[2].upper()
    return f"{short}(?:{rest})?" if rest else short


class ScpiError(NamedTuple):
    """An entry of the error queue."""

    code: int
    text: str

    def __str__(self) -> str:
        return f'{self.code},"{self.text}"'


NO_ERROR = ScpiError(0, "No error")
STANDARD = {
    -101: "Invalid character",
    -102: "Syntax error",
    -104: "Data type error",
    -108: "Parameter not allowed",
    -109: "Missing parameter",
    -113: "Undefined header",
    -120: "Numeric data error",
    -200: "Execution error",
    -222: "Data out of range",
    -223: "Too much data",
    -224: "Illegal parameter value",
    -225: "Out of memory",
    -230: "Data corrupt or stale",
    -310: "System error",
    -350: "Queue overflow",
    -363: "Input buffer overrun",
    -430: "Query DEADLOCKED",
}
"""The errors that the bench uses, as SCPI-99 words them."""


def make_error(code: int, detail: str = "") -> ScpiError:
    """Make a standard error, with details after a semicolon; odd characters become `?`."""
    clean = re.sub(r"[^ -!#-~]", "?", detail)[:200]
    return ScpiError(code, STANDARD[code] + (f"; {clean}" if clean else ""))


def event_bit(code: int) -> int:
    """Return the bit of the standard event register for the class of an error (-1xx to -4xx)."""
    return {1: 32, 2: 16, 3: 8, 4: 4}[-code // 100]


def parse_error(answer: str) -> ScpiError | None:
    """Parse the answer to `SYST:ERR?`; None if it is not an entry of an error queue.

    >>> parse_error('-113,"Undefined header"').code
    -113
    """
    match = re.fullmatch(r'([+-]?\d{1,6}) *, *"((?:[^"]|"")*)"', answer)
    return ScpiError(int(match[1]), match[2]) if match else None
