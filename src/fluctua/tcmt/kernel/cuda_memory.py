"""Arrays that go to the device, or come back, in one copy: each by itself takes as long as a short run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 256
"""Bytes: of what the device reads at once, and of CUDA's own allocations."""


class _Place(NamedTuple):
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, host: np.ndarray) -> np.ndarray:
        """The array in a copy of the whole memory."""
        return host[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


class Bundle:
    """Arrays one after the other in one piece of the device's memory, which lives as long as this object.

    Args:
        cp: CuPy.
        arrays: shape and type of each, by name.

    >>> out = Bundle(cp, returns=((1000,), float), overflow=((1000,), np.int32))
    >>> out.address("overflow")  # for a kernel that writes there
    >>> out.get()["returns"].shape
    (1000,)

    """

    def __init__(self, cp: Any, **arrays: tuple[tuple[int, ...], Any]) -> None:
        self.cp = cp
        self._places: dict[str, _Place] = {}
        size = 0
        for name, (shape, of) in arrays.items():
            dtype = np.dtype(of)
            place = self._places[name] = _Place(size, math.prod(shape) * dtype.itemsize, shape, dtype)
            size += -(-place.size // ALIGNMENT) * ALIGNMENT
        self.memory = cp.empty(size, np.uint8)
        self._begin = int(self.memory.data.ptr)

    @classmethod
    def of(cls, cp: Any, arrays: Mapping[str, np.ndarray]) -> Bundle:
        """Copies of arrays of the host."""
        made = cls(cp, **{name: (array.shape, array.dtype) for name, array in arrays.items()})
        for name, array in made.host.items():
            array[...] = arrays[name]
        made.send()
        return made

    @cached_property
    def _mirror(self) -> np.ndarray:
        return np.zeros(self.memory.size, np.uint8)

    @cached_property
    def host(self) -> dict[str, np.ndarray]:
        """The same arrays on the host, to be written to before `send`; zeros at first."""
        return {name: place.of(self._mirror) for name, place in self._places.items()}

    def send(self) -> None:
        """Copy all arrays to the device."""
        if self._mirror.size:
            self.memory.set(self._mirror)

    def address(self, name: str) -> int:
        """Of one array on the device."""
        return self._begin + self._places[name].offset

    def __getitem__(self, name: str) -> Any:
        place = self._places[name]
        return self.cp.ndarray(place.shape, place.dtype, self.memory.data + place.offset)

    def get(self) -> dict[str, np.ndarray]:
        """All of them on the host, once the device is done."""
        host = self.memory.get()
        return {name: place.of(host) for name, place in self._places.items()}

    def copy(self, name: str, target: Any) -> None:
        """Copy an array on to another place on the device, a pointer of CuPy; in the order of the stream."""
        place = self._places[name]
        target.copy_from_device_async(self.memory.data + place.offset, place.size)
