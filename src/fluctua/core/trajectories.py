"""Trajectories on a time grid, and what provides them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fluctua.core.arrays import Array, Params, PyTree


class Trajectories(NamedTuple):
    """E trajectories on one time grid, simulated or measured.

    t: (T+1,) increasing, not necessarily uniform.
    x: (E, T+1, M).
    context: pytree with leaves (E, ...), drawn or set once per trajectory, or None.
    events: what happened within each step, a pytree with leaves (E, T, ...), for processes whose
        score needs more than the states (`Jumps`); else None.
    group: whole numbers (E,), the device, the sample or the day of each trajectory, where the
        expected return is that of all devices there could be. Every group then counts the same, and
        errors are those between groups; else None.
    """

    t: Array
    x: Array
    context: PyTree = None
    events: PyTree = None
    group: Array | None = None


class Times(NamedTuple):
    """A time grid t (T+1,) and its steps dt (T,).

    The steps are formed before t is rounded to working precision.
    """

    t: Array
    dt: Array


class Substrate(Protocol):
    """A simulator or an instrument: sets θ and returns `count` trajectories."""

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories: ...
