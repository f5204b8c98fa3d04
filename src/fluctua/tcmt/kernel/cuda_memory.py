"""What goes to the device, what stays there, and what comes back: each copy takes as long as a
short run.

Arrays travel together (`Bundle`), constants are written when they change, and what a graph decides
is sent once.
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
from fluctua.tcmt.kernel.layout import KernelPlan, once_for_a_graph

ALIGNMENT = 256
"""Bytes: of what the device reads at once, and of CUDA's own allocations."""


class _Place(NamedTuple):
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, host: np.ndarray) -> np.ndarray:
        """The array in a copy of the whole memory."""
        return host[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


class Bundle:
    """Arrays one after the other in one piece of the device's memory, which lives as long as this
    object.

    Args:
        cp: CuPy.
        arrays: shape and type of each, by name.

    `address(name)` is for a kernel that writes there, `get()` brings all of them to the host in one
    copy.
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
        return {name: place.view(self._mirror) for name, place in self._places.items()}

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
        return {name: place.view(host) for name, place in self._places.items()}

    def copy(self, name: str, target: Any) -> None:
        """Copy an array on to another place on the device, a pointer of CuPy; in the order
        of the stream.
        """
        place = self._places[name]
        target.copy_from_device_async(self.memory.data + place.offset, place.size)


class Constant:
    """A module's constant: where it is, and what was last written there."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.value = b""

    def differs(self, value: np.ndarray) -> bool:
        """Whether this is another value, so that it has to be written."""
        return self.value != value.tobytes()


@functools.lru_cache(maxsize=1024)
def constant(module: Any, name: str) -> Constant:
    """A constant of a module, by name."""
    return Constant(module.get_global(name))


@dataclass(frozen=True)
class Spread:
    """A layout of a graph, by the numbers that decide it."""

    threads: int
    per: int
    cluster: int
    layout: SiteLayout = field(compare=False)


class Indices(NamedTuple):
    """What is on the device of a graph: the fields of `Inputs` that are no numbers, and two
    lists of raw columns.
    """

    of_inputs: dict[str, int]
    first: int
    second: int
    memory: Bundle


@once_for_a_graph
def index_arrays(
    plan: KernelPlan, cp: Any, gpu: int, spread_: Spread, rates: bool, parts: int
) -> Indices:
    """Of the network on a GPU, the current one. rates, parts: how many raw columns there are."""
    layout = spread_.layout
    first, second = columns(plan, layout, rates, parts)
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


def columns(
    plan: KernelPlan, layout: SiteLayout, rates: bool, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """For every parameter the one or two raw columns that add up to it (−1: none), of so many
    parts. (parts·P,)
    """
    n = plan.sites
    degree = layout.degree
    site = np.arange(n)
    of_one = [site, n + site, 2 * n + layout.half[:, 0]]
    if rates:
        base = (2 + degree) * n
        of_one += [
            base + site,
            base + n + site,
            base + 2 * n + plan.drive_site,
            base + 3 * n + plan.port_site,
        ]
    a = np.concatenate(of_one)
    b = np.full_like(a, -1)
    b[2 * n : 2 * n + plan.bonds] = 2 * n + layout.half[:, 1]
    part = np.arange(parts)[:, None] * (2 + degree + (4 if rates else 0)) * n
    return (part + a).ravel().astype(np.int32), np.where(b < 0, -1, part + b).ravel().astype(
        np.int32
    )
