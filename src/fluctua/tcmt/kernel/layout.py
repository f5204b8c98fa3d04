"""Arrays that the kernels read: in their precision, times Δt, bonds in the kernels' order.

The fields of `KernelPlan` are those of the C++ struct `Plan` (`native/cpu/plan.hpp`), which reads
them by name and checks type and length of each; on import the two lists are compared. The device's
blocks of addresses are declared in `native/cuda/blocks.cuh` and filled by name: `AddressBlock`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fluctua.compiled.toolchain import read_common
from fluctua.tcmt.kernel.options import KernelJob, KernelOptions, KernelSpec
from fluctua.tcmt.native import _native

MAX_MODULATION_ERROR = 2.5e-7
"""Largest error of δκ/σ_κ in float32 runs: 5e-8 at σ_κ = 0.2, below the rounding of κ = 1."""
T = TypeVar("T")
NATIVE = Path(__file__).parent.parent / "native"


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """Arrays and numbers of a network for the kernels; native/cpu/plan.hpp documents each field."""

    sites: int
    bonds: int
    steps: int
    ports: int
    drives: int
    harmonics: int
    seed: int
    noise: bool
    antithetic: bool
    rates: bool
    heun: bool
    dt: float
    drive_rows: int
    incoming_rows: int
    reference: float
    modulation_steps: int
    modulation_scale: float
    lower_start: np.ndarray
    lower_site: np.ndarray
    lower_bond: np.ndarray
    upper_start: np.ndarray
    upper_site: np.ndarray
    bond_given: np.ndarray
    omega: np.ndarray
    chi: np.ndarray
    damping: np.ndarray
    kappa: np.ndarray
    kick: np.ndarray
    scale: np.ndarray
    start: np.ndarray
    drive_site: np.ndarray
    drive: np.ndarray
    port_site: np.ndarray
    gain: np.ndarray
    weight: np.ndarray
    incoming: np.ndarray
    bar: np.ndarray | None
    modulation: np.ndarray


if getattr(_native, "plan_fields", list)() != [
    field.name for field in dataclasses.fields(KernelPlan)
]:
    raise ImportError(
        "fluctua's compiled core does not match its Python files. Build it again: "
        "pip install --no-build-isolation --no-deps --editable . in a checkout, or install "
        "fluctua again."
    )


def make_plan(ensemble: KernelJob) -> KernelPlan:
    """Return the arrays of a job's network."""
    spec = ensemble.spec
    o = ensemble.options

    def cast(v):
        return np.ascontiguousarray(v, o.real)

    graph = list_neighbours(spec.sites, spec.bonds)
    noise = spec.noise if o.noise else np.zeros_like(spec.noise)
    pieces = 1
    table = np.zeros((1, 3, 0))
    if spec.waves:
        pieces, table = fit_modulation(spec, modulation_tolerance(o))
    assert spec.start is not None
    return KernelPlan(
        sites=spec.sites,
        bonds=len(spec.bonds),
        steps=spec.steps,
        ports=spec.port_sites.size,
        drives=spec.drive_sites.size,
        harmonics=spec.waves,
        seed=int(ensemble.seed),
        noise=bool(o.noise),
        antithetic=bool(o.antithetic),
        rates=ensemble.rates,
        heun=spec.integrator == "heun",
        dt=spec.dt,
        drive_rows=len(spec.drive),
        incoming_rows=len(spec.incoming),
        reference=0.0 if ensemble.table is None else float(ensemble.table[0]),
        modulation_steps=pieces,
        modulation_scale=spec.sigma_kappa * spec.dt,
        lower_start=graph.lower_start,
        lower_site=graph.lower_site,
        lower_bond=graph.lower_bond,
        upper_start=graph.upper_start,
        upper_site=graph.upper_site,
        bond_given=graph.order,
        omega=cast(spec.omega * spec.dt),
        chi=cast(spec.chi * spec.dt),
        damping=cast(spec.damping * spec.dt),
        kappa=cast(spec.kappa[graph.order] * spec.dt),
        kick=cast(noise**2),
        scale=cast(np.divide(np.sqrt(spec.dt), noise, out=np.zeros_like(noise), where=noise > 0)),
        start=to_pairs(spec.start, o.real),
        drive_site=spec.drive_sites,
        drive=to_pairs(spec.drive * spec.dt, o.real),
        port_site=spec.port_sites,
        gain=cast(spec.port_gain),
        weight=cast(spec.port_weight * spec.dt),
        incoming=to_pairs(spec.incoming, o.real),
        # n+1: the reward at n precedes the kick
        bar=None if ensemble.table is None else ensemble.table[1:],
        modulation=cast(table),
    )


def to_pairs(values: np.ndarray, real: np.dtype) -> np.ndarray:
    """Return complex numbers as pairs of real ones. (...) -> (..., 2)"""
    array = np.ascontiguousarray(values, complex)
    return array.view(float).reshape(*array.shape, 2).astype(real)


class NeighbourLists(NamedTuple):
    """Neighbours of each site with lower and with higher numbers, one list after the other.

    lower_start: start of each site's list of lower neighbours (N+1,).
    lower_site: lower neighbours (B,).
    lower_bond: their bonds (B,).
    upper_start: start of each site's list of upper neighbours (N+1,).
    upper_site: upper neighbours (B,); bonds are in this order.
    order: index of each bond among those given (B,).
    """

    lower_start: np.ndarray
    lower_site: np.ndarray
    lower_bond: np.ndarray
    upper_start: np.ndarray
    upper_site: np.ndarray
    order: np.ndarray


def list_neighbours(sites: int, bonds: np.ndarray) -> NeighbourLists:
    """Return the bonds by lower, then upper site, and from their upper site. Cached per graph."""
    return _list_neighbours(sites, np.ascontiguousarray(bonds, np.int32).tobytes())


@functools.lru_cache(maxsize=64)
def _list_neighbours(sites: int, pairs: bytes) -> NeighbourLists:
    bonds = np.frombuffer(pairs, np.int32).reshape(-1, 2)
    low, high = np.sort(bonds, axis=1).T if len(bonds) else (np.zeros(0, int), np.zeros(0, int))
    order = np.lexsort((high, low))
    low = low[order]
    high = high[order]
    by_upper_site = np.lexsort((low, high))

    def list_starts(of_sites):
        return np.concatenate([[0], np.cumsum(np.bincount(of_sites, minlength=sites))])

    arrays = (
        list_starts(high),
        low[by_upper_site],
        by_upper_site,
        list_starts(low),
        high,
        order,
    )
    graph = NeighbourLists(*(np.ascontiguousarray(a, np.int32) for a in arrays))
    for array in graph:
        array.flags.writeable = False  # shared by all callers
    return graph


def cache_per_graph(make: Callable[..., T]) -> Callable[..., T]:
    """Cache `make(plan, *how)` by the plan's sites, bonds, drives and ports, up to 64 results."""
    kept: dict[Any, T] = {}

    @functools.wraps(make)
    def once(plan: KernelPlan, *how: Any) -> T:
        parts = (
            plan.upper_start,
            plan.upper_site,
            plan.bond_given,
            plan.drive_site,
            plan.port_site,
        )
        key = plan.sites, *(part.tobytes() for part in parts), how
        value = kept.get(key)
        if value is None:
            if len(kept) >= 64:
                kept.clear()  # one operation: threads of several GPUs share the cache
            value = kept[key] = make(plan, *how)
        return value

    return once


def modulation_tolerance(options: KernelOptions) -> float:
    """Return the error of δκ/σ_κ that the precision allows."""
    return MAX_MODULATION_ERROR if options.dtype == "float32" else 0.0


def fit_modulation(spec: KernelSpec, tolerance: float) -> tuple[int, np.ndarray]:
    """Fit δκ by quadratics in time: (steps per piece, coefficients (pieces, 3, 2·harmonics)).

    The polynomial in τ ∈ [−1, 1] interpolates sin(kΩt) and cos(kΩt) at the three Chebyshev nodes of
    each piece of duration h. Its error is at most (ωh/2)³/(3!·2²) for an angular frequency ω = kΩ,
    so that of δκ/σ_κ is at most √N_dyn (N_dyn Ω h/2)³/24 (Cauchy–Schwarz with Σã² = 1). The longest
    h that keeps this below `tolerance` is used, up to 32 steps, and an even number, since noise
    comes in pairs of steps. Pieces of two steps have their nodes on the steps and no error: a
    tolerance of 0 gives those.

    Heun's step needs δκ at both of its ends. The nodes of a piece are then spread from its first
    step to the end of its last, τ ∈ [−1, 1] + 1/steps.
    """
    fastest = abs(spec.Omega) * spec.harmonics * spec.dt
    half = (24 * tolerance / np.sqrt(spec.harmonics)) ** (1 / 3)
    steps = 2 * int(np.clip(half / fastest if fastest else 16, 1, 16))
    pieces = -(-spec.times // steps)
    centre = (np.arange(pieces) * steps + (steps - 1) / 2) * spec.dt
    nodes = np.cos((2 * np.arange(3) + 1) * np.pi / 6) if steps > 2 else np.array([0.5, 0.0, -0.5])
    if spec.integrator == "heun":
        nodes = (nodes if steps > 2 else 2 * nodes) + 1 / steps
    k = np.arange(1, spec.harmonics + 1)
    angle = spec.Omega * k * (centre[:, None] + nodes * (steps * spec.dt / 2))[..., None]
    values = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(pieces, 3, -1)
    return steps, np.linalg.inv(np.vander(nodes, 3, increasing=True)) @ values


# ------------------------------------------------------------------------------------ on the device


@functools.cache
def read_sources(*names: str) -> str:
    """Return the text of the device's source files; `.hpp` are those of `compiled`."""
    return "\n".join(
        read_common(name) if name.endswith(".hpp") else (NATIVE / "cuda" / name).read_text("utf-8")
        for name in names
    )


class AddressBlock(NamedTuple):
    """A struct of addresses in the device's constant memory (`native/cuda/blocks.cuh`).

    name: of the struct.
    fields: names of its addresses, in order.
    """

    name: str
    fields: tuple[str, ...]

    @property
    def size(self) -> int:
        """Size in bytes; the device asserts the same of its struct."""
        return 8 * len(self.fields)

    def pack(self, **addresses: int) -> np.ndarray:
        """Return the addresses in order. Every field is given by name; 0 for no array."""
        if addresses.keys() != set(self.fields):
            wrong = sorted(addresses.keys() ^ set(self.fields))
            raise TypeError(
                f"struct {self.name} of the device has the fields {self.fields}; wrong or missing: "
                f"{wrong}."
            )
        return np.array([addresses[name] for name in self.fields], np.uint64)


@functools.cache
def read_blocks() -> dict[str, AddressBlock]:
    """Return the blocks that `native/cuda/blocks.cuh` declares, by name."""
    text = re.sub(r"//.*", "", read_sources("blocks.cuh"))
    declared = re.findall(
        r"struct (\w+) \{([^}]*)\};\s*static_assert\(sizeof\(\1\) == (\w+)_BYTES", text
    )
    return {
        name: AddressBlock(name, tuple(re.findall(r"\*\s*(\w+)\s*;", body)))
        for name, body, _ in declared
    }
