"""Records of what a fused kernel runs: a network, options, an ensemble. Checked when made.

    ψ' = ψ + Δt[−i(ω + χ|ψ|²)ψ − iΣ_m(κ + δκ)ψ_m − Γψ + f] + a√Δt z,          a = √(2Q)
    g = Σ_p w_p |−s⁺_p + √(2γ_e,p) ψ_p|²

N sites, B bonds, T steps, E trajectories. In the frame of the drive `omega` is the detuning and
`drive` is constant; in the lab frame `drive` is a table of T rows. With Heun's step drift and
rewards are evaluated at T + 1 times, and the rewards are summed by the trapezoid rule.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fluctua.tcmt.native import _native

LANES = 16
"""Trajectories per block of the CPU kernel."""
GROUPS = 128
"""Partial sums of the CPU kernel, each of all parameters and steps."""
BACKENDS = ("cpu", "cuda")
PRECISIONS = ("float32", "float64")
INTEGRATORS = ("euler", "heun")
"""Integrators of the kernels."""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A network, its drive and its reward, as contiguous float64, complex128 and int32 arrays.

    Modulation: δκ_b = σ_κ Σ_k ã_k sin(kΩt + φ_k), k = 1 … harmonics.

    Args:
        omega, chi, damping, noise: ω, χ, Γ and a of every site, (N,).
        kappa: of every bond, (B,).
        bonds: site indices (B, 2), each pair once.
        dt, steps: Δt and T.
        drive_sites: (D,).
        drive: f = √(2γ_e) s⁺ on those sites, complex (D,) or (T, D); (T+1, D) with Heun's step.
        port_sites, port_gain, port_weight: site, √(2γ_e) and w of every port, (M,).
        incoming: s⁺ on the ports, complex (M,) or (T, M); (T+1, M) with Heun's step.
        sigma_kappa, Omega, harmonics: of the modulation; σ_κ = 0 is none.
        start: ψ at t = 0, complex (N,); None is zero.
        integrator: "euler", or "heun": ψ + Δt/2[μ(ψ, t) + μ(ψ + Δtμ, t + Δt)] and the noise.

    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    bonds: np.ndarray
    damping: np.ndarray
    noise: np.ndarray
    dt: float
    steps: int
    drive_sites: np.ndarray
    drive: np.ndarray
    port_sites: np.ndarray
    port_gain: np.ndarray
    port_weight: np.ndarray
    incoming: np.ndarray
    sigma_kappa: float = 0.0
    Omega: float = 0.1
    harmonics: int = 10
    start: np.ndarray | None = None
    integrator: str = "euler"

    def __post_init__(self) -> None:
        check_integrator(self.integrator)
        omega = _check_array("omega", self.omega, (-1,))
        n = omega.size
        if n == 0:
            raise ValueError("`omega` is empty: a network needs at least one resonator.")
        steps = int(self.steps)
        dt = float(self.dt)
        if steps < 1 or steps >= 2**31 or not (dt > 0 and np.isfinite(dt)):
            raise ValueError(
                f"`steps` must be 1 to 2³¹ − 1 and `dt` positive; got {self.steps} and {self.dt}."
            )
        bonds = _check_bonds(self.bonds, n)
        noise = _check_array("noise", self.noise, (n,))
        if (noise < 0).any():
            raise ValueError("`noise` is an amplitude, √(2Q) per site: it must not be negative.")
        drive_sites = _check_indices("drive_sites", self.drive_sites, n)
        port_sites = _check_indices("port_sites", self.port_sites, n)
        if self.sigma_kappa and int(self.harmonics) < 1:
            raise ValueError(f"modulation needs at least one harmonic; got {self.harmonics}.")
        start = np.zeros(n) if self.start is None else self.start
        self._set(
            omega=omega,
            kappa=_check_array("kappa", self.kappa, (len(bonds),)),
            chi=_check_array("chi", self.chi, (n,)),
            bonds=bonds,
            damping=_check_array("damping", self.damping, (n,)),
            noise=noise,
            dt=dt,
            steps=steps,
            drive_sites=drive_sites,
            drive=_check_table(
                "drive", self.drive, steps + (self.integrator == "heun"), drive_sites.size
            ),
            port_sites=port_sites,
            port_gain=_check_array("port_gain", self.port_gain, (port_sites.size,)),
            port_weight=_check_array("port_weight", self.port_weight, (port_sites.size,)),
            incoming=_check_table(
                "incoming", self.incoming, steps + (self.integrator == "heun"), port_sites.size
            ),
            sigma_kappa=_check_number("sigma_kappa", self.sigma_kappa),
            Omega=_check_number("Omega", self.Omega),
            harmonics=int(self.harmonics),
            start=_check_array("start", start, (n,), complex),
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def sites(self) -> int:
        """N."""
        return len(self.omega)

    @property
    def times(self) -> int:
        """Times at which drift and reward are evaluated: T, or T + 1 with Heun's step."""
        return self.steps + (self.integrator == "heun")

    @property
    def waves(self) -> int:
        """Harmonics of the modulation; 0 without modulation."""
        return self.harmonics if self.sigma_kappa else 0

    def replace(self, **values: Any) -> KernelSpec:
        """Return a copy with other values."""
        if not values.keys() <= {"omega", "kappa", "chi"}:
            return dataclasses.replace(self, **values)
        spec = copy.copy(self)  # nothing else depends on these, so nothing else is checked again
        spec._set(
            **{
                name: _check_array(name, value, getattr(self, name).shape)
                for name, value in values.items()
            }
        )
        return spec


@dataclass(frozen=True)
class Binned:
    """The paper's baseline: leave-one-out optimal within quantile bins of |ψ|².

    See `fluctua.core.baselines.binned`.

    Args:
        bins: K, 1 to 256.
        every: steps between two sortings into bins; 1 is the paper's. Older bins are as independent
            of the kick as fresh ones, so the estimate stays unbiased.
        group: largest group with bins of its own; larger ensembles are split. More than 200
            trajectories per bin do not improve the baseline, and the cost stays linear.
            `group` ≥ count is the paper's.

    """

    bins: int = 20
    every: int = 1
    group: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= 256 or self.every < 1 or self.group < 2:
            raise ValueError(
                "`Binned` needs 1 to 256 bins, at least 1 step between sortings and at least 2 "
                f"trajectories per group; got {self}."
            )


@dataclass(frozen=True)
class KernelOptions:
    """Options of running trajectories, for any network.

    Args:
        backend: "cpu" or "cuda".
        dtype: "float32" or "float64".
        threads: of the CPU; None for one per core.
        antithetic: trajectories 2j and 2j+1 have opposite noise.
        noise: False for noise-free trajectories, which have no scores.
        scores: False to simulate only.
        rates: scores of damping, diffusion and drive too.
        record_every: steps between two recorded states; 0 records none.
        samples: keep the gradient of each trajectory.
        engine: one of `_native.engines()`, for tests and benchmarks; "" for the fastest.

    """

    backend: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    antithetic: bool = False
    noise: bool = True
    scores: bool = True
    rates: bool = False
    record_every: int = 0
    samples: bool = False
    engine: str = ""

    def __post_init__(self) -> None:
        for name, words in (("backend", BACKENDS), ("dtype", PRECISIONS)):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"`{name}` must be {words[0]!r} or {words[1]!r}; got {getattr(self, name)!r}."
                )
        for name in ("antithetic", "noise", "scores", "rates", "samples"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise TypeError(f"`{name}` must be True or False; got {getattr(self, name)!r}.")
        if self.threads is not None and not (
            _is_integer(self.threads) and 1 <= self.threads <= 4096
        ):
            raise ValueError(
                f"`threads` must be a whole number from 1 to 4096, or None; got {self.threads!r}."
            )
        if not (_is_integer(self.record_every) and self.record_every >= 0):
            raise ValueError(
                f"`record_every` must be a number of steps, or 0; got {self.record_every!r}."
            )
        if self.engine and self.engine not in _native.engines():
            raise ValueError(
                f"`engine` must be one of {', '.join(_native.engines())} on this processor; got "
                f"{self.engine!r}."
            )

    @property
    def real(self) -> np.dtype:
        """The precision as a NumPy type."""
        return np.dtype(self.dtype)


@dataclass(frozen=True, eq=False)
class KernelJob:
    """Trajectories first … first + count − 1 of a network: the complete input of a backend.

    Args:
        spec: the network.
        seed: of the noise, 64 bits.
        count: E.
        options: how to run.
        first: number of the first trajectory.
        table: λ̄ (T+1,), table[n+1] for the score of step n; or None.
        binned: the binned baseline, in place of `table`.
        copies_of_samples: number of arrays (E, P) that `samples` keeps.

    """

    spec: KernelSpec
    seed: int
    count: int
    options: KernelOptions = field(default_factory=KernelOptions)
    first: int = 0
    table: np.ndarray | None = None
    binned: Binned | None = None
    copies_of_samples: int = 1

    def __post_init__(self) -> None:
        first = self.first
        count = self.count
        o = self.options
        if count < 1 or first < 0 or first + count > 2**32:
            raise ValueError(
                f"trajectories {first} … {first + count - 1} must lie in 0 … 2³² − 1, at least one."
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"`seed` must fit 64 bits; got {self.seed}.")
        if o.antithetic and (count % 2 or first % 2):
            raise ValueError(
                "antithetic trajectories come in pairs (2j, 2j+1): `count` and the number of the "
                "first must be even."
            )
        if self.scores and not (self.spec.noise > 0).all():
            site = int(np.argmin(self.spec.noise > 0))
            raise ValueError(
                f"the diffusion is singular: site {site} has no noise, and the score divides by "
                "it. Give it noise, or pass scores=False to simulate only."
            )
        if self.binned is not None:
            self._check_binned()
        if self.table is not None:
            table = np.ascontiguousarray(self.table, float)
            if table.shape != (self.spec.steps + 1,):
                raise ValueError(
                    "a time-only `baseline` must be the mean return-to-go at each time, "
                    f"({self.spec.steps + 1},); got {table.shape}."
                )
            if not np.isfinite(table).all():
                raise ValueError(
                    f"the time-only `baseline` is not finite at time {_find_not_finite(table)[0]}."
                )
            object.__setattr__(self, "table", table)
        self._check_memory()

    def _check_binned(self) -> None:
        require_euler(self.spec.integrator, "the kernels' binned baseline")
        if self.count < 2:
            raise ValueError("a leave-one-out baseline needs at least 2 trajectories.")
        if self.options.antithetic:
            raise ValueError(
                "antithetic pairs need a time-only baseline or none: a leave-one-out baseline is "
                "not independent of the trajectory with opposite noise."
            )
        if self.options.rates:
            raise ValueError(
                "the kernels' binned baseline covers ω, χ and κ. Rates need a time-only baseline, "
                "or none."
            )

    def _check_memory(self) -> None:
        item = self.options.real.itemsize
        n = self.spec.sites
        kept = self.copies_of_samples * self.width * item if self.samples else 0
        bytes_each = 8 * (2 + self.copies_of_samples) + kept + 2 * n * item * self.records
        sums = (
            8 * GROUPS * (9 * self.width + 2 * self.spec.times)
            if self.options.backend == "cpu"
            else 0
        )
        needed = self.count * bytes_each + sums
        available = measure_memory()
        if needed > available:
            raise ValueError(
                f"{self.count:,} trajectories of {self.spec.steps:,} steps need "
                f"{needed / 2**30:,.0f} GiB of memory, and this machine has "
                f"{available / 2**30:,.0f} GiB. Run fewer at a time"
                + (", or record less often." if self.records else ".")
            )

    @property
    def scores(self) -> bool:
        """Whether there are scores; there are none without noise."""
        return bool(self.options.scores and self.options.noise)

    @property
    def rates(self) -> bool:
        """Whether there are scores of damping, diffusion and drive."""
        return bool(self.scores and self.options.rates)

    @property
    def samples(self) -> bool:
        """Whether the gradient of each trajectory is kept."""
        return bool(self.scores and self.options.samples)

    @property
    def width(self) -> int:
        """P, the number of columns of the kernels' gradients."""
        spec = self.spec
        rates = 2 * spec.sites + spec.drive_sites.size + spec.port_sites.size if self.rates else 0
        return 2 * spec.sites + len(spec.bonds) + rates if self.scores else 0

    @property
    def records(self) -> int:
        """Number of recorded states per trajectory."""
        return self.spec.steps // self.options.record_every + 1 if self.options.record_every else 0

    def replace(self, **values: Any) -> KernelJob:
        """Return a copy with other values; fields of `options` are given by name too."""
        own = {f.name for f in dataclasses.fields(self)}
        changed = {name: values.pop(name) for name in list(values) if name not in own}
        if changed:
            values["options"] = dataclasses.replace(values.get("options", self.options), **changed)
        return dataclasses.replace(self, **values)


@dataclass(frozen=True, eq=False)
class KernelTwinModel:
    """The twin of an ensemble, ready for a backend.

    Args:
        spec: its network, with the graph and steps of the ensemble's.
        segment: steps for which path and adjoint are computed ahead.
        full: whether all trajectories share one path, which is tabulated at every step.
        rank: of the quadratic term ½d†BC_kB†d; 0 for none.
        basis, curvature: B (N, rank) and C at the end of each segment (segments, rank, rank),
            complex.

    """

    spec: KernelSpec
    segment: int
    full: bool
    rank: int = 0
    basis: np.ndarray | None = None
    curvature: np.ndarray | None = None


def check_integrator(integrator: str) -> None:
    """Raise for an integrator that the kernels do not have."""
    if integrator not in INTEGRATORS:
        raise ValueError(
            f'the fused kernels have "euler" and "heun"; got integrator={integrator!r}. '
            'Use backend="jax".'
        )


def require_euler(integrator: str, what: str) -> None:
    """Raise for another integrator than "euler". what: the kernel that needs it."""
    if integrator != "euler":
        raise ValueError(
            f'{what} has no integrator="{integrator}". The kernels have it without a baseline, '
            'with a time-only one ("time", "carried") and with a twin; backend="jax" has it with '
            "every baseline."
        )


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_memory() -> int:
    """Return the memory of this machine in bytes; 2⁶² if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**62


# ------------------------------------------------------------------------------------- the boundary


def _check_bonds(pairs: np.ndarray, sites: int) -> np.ndarray:
    bonds = _check_indices("bonds", np.asarray(pairs).reshape(-1, 2), sites)
    _check_pairs(bonds.tobytes())
    return bonds


@functools.lru_cache(maxsize=64)
def _check_pairs(data: bytes) -> None:
    """Raise for a loop or a repeated bond. Cached per graph: it is the slowest of all checks."""
    bonds = np.frombuffer(data, np.int32).reshape(-1, 2)
    if bonds.size and (bonds[:, 0] == bonds[:, 1]).any():
        raise ValueError(
            f"bond {int(np.argmax(bonds[:, 0] == bonds[:, 1]))} connects a site with itself."
        )
    pairs = np.sort(bonds, axis=1)
    if len(np.unique(pairs, axis=0)) != len(pairs):
        raise ValueError(
            "`bonds` has a pair of sites twice. Couplings are symmetric: give each pair once."
        )


def _check_array(
    name: str, value: np.ndarray, shape: tuple[int, ...], dtype: type = float
) -> np.ndarray:
    array: np.ndarray = np.ascontiguousarray(value, dtype)
    if array.ndim != len(shape) or any(
        want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"`{name}` must have shape {shape}; got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(
            f"`{name}` has a value that is not finite, first at index {_find_not_finite(array)}."
        )
    return array


def _find_not_finite(array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])


def _check_table(name: str, value: np.ndarray, times: int, width: int) -> np.ndarray:
    """Return (width,) or (times, width) as (1 or times, width)."""
    array = np.asarray(value, complex)
    if array.ndim == 1:
        array = array[None]
    if array.shape not in ((1, width), (times, width)):
        raise ValueError(
            f"`{name}` must have shape ({width},) or ({times}, {width}); got {np.shape(value)}."
        )
    return _check_array(name, array, array.shape, complex)


def _check_indices(name: str, value: np.ndarray, sites: int) -> np.ndarray:
    array = np.ascontiguousarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must hold site indices (integers); got {array.dtype}.")
    if array.size and (array.min() < 0 or array.max() >= sites):
        raise ValueError(
            f"`{name}` must hold site indices from 0 to {sites - 1}; got {array.min()} to "
            f"{array.max()}."
        )
    return np.ascontiguousarray(array, np.int32)


def _check_number(name: str, value: float) -> float:
    if not np.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number; got {value!r}.")
    return float(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
