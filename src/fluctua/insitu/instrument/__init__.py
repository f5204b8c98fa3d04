"""Instruments: the protocol of a driver, lines to a device, retries, and drivers as substrates."""

from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.device_array import array
from fluctua.insitu.instrument.functions import make_driver
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import (
    Batch,
    CommandRejected,
    Health,
    Instrument,
    InstrumentError,
    InvalidReply,
)
from fluctua.insitu.instrument.substrate import Retry
from fluctua.insitu.instrument.transport import (
    Transport,
    connect,
    query_integer,
    query_number,
    query_numbers,
)
from fluctua.insitu.instrument.virtual import VirtualBench

__all__ = [
    "Archive",
    "Batch",
    "CommandRejected",
    "Health",
    "Instrument",
    "InstrumentError",
    "InvalidReply",
    "ResidualGuard",
    "Retry",
    "Transport",
    "VirtualBench",
    "array",
    "connect",
    "make_driver",
    "query_integer",
    "query_number",
    "query_numbers",
]
