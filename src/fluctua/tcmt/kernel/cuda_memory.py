"""Memory of the device: bundles of arrays, constants and index arrays, in few copies.

A copy takes as long as a short run. Arrays are copied together (`Bundle`), constants are written
when they change, and index arrays are sent once per graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel.cuda_layout import SiteLayout
from fluctua.tcmt.kernel.layout import KernelPlan, cache_per_graph

ALIGNMENT = 256
"""Alignment of arrays in bytes, that of CUDA's own allocations."""


class _Place(NamedTuple):
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, host: np.ndarray) -> np.ndarray:
        """Return the array in a host copy of the memory."""
        return host[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


class Bundle:
    """Arrays in one allocation of the device's memory, which lives as long as this object.

    Args:
        cp: CuPy.
        arrays: shape and type of each, by name.

    `address(name)` is for kernels that write there; `get()` copies all arrays to the host at once.
    """

    def __init__(self, cp: Any, **arrays: tuple[tuple[int, ...], Any]) -> None:
        self.cp = cp
        self._places: dict[str, _Place] = {}
        size = 0
        for name, (shape, of) in arrays.items():
            dtype = np.dtype(of)
            place = self._places[name] = _Place(
                size, math.prod(shape) * dtype.itemsize, shape, dtype
            )
            size += -(-place.size // ALIGNMENT) * ALIGNMENT
        self.memory = cp.empty(size, np.uint8)
        self._begin = int(self.memory.data.ptr)

    @classmethod
    def from_host(cls, cp: Any, arrays: Mapping[str, np.ndarray]) -> Bundle:
        """Copy arrays of the host to the device."""
        bundle = cls(cp, **{name: (array.shape, array.dtype) for name, array in arrays.items()})
        for name, array in bundle.host.items():
            array[...] = arrays[name]
        bundle.send()
        return bundle

    @cached_property
    def _mirror(self) -> np.ndarray:
        return np.zeros(self.memory.size, np.uint8)

    @cached_property
    def host(self) -> dict[str, np.ndarray]:
        """The arrays on the host, to be filled before `send`; initially zero."""
        return {name: place.view(self._mirror) for name, place in self._places.items()}

    def send(self) -> None:
        """Copy all arrays to the device."""
        if self._mirror.size:
            self.memory.set(self._mirror)

    def address(self, name: str) -> int:
        """Return the address of an array on the device."""
        return self._begin + self._places[name].offset

    def __getitem__(self, name: str) -> Any:
        place = self._places[name]
        return self.cp.ndarray(place.shape, place.dtype, self.memory.data + place.offset)

    def get(self) -> dict[str, np.ndarray]:
        """Copy all arrays to the host, once the device is done."""
        host = self.memory.get()
        return {name: place.view(host) for name, place in self._places.items()}

    def copy(self, name: str, target: Any) -> None:
        """Copy an array to a pointer of CuPy on the device, in the order of the stream."""
        place = self._places[name]
        target.copy_from_device_async(self.memory.data + place.offset, place.size)


class Constant:
    """A constant of a module: its pointer, and the value last written there."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.value = b""

    def differs(self, value: np.ndarray) -> bool:
        """Whether a value differs from the one last written."""
        return self.value != value.tobytes()


@functools.lru_cache(maxsize=1024)
def find_constant(module: Any, name: str) -> Constant:
    """Return a constant of a module, by name."""
    return Constant(module.get_global(name))


@dataclass(frozen=True)
class Spread:
    """A layout of a graph, compared by the numbers that determine it."""

    threads: int
    per: int
    cluster: int
    layout: SiteLayout = field(compare=False)


class Indices(NamedTuple):
    """Index arrays of a graph on the device.

    of_inputs: addresses of the integer fields of `Inputs`, by name.
    first: address of the first raw column of each parameter.
    second: address of the second raw column of each parameter.
    memory: holds the arrays.
    """

    of_inputs: dict[str, int]
    first: int
    second: int
    memory: Bundle


@cache_per_graph
def load_indices(
    plan: KernelPlan, cp: Any, gpu: int, spread: Spread, rates: bool, parts: int
) -> Indices:
    """Return the index arrays of a network on the current GPU.

    rates, parts: determine the number of raw columns.
    """
    layout = spread.layout
    first, second = list_columns(plan, layout, rates, parts)
    of_inputs = {
        "neighbour": layout.neighbour,
        "bond": layout.wave,
        "bond_given": plan.bond_given[layout.bonds] if plan.bonds else np.zeros(0, np.int32),
        "mirror": layout.mirror,
        "mail": layout.mail,
    }
    memory = Bundle.from_host(cp, {**of_inputs, "first": first, "second": second})
    places = {name: memory.address(name) if array.size else 0 for name, array in of_inputs.items()}
    return Indices(places, memory.address("first"), memory.address("second"), memory)


def list_columns(
    plan: KernelPlan, layout: SiteLayout, rates: bool, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the one or two raw columns that add up to each parameter; −1 for none. (parts·P,)"""
    n = plan.sites
    degree = layout.degree
    site = np.arange(n)
    blocks = [site, n + site, 2 * n + layout.half[:, 0]]
    if rates:
        base = (2 + degree) * n
        blocks += [
            base + site,
            base + n + site,
            base + 2 * n + plan.drive_site,
            base + 3 * n + plan.port_site,
        ]
    a = np.concatenate(blocks)
    b = np.full_like(a, -1)
    b[2 * n : 2 * n + plan.bonds] = 2 * n + layout.half[:, 1]
    part = np.arange(parts)[:, None] * (2 + degree + (4 if rates else 0)) * n
    return (part + a).ravel().astype(np.int32), np.where(b < 0, -1, part + b).ravel().astype(
        np.int32
    )
