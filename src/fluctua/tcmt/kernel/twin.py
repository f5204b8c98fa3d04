"""The twin correction on the fused kernels: the paper's estimator with far less variance, and no
other mean.

    G = Σ_n q_{n+1}·∂μ(X_n)Δt + Σ_n (Λ_{n+1} − λ̄_n)U_n
    Λ_{n+1} = λ̂_{n+1} − V_{n+1}(X_{n+1}) − Σ_{k>n} q_{k+1}·r_k,     V_k(x) = ν_k + q_k·(x − x̄_k)

x̄ is a twin's noise-free path, ν its remaining return and q the gradient of that (one reverse
sweep); r the residual that the score uses. q_{k+1}·r_k has mean zero given X_k, so a wrong twin
costs variance and no bias as long as μ and Q of the score are right. The first sum is `direct`, the
second `correction`.

A linear twin knows its own noise: how a kick spreads to the output (`responses`), and how much
power it adds there.

    h_s = (F†)^s e_port,     F = 1 − Δt(iω + iκ + Γ),     P_s = Σ_ports w·gain²Δt h_s† 4QΔt h_s

A kick d at step k leaves the output h_s†d at step k + s, so that the twin's return-to-go is
quadratic in d with ½d†S_k d, S_k = 2Σ_ports w·gain²Δt Σ_{s<T−k} h_s h_s†, of which a few directions
B carry almost all. Modulation and Kerr effect are left out: whatever stands in for S and for the
mean of Λ costs variance at worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.tcmt.kernel import cpu, cuda_twin
from fluctua.tcmt.kernel.cpu import TwinSums
from fluctua.tcmt.kernel.layout import modulation_pieces, tolerance
from fluctua.tcmt.kernel.options import (
    KernelJob,
    KernelOptions,
    KernelSpec,
    KernelTwinModel,
    require_euler,
)
from fluctua.tcmt.kernel.run import (
    Families,
    explain_overflow,
    families,
    reduce_returns,
    run,
    statistics,
)

TABLE_BYTES = 2**29
"""A path and adjoint that all trajectories share are tabulated at every step up to this size."""
SEGMENT = 32
"""Steps that a trajectory's own path and adjoint are made ahead, if nothing else decides: they stay
in the cache.
"""


@dataclass(frozen=True)
class KernelTwin:
    """The twin correction as the `baseline` of a task's fused estimator.

    Args:
        theta: the twin's parameters as a function of θ; None takes θ itself.
        rank, knows_modulation, table, segment: those of `run_twin`.

    >>> twin = KernelTwin(theta=lambda th: {**th, "kappa": 0.95 * th["kappa"]})
    >>> task.estimator("cpu", baseline=twin)

    """

    theta: Callable[[Params], Params] | None = None
    rank: int = 0
    knows_modulation: bool = True
    table: np.ndarray | None = None
    segment: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(
                f"`rank` is a number of directions, 0 for no quadratic term; got {self.rank}."
            )
        if self.segment is not None and self.segment < 1:
            raise ValueError(f"`segment` is a number of steps, at least 1; got {self.segment}.")


class TwinResult(NamedTuple):
    """An estimate of ∇J by the twin correction, and its two parts.

    The first fields are those of `kernel.KernelResult`; gradient, stderr and second_moment are of
    direct + correction. direct, correction and their errors: means over trajectories.
    direct_samples, correction_samples: of each trajectory (E, ·), on request. mean_lambda: the mean
    of Λ at each time (T+1,), the `table` of a next run.
    table: the λ̄ that was used.
    """

    returns: np.ndarray
    value: float
    value_stderr: float
    gradient: Families
    stderr: Families
    second_moment: Families
    mean_return_to_go: np.ndarray
    samples: Families | None
    trajectories: None
    direct: Families
    direct_stderr: Families
    correction: Families
    correction_stderr: Families
    direct_samples: Families | None
    correction_samples: Families | None
    mean_lambda: np.ndarray
    table: np.ndarray


def run_twin(
    spec: KernelSpec,
    seed: int,
    count: int,
    *,
    twin: KernelSpec | None = None,
    rank: int = 0,
    knows_modulation: bool = True,
    table: np.ndarray | None = None,
    segment: int | None = None,
    first_trajectory: int = 0,
    **options: Any,
) -> TwinResult:
    """Run some trajectories and estimate ∇J with the twin correction.

    Args:
        spec: the network.
        seed: of the noise, 64 bits.
        count: E; trajectories first_trajectory … first_trajectory + count − 1.
        twin: its own ω, κ, χ, Γ, drive, gain, weight and start on the same graph; None is the
            network itself.
        rank: of the quadratic term of V, for a twin without modulation; 0 is none. A twin with one
            starts afresh from X every `segment` steps, and what is left of Λ is the noise of a
            segment instead of the run's.
        knows_modulation: each trajectory's twin has that trajectory's δκ; False leaves it without
            any.
        table: λ̄ (T+1,), such as `mean_lambda` of an earlier run; the score of step n meets
            table[n+1]. None computes that of a linear twin.
        segment: steps that a path is made ahead; None chooses.
        first_trajectory: where to begin.
        options: those of `KernelOptions`, but for `noise`, `scores` and `record_every`.

    Returns: a `TwinResult`.

    >>> run_twin(spec, seed=0, count=64).correction.omega.shape
    (6,)

    """
    chosen = KernelTwin(rank=rank, knows_modulation=knows_modulation, segment=segment)
    if options.get("backend") == "cuda":
        require_euler(spec.integrator, "the twin on the GPU")
    ensemble = KernelJob(
        spec, seed, count, twin_options(**options), first_trajectory, table, copies_of_samples=3
    )
    sigma = spec.sigma_kappa if knows_modulation else 0.0
    model = spec
    if twin is not None or sigma != spec.sigma_kappa:
        model = (spec if twin is None else _same_graph(spec, twin)).replace(
            noise=spec.noise, sigma_kappa=sigma, harmonics=spec.harmonics, Omega=spec.Omega
        )
    _check_rank(chosen, model)
    if ensemble.options.backend == "cuda":
        model = cuda_twin.checked(ensemble, model)
    ensemble, of_twin = _prepared(ensemble, model, chosen)
    run = cpu.run_twin if ensemble.options.backend == "cpu" else cuda_twin.run
    return result(ensemble, run(ensemble, of_twin))


def expected_lambda(twin: KernelSpec) -> np.ndarray:
    """E[Λ_n] of a twin that is exact, to the extent that it is linear: the `table` if none is
    given. (T+1,)
    """
    return mean_lambda(*arriving(responses(twin), twin.noise), twin.steps)


def twin_options(**options: Any) -> KernelOptions:
    """KernelOptions of a run with the twin correction, which has noise, scores and no recording."""
    fixed = {"noise": True, "scores": True, "record_every": 0}
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise ValueError(
                f'`{name}` is no option of the twin correction; run with baseline="none" for that.'
            )
    return KernelOptions(**options)


def _same_graph(spec: KernelSpec, twin: KernelSpec) -> KernelSpec:
    for name in ("bonds", "drive_sites", "port_sites", "dt", "steps", "integrator"):
        if not np.array_equal(getattr(spec, name), getattr(twin, name)):
            raise ValueError(
                "a twin has the graph, drives, ports and steps of the network itself; its "
                f"`{name}` differs."
            )
    return twin


def _check_rank(twin: KernelTwin, model: KernelSpec) -> None:
    if twin.rank > model.sites:
        raise ValueError(
            f"`rank` is a number of directions, at most {model.sites}; got {twin.rank}."
        )
    if twin.rank and model.waves:
        raise ValueError(
            "the quadratic term is of a twin without modulation, and this one follows each "
            "trajectory's: use rank=0, "
            "or knows_modulation=False."
        )


def _prepared(
    e: KernelJob, twin: KernelSpec, chosen: KernelTwin
) -> tuple[KernelJob, KernelTwinModel]:
    """Segments, and what is computed of the twin before any trajectory: λ̄ and the quadratic
    term.
    """
    steps = e.spec.steps
    rank = chosen.rank
    o = e.options
    piece = modulation_pieces(twin, tolerance(o))[0] if twin.waves else 1
    row = 4 * e.spec.sites * o.real.itemsize
    full = (
        not twin.waves and not rank and chosen.segment is None and (steps + 1) * row <= TABLE_BYTES
    )
    target = chosen.segment or (max(SEGMENT, int(np.sqrt(steps))) if full else SEGMENT)
    segment = min(piece * max(1, round(target / piece)), steps + steps % piece)
    basis = curvature = None
    if rank or e.table is None:
        try:
            response = responses(twin, dtype=o.dtype, backend=o.backend)
        except FloatingPointError:
            raise _twin_overflow() from None
        if rank:
            ends = np.minimum(np.arange(segment, steps + segment, segment), steps)
            basis, curvature = quadratic(response, rank, ends)
        if e.table is None:
            e = e.replace(table=mean_lambda(*arriving(response, e.spec.noise, basis), segment))
    return e, KernelTwinModel(twin, segment, full, rank, basis, curvature)


def result(e: KernelJob, sums: TwinSums) -> TwinResult:
    """The kernels' sums as means, errors and families; raises if a trajectory or a twin
    overflowed.
    """
    trajectory, of_twin = (int(v) for v in sums.overflow)
    explain_overflow(e.replace(table=None), trajectory, -1)
    if of_twin >= 0:
        raise _twin_overflow()
    direct, _, direct_stderr = (families(e, v) for v in statistics(e, sums.moments[0]))
    correction, _, correction_stderr = (families(e, v) for v in statistics(e, sums.moments[1]))
    gradient, second, stderr = (families(e, v) for v in statistics(e, sums.moments[2]))
    value, value_stderr = reduce_returns(e, sums.returns)
    each = sums.direct, sums.correction
    samples = None if each[0] is None or each[1] is None else families(e, each[0] + each[1])
    assert e.table is not None
    return TwinResult(
        returns=sums.returns,
        value=value,
        value_stderr=value_stderr,
        gradient=gradient,
        stderr=stderr,
        second_moment=second,
        mean_return_to_go=cpu.mean_to_go(sums.reward_sum, e.count)[: e.spec.steps + 1],
        samples=samples,
        trajectories=None,
        direct=direct,
        direct_stderr=direct_stderr,
        correction=correction,
        correction_stderr=correction_stderr,
        direct_samples=None if each[0] is None else families(e, each[0]),
        correction_samples=None if each[1] is None else families(e, each[1]),
        mean_lambda=(sums.gained.sum() - sums.prefix_sum) / e.count,
        table=e.table,
    )


def _twin_overflow() -> FloatingPointError:
    return FloatingPointError(
        "the twin's noise-free path, or its adjoint, is no longer finite. Lower `dt`, or look for "
        "gain in the twin's "
        "parameters: negative damping, or Kerr shifts and couplings too large for this step."
    )


# ---------------------------------------------------------------------------------------- curvature


RECORDS = 2048
"""Times at which responses are looked at, evenly spread over the horizon."""
DENSE = 256
"""Resonators up to which the leading directions are found exactly."""


class Responses(NamedTuple):
    """h (M, R, N) complex at every `every`-th step s < T, and w·gain²Δt of each port (M,)."""

    h: np.ndarray
    weight: np.ndarray
    every: int
    steps: int
    dt: float


class Quadratic(NamedTuple):
    """S_k ≈ B C_k B†. basis: B (N, r), orthonormal. curvature: C at the end of each segment
    (segments, r, r).
    """

    basis: np.ndarray
    curvature: np.ndarray


def responses(twin: KernelSpec, *, dtype: str = "float32", backend: str = "cpu") -> Responses:
    """h of every port, by noise-free runs of the network with its frequencies reversed: F† = 1
    + Δt(iω + iκ − Γ).
    """
    every = -(-twin.steps // RECORDS)
    kept = np.flatnonzero(twin.port_weight * twin.port_gain)
    h = np.zeros((kept.size, -(-twin.steps // every), twin.sites), complex)
    for row, port in enumerate(kept):
        reversed_ = twin.replace(
            omega=-twin.omega,
            kappa=-twin.kappa,
            chi=np.zeros_like(twin.chi),
            drive=np.zeros((1, twin.drive_sites.size), complex),
            sigma_kappa=0.0,
            start=(np.arange(twin.sites) == twin.port_sites[port]).astype(complex),
        )
        done = run(reversed_, 0, 1, noise=False, record_every=every, dtype=dtype, backend=backend)
        assert done.trajectories is not None
        h[row] = done.trajectories[0, : h.shape[1]]
    return Responses(
        h, (twin.port_weight * twin.port_gain**2)[kept] * twin.dt, every, twin.steps, twin.dt
    )


def quadratic(response: Responses, rank: int, ends: np.ndarray) -> Quadratic:
    """B: the directions of the largest Σ_s h_s h_s†. C at the steps `ends`, ascending."""
    h, weight, every, steps, dt = response
    basis = _leading((h * np.sqrt(np.abs(weight))[:, None, None]).reshape(-1, h.shape[-1]).T, rank)
    y = h @ basis.conj()  # B†h (M, R, r)
    projected = np.zeros((len(ends), rank, rank), complex)
    total = np.zeros((rank, rank), complex)
    reached = 0

    def summed(i: int, j: int, share: int) -> np.ndarray:
        part = y[:, i:j].reshape(-1, rank)
        return 2 * share * (part.T * np.repeat(weight, j - i)) @ part.conj()

    for place in range(len(ends) - 1, -1, -1):
        whole, part = divmod(steps - int(ends[place]), every)
        total = total + summed(reached, whole, every)
        reached = whole
        projected[place] = total + (summed(whole, whole + 1, part) if part else 0.0)
    return Quadratic(basis, projected)


def _leading(columns: np.ndarray, rank: int) -> np.ndarray:
    """The leading left singular vectors of a matrix (N, R), nearly so if N is large: (N, rank)."""
    n = len(columns)
    if n <= DENSE:
        return np.linalg.eigh(columns @ columns.conj().T)[1][:, : -rank - 1 : -1]
    width = min(n, rank + 8)  # a few more than are wanted, and two rounds of subspace iteration
    directions = np.random.default_rng(0).standard_normal((n, width)) + 0j
    for _ in range(3):
        directions = np.linalg.qr(columns @ (columns.conj().T @ directions))[0]
    inside = directions.conj().T @ columns
    return directions @ np.linalg.eigh(inside @ inside.conj().T)[1][:, : -rank - 1 : -1]


def arriving(
    response: Responses, noise: np.ndarray, basis: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """P_s at every step, (T,) each: all of it, and what goes through the directions of `basis`."""
    h, weight, every, steps, dt = response

    def power(v):
        return np.einsum("m,mrn,n->r", weight, np.abs(v) ** 2, 2 * noise**2 * dt, optimize=True)

    at = np.arange(h.shape[1]) * every

    def on_grid(p):
        return np.interp(np.arange(steps), at, p)

    caught = np.zeros(steps) if basis is None else on_grid(power((h @ basis.conj()) @ basis.T))
    return on_grid(power(h)), caught


def mean_lambda(every: np.ndarray, caught: np.ndarray, segment: int) -> np.ndarray:
    """E[Λ_n] of an exact linear twin, (T+1,): Σ_{k≥n} Σ_{s<k} P_s without a quadratic term.

    With one, a path that starts from X at step n_j leaves to Λ_n the noise since n_j and that which
    is to come: the same double sum over steps k − n_j ≥ n − n_j. every, caught: P_s, and what of it
    the quadratic term sees.
    """
    steps = len(every)

    def twice(p):
        return np.concatenate([[0.0, 0.0], np.cumsum(np.cumsum(p))])  # Σ_{k<j} Σ_{s<k} P_s

    n = np.arange(steps + 1)
    since = np.maximum(n - 1, 0) // segment * segment
    rest = twice(every - caught)
    seen = twice(caught)
    return rest[steps] - rest[n] + seen[steps - since] - seen[n - since]
