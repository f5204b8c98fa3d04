"""Twin correction on the fused kernels: the mean of the paper's estimator, with less variance.

    G = Σ_n q_{n+1}·∂μ(X_n)Δt + Σ_n (Λ_{n+1} − λ̄_n)U_n
    Λ_{n+1} = λ̂_{n+1} − V_{n+1}(X_{n+1}) − Σ_{k>n} q_{k+1}·r_k,     V_k(x) = ν_k + q_k·(x − x̄_k)

x̄ is a twin's noise-free path, ν its remaining return and q the gradient of that (one reverse
sweep); r the residual that the score uses. q_{k+1}·r_k has mean zero given X_k, so a wrong twin
costs variance and no bias as long as μ and Q of the score are right. The first sum is `direct`, the
second `correction`.

A linear twin predicts its own noise: how a kick spreads to the output (`compute_responses`), and
how much power it adds there.

    h_s = (F†)^s e_port,     F = 1 − Δt(iω + iκ + Γ),     P_s = Σ_ports w·gain²Δt h_s† 4QΔt h_s

A kick d at step k leaves the output h_s†d at step k + s, so that the twin's return-to-go is
quadratic in d with ½d†S_k d, S_k = 2Σ_ports w·gain²Δt Σ_{s<T−k} h_s h_s†, of which a few directions
B carry almost all. Modulation and Kerr effect are ignored: errors of S and of the mean of Λ only
cost variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.tcmt.kernel import cpu
from fluctua.tcmt.kernel.cpu import TwinSums
from fluctua.tcmt.kernel.layout import fit_modulation, modulation_tolerance
from fluctua.tcmt.kernel.options import (
    KernelJob,
    KernelOptions,
    KernelSpec,
    KernelTwinModel,
)
from fluctua.tcmt.kernel.run import (
    Families,
    compute_statistics,
    explain_overflow,
    reduce_returns,
    run,
    split_families,
)

TABLE_BYTES = 2**29
"""Largest table of a path and adjoint that all trajectories share, at every step."""
SEGMENT = 32
"""Steps for which a trajectory's own path and adjoint are computed ahead, to stay in the cache."""


@dataclass(frozen=True)
class KernelTwin:
    """The twin correction as the `baseline` of a task's fused estimator.

    Args:
        theta: the twin's parameters as a function of θ; None for θ itself.
        rank, knows_modulation, table, segment: those of `run_twin`.

    >>> twin = tcmt.KernelTwin(theta=lambda theta: {**theta, "kappa": 0.95 * theta["kappa"]})
    >>> task.estimator("cpu", baseline=twin)(key, theta, 64).count
    64
    """

    theta: Callable[[Params], Params] | None = None
    rank: int = 0
    knows_modulation: bool = True
    table: np.ndarray | None = None
    segment: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(
                f"`rank` must be a number of directions, 0 for no quadratic term; got {self.rank}."
            )
        if self.segment is not None and self.segment < 1:
            raise ValueError(f"`segment` must be at least 1 step; got {self.segment}.")


class TwinResult(NamedTuple):
    """An estimate of ∇J by the twin correction, and its two parts.

    The first fields are those of `run.KernelResult`, of direct + correction.

    direct: mean of the direct part over trajectories.
    direct_stderr: its standard errors.
    correction: mean of the correction over trajectories.
    correction_stderr: its standard errors.
    direct_samples: direct part of each trajectory (E, ·), on request.
    correction_samples: correction of each trajectory (E, ·), on request.
    mean_lambda: mean of Λ at each time (T+1,), the `table` of a next run.
    table: λ̄ of this run.
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
    """Run trajectories and estimate ∇J with the twin correction.

    Args:
        spec: the network.
        seed: of the noise, 64 bits.
        count: E; trajectories first_trajectory … first_trajectory + count − 1.
        twin: its own ω, κ, χ, Γ, drive, gain, weight and start on the same graph; None for the
            network itself.
        rank: of the quadratic term of V, for a twin without modulation; 0 for none. A twin with one
            restarts from X every `segment` steps, so that Λ has the noise of a segment instead of
            that of the run.
        knows_modulation: each trajectory's twin has that trajectory's δκ; False for a twin without
            modulation.
        table: λ̄ (T+1,), such as `mean_lambda` of an earlier run; table[n+1] for the score of
            step n. None computes that of a linear twin.
        segment: steps for which a path is computed ahead; None chooses.
        first_trajectory: number of the first trajectory.
        options: those of `KernelOptions`, except `noise`, `scores` and `record_every`.

    Returns: a `TwinResult`.

    >>> run_twin(spec, seed=0, count=64).correction.omega.shape
    (6,)

    """
    settings = KernelTwin(rank=rank, knows_modulation=knows_modulation, segment=segment)
    ensemble = KernelJob(
        spec,
        seed,
        count,
        make_twin_options(**options),
        first_trajectory,
        table,
        copies_of_samples=3,
    )
    sigma = spec.sigma_kappa if knows_modulation else 0.0
    model = spec
    if twin is not None or sigma != spec.sigma_kappa:
        model = (spec if twin is None else _check_graph(spec, twin)).replace(
            noise=spec.noise, sigma_kappa=sigma, harmonics=spec.harmonics, Omega=spec.Omega
        )
    _check_rank(settings, model)
    if ensemble.options.backend == "cpu":
        ensemble, twin_model = _prepare(ensemble, model, settings)
        return make_result(ensemble, cpu.run_twin(ensemble, twin_model))
    from fluctua.tcmt.kernel import cuda_twin

    model = cuda_twin.match_tables(ensemble, model)
    ensemble, twin_model = _prepare(ensemble, model, settings)
    return make_result(ensemble, cuda_twin.run(ensemble, twin_model))


def expected_lambda(twin: KernelSpec) -> np.ndarray:
    """Return E[Λ_n] of an exact twin in the linear approximation, the default `table`. (T+1,)"""
    return compute_mean_lambda(
        *compute_arriving_power(compute_responses(twin), twin.noise), twin.steps
    )


def make_twin_options(**options: Any) -> KernelOptions:
    """Return options of a run with the twin correction: with noise and scores, not recorded."""
    fixed = {"noise": True, "scores": True, "record_every": 0}
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise ValueError(
                f'`{name}` is not an option of the twin correction: use baseline="none" for that.'
            )
    return KernelOptions(**options)


def _check_graph(spec: KernelSpec, twin: KernelSpec) -> KernelSpec:
    for name in ("bonds", "drive_sites", "port_sites", "dt", "steps", "integrator"):
        if not np.array_equal(getattr(spec, name), getattr(twin, name)):
            raise ValueError(
                f"a twin must have the graph, drives, ports and steps of the network; its `{name}` "
                "differs."
            )
    return twin


def _check_rank(twin: KernelTwin, model: KernelSpec) -> None:
    if twin.rank > model.sites:
        raise ValueError(
            f"`rank` must be at most {model.sites}, the number of sites; got {twin.rank}."
        )
    if twin.rank and model.waves:
        raise ValueError(
            "the quadratic term needs a twin without modulation, and this one follows that of each "
            "trajectory: use rank=0, or knows_modulation=False."
        )


def _prepare(
    e: KernelJob, twin: KernelSpec, settings: KernelTwin
) -> tuple[KernelJob, KernelTwinModel]:
    """Return the job with its λ̄, and the twin with its segments and quadratic term."""
    steps = e.spec.steps
    rank = settings.rank
    o = e.options
    piece = fit_modulation(twin, modulation_tolerance(o))[0] if twin.waves else 1
    row = 4 * e.spec.sites * o.real.itemsize
    full = (
        not twin.waves
        and not rank
        and settings.segment is None
        and (steps + 1) * row <= TABLE_BYTES
    )
    target = settings.segment or (max(SEGMENT, int(np.sqrt(steps))) if full else SEGMENT)
    segment = min(piece * max(1, round(target / piece)), steps + steps % piece)
    basis = curvature = None
    if rank or e.table is None:
        try:
            response = compute_responses(twin, dtype=o.dtype, backend=o.backend)
        except FloatingPointError:
            raise _make_overflow_error() from None
        if rank:
            ends = np.minimum(np.arange(segment, steps + segment, segment), steps)
            basis, curvature = project_curvature(response, rank, ends)
        if e.table is None:
            e = e.replace(
                table=compute_mean_lambda(
                    *compute_arriving_power(response, e.spec.noise, basis), segment
                )
            )
    return e, KernelTwinModel(twin, segment, full, rank, basis, curvature)


def make_result(e: KernelJob, sums: TwinSums) -> TwinResult:
    """Return means, errors and families of a backend's sums; raise if a state overflowed."""
    trajectory, twin_trajectory = (int(v) for v in sums.overflow)
    explain_overflow(e.replace(table=None), trajectory, -1)
    if twin_trajectory >= 0:
        raise _make_overflow_error()
    direct, _, direct_stderr = (
        split_families(e, v) for v in compute_statistics(e, sums.moments[0])
    )
    correction, _, correction_stderr = (
        split_families(e, v) for v in compute_statistics(e, sums.moments[1])
    )
    gradient, second, stderr = (
        split_families(e, v) for v in compute_statistics(e, sums.moments[2])
    )
    value, value_stderr = reduce_returns(e, sums.returns)
    each = sums.direct, sums.correction
    samples = None if each[0] is None or each[1] is None else split_families(e, each[0] + each[1])
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
        direct_samples=None if each[0] is None else split_families(e, each[0]),
        correction_samples=None if each[1] is None else split_families(e, each[1]),
        mean_lambda=(sums.gained.sum() - sums.prefix_sum) / e.count,
        table=e.table,
    )


def _make_overflow_error() -> FloatingPointError:
    return FloatingPointError(
        "the twin's noise-free path, or its adjoint, is no longer finite. Lower `dt`, or look for "
        "gain in the twin's parameters: negative damping, or Kerr shifts and couplings too large "
        "for this step."
    )


# ---------------------------------------------------------------------------------------- curvature


RECORDS = 2048
"""Largest number of times at which responses are recorded, evenly spread over the horizon."""
DENSE = 256
"""Largest network whose leading directions are computed exactly."""


class Responses(NamedTuple):
    """Responses of the outputs to kicks.

    h: complex (M, R, N), at every `every`-th step s < T.
    weight: w·gain²Δt of each port (M,).
    every: steps between two times of `h`.
    steps: T.
    dt: Δt.
    """

    h: np.ndarray
    weight: np.ndarray
    every: int
    steps: int
    dt: float


class Quadratic(NamedTuple):
    """The quadratic term S_k ≈ B C_k B†.

    basis: B (N, r), orthonormal.
    curvature: C at the end of each segment (segments, r, r).
    """

    basis: np.ndarray
    curvature: np.ndarray


def compute_responses(
    twin: KernelSpec, *, dtype: str = "float32", backend: str = "cpu"
) -> Responses:
    """Return h of every port, by noise-free runs of the network with reversed frequencies.

    F† = 1 + Δt(iω + iκ − Γ)
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
        result = run(reversed_, 0, 1, noise=False, record_every=every, dtype=dtype, backend=backend)
        assert result.trajectories is not None
        h[row] = result.trajectories[0, : h.shape[1]]
    return Responses(
        h, (twin.port_weight * twin.port_gain**2)[kept] * twin.dt, every, twin.steps, twin.dt
    )


def project_curvature(response: Responses, rank: int, ends: np.ndarray) -> Quadratic:
    """Return B, the leading directions of Σ_s h_s h_s†, and C at the steps `ends`, ascending."""
    h, weight, every, steps, dt = response
    basis = _find_leading(
        (h * np.sqrt(np.abs(weight))[:, None, None]).reshape(-1, h.shape[-1]).T, rank
    )
    y = h @ basis.conj()  # B†h (M, R, r)
    projected = np.zeros((len(ends), rank, rank), complex)
    total = np.zeros((rank, rank), complex)
    reached = 0

    def sum_between(i: int, j: int, share: int) -> np.ndarray:
        part = y[:, i:j].reshape(-1, rank)
        return 2 * share * (part.T * np.repeat(weight, j - i)) @ part.conj()

    for place in range(len(ends) - 1, -1, -1):
        whole, part = divmod(steps - int(ends[place]), every)
        total = total + sum_between(reached, whole, every)
        reached = whole
        projected[place] = total + (sum_between(whole, whole + 1, part) if part else 0.0)
    return Quadratic(basis, projected)


def _find_leading(columns: np.ndarray, rank: int) -> np.ndarray:
    """Return the leading left singular vectors of a matrix (N, R), approximately if N is large."""
    n = len(columns)
    if n <= DENSE:
        return np.linalg.eigh(columns @ columns.conj().T)[1][:, : -rank - 1 : -1]
    width = min(n, rank + 8)  # a few more than are wanted, and two rounds of subspace iteration
    directions = np.random.default_rng(0).standard_normal((n, width)) + 0j
    for _ in range(3):
        directions = np.linalg.qr(columns @ (columns.conj().T @ directions))[0]
    inside = directions.conj().T @ columns
    return directions @ np.linalg.eigh(inside @ inside.conj().T)[1][:, : -rank - 1 : -1]


def compute_arriving_power(
    response: Responses, noise: np.ndarray, basis: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return P_s at every step, and the part along the directions of `basis`, (T,) each."""
    h, weight, every, steps, dt = response

    def power(v):
        return np.einsum("m,mrn,n->r", weight, np.abs(v) ** 2, 2 * noise**2 * dt, optimize=True)

    recorded_steps = np.arange(h.shape[1]) * every

    def on_grid(p):
        return np.interp(np.arange(steps), recorded_steps, p)

    caught = np.zeros(steps) if basis is None else on_grid(power((h @ basis.conj()) @ basis.T))
    return on_grid(power(h)), caught


def compute_mean_lambda(every: np.ndarray, caught: np.ndarray, segment: int) -> np.ndarray:
    """Return E[Λ_n] of an exact linear twin, Σ_{k≥n} Σ_{s<k} P_s without a quadratic term. (T+1,)

    With one, Λ_n of a path that starts from X at step n_j has the noise since n_j and the noise to
    come: the same double sum over steps k − n_j ≥ n − n_j. every: P_s. caught: the part of P_s
    along the directions of the quadratic term.
    """
    steps = len(every)

    def sum_twice(p):
        return np.concatenate([[0.0, 0.0], np.cumsum(np.cumsum(p))])  # Σ_{k<j} Σ_{s<k} P_s

    n = np.arange(steps + 1)
    since = np.maximum(n - 1, 0) // segment * segment
    rest = sum_twice(every - caught)
    along_basis = sum_twice(caught)
    return rest[steps] - rest[n] + along_basis[steps - since] - along_basis[n - since]
