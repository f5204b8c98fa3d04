"""The twin correction on the fused kernels: the paper's estimator with far less variance, and no other mean.

    G = Σ_n q_{n+1}·∂μ(X_n)Δt + Σ_n (Λ_{n+1} − λ̄_n)U_n
    Λ_{n+1} = λ̂_{n+1} − V_{n+1}(X_{n+1}) − Σ_{k>n} q_{k+1}·r_k,     V_k(x) = ν_k + q_k·(x − x̄_k)

x̄ is a twin's noise-free path, ν its remaining return and q the gradient of that (one reverse sweep); r the residual
that the score uses. q_{k+1}·r_k has mean zero given X_k, so a wrong twin costs variance, never bias. The first sum is
`direct`, the second `correction`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.types import Params
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.curvature import arriving, mean_lambda, quadratic, responses
from fluctua.tcmt.kernel.run import Families, Options
from fluctua.tcmt.kernel.spec import KernelSpec, checked

TABLE_BYTES = 2**29
"""A path and adjoint that all trajectories share are tabulated at every step up to this size."""
SEGMENT = 32
"""Steps that a trajectory's own path and adjoint are made ahead, if nothing else decides: they stay in the cache."""


class KernelTwin(NamedTuple):
    """The twin correction as the `baseline` of a task's fused estimator.

    theta: the twin's parameters as a function of θ; None takes θ itself. rank, knows_modulation, table, segment: those
    of `run_twin`.

    >>> task.estimator("cpu", baseline=KernelTwin(theta=lambda th: {**th, "kappa": 0.95 * th["kappa"]}))
    """

    theta: Callable[[Params], Params] | None = None
    rank: int = 0
    knows_modulation: bool = True
    table: np.ndarray | None = None
    segment: int | None = None


class TwinResult(NamedTuple):
    """An estimate of ∇J by the twin correction, and its two parts.

    The first fields are those of `kernel.KernelResult`; gradient, stderr and second_moment are of direct + correction.
    direct, correction and their errors: means over trajectories. direct_samples, correction_samples: of each
    trajectory (E, ·), on request. mean_lambda: the mean of Λ at each time (T+1,), the `table` of a next run.
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
    backend: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    antithetic: bool = False,
    rates: bool = False,
    samples: bool = False,
    first_trajectory: int = 0,
    engine: str = "",
) -> TwinResult:
    """Run trajectories first_trajectory … first_trajectory + count − 1 and estimate ∇J with the twin correction.

    twin: its own ω, κ, χ, Γ, drive, gain, weight and start on the same graph; None is the network itself.
    knows_modulation: each trajectory's twin has that trajectory's δκ; False leaves it without any.
    rank: of the quadratic term of V, for a twin without modulation; 0 is none. A twin with one starts afresh from X
    every `segment` steps, and what is left of Λ is the noise of a segment instead of the run's.
    table: λ̄ (T+1,), such as `mean_lambda` of an earlier run; the score of step n meets table[n+1]. None computes
    that of a linear twin. Other options: those of `kernel.run`.

    >>> run_twin(spec, seed=0, count=64).correction.omega.shape
    (143,)
    """
    spec = checked(spec)
    model = spec if twin is None else _same_graph(spec, checked(twin))
    modulated = bool(spec.harmonics) and knows_modulation
    model = model._replace(
        noise=spec.noise,
        sigma_kappa=spec.sigma_kappa if modulated else 0.0,
        harmonics=spec.harmonics if modulated else 0,
        Omega=spec.Omega,
    )
    o = kernel._options(spec, seed, count, first_trajectory, dtype, True, rates, antithetic, True, 0, samples, table)
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"`backend` must be 'cpu' or 'cuda'; got {backend!r}.")
    _check_rank(rank, modulated, spec.omega.size, segment)
    if backend == "cuda":
        from fluctua.tcmt.kernel import cuda_twin

        model = cuda_twin.checked(spec, model, o)
    plan = _plan(spec, model, o, rank, segment, backend)
    if backend == "cuda":
        return result(spec, plan.options, cuda_twin.run(spec, plan))
    return _run_cpu(spec, plan, threads, engine)


class Plan(NamedTuple):
    """What a backend needs besides the network."""

    options: Options
    twin: KernelSpec
    segment: int
    full: bool
    rank: int
    basis: np.ndarray | None
    curvature: np.ndarray | None


def _same_graph(spec: KernelSpec, twin: KernelSpec) -> KernelSpec:
    for name in ("bonds", "drive_sites", "port_sites", "dt", "steps"):
        if not np.array_equal(getattr(spec, name), getattr(twin, name)):
            raise ValueError(
                f"a twin has the graph, drives, ports and steps of the network itself; its `{name}` differs."
            )
    return twin


def _check_rank(rank: int, modulated: bool, sites: int, segment: int | None) -> None:
    if not 0 <= rank <= sites:
        raise ValueError(f"`rank` is a number of directions, 0 for no quadratic term, at most {sites}; got {rank}.")
    if rank and modulated:
        raise ValueError(
            "the quadratic term is of a twin without modulation, and this one follows each trajectory's: use rank=0, "
            "or knows_modulation=False."
        )
    if segment is not None and segment < 1:
        raise ValueError(f"`segment` is a number of steps, at least 1; got {segment}.")


def _plan(spec: KernelSpec, twin: KernelSpec, o: Options, rank: int, segment: int | None, backend: str) -> Plan:
    """Segments, and what is computed of the twin before any trajectory: λ̄ and the quadratic term."""
    piece = kernel.modulation_steps(twin, o) if twin.harmonics else 1
    row = 4 * spec.omega.size * np.dtype(o.dtype).itemsize
    full = not twin.harmonics and not rank and segment is None and (spec.steps + 1) * row <= TABLE_BYTES
    target = segment or (max(SEGMENT, int(np.sqrt(spec.steps))) if full else SEGMENT)
    segment = min(piece * max(1, round(target / piece)), spec.steps + spec.steps % piece)
    basis = curvature = None
    if rank or o.table is None:
        try:
            response = responses(twin, dtype=o.dtype, backend=backend)
        except FloatingPointError:
            raise _twin_overflow() from None
        if rank:
            ends = np.minimum(np.arange(segment, spec.steps + segment, segment), spec.steps)
            basis, curvature = quadratic(response, rank, ends)
        if o.table is None:
            o = o._replace(table=mean_lambda(*arriving(response, spec.noise, basis), segment))
    return Plan(o, twin, segment, full, rank, basis, curvature)


def _run_cpu(spec: KernelSpec, plan: Plan, threads: int | None, engine: str) -> TwinResult:
    from fluctua.tcmt.native import _native  # here, so that a GPU run does not need the compiled core

    o = plan.options
    p, real, count = kernel.width(spec, o), np.dtype(o.dtype), o.trajectories
    given = kernel.flat(spec, o) | {"threads": threads or kernel.cores()}
    split = lambda v: None if v is None else np.ascontiguousarray(np.stack([v.real, v.imag], axis=-1), real)
    model = kernel.flat(plan.twin, o._replace(table=None)) | {
        "segment": plan.segment,
        "full": plan.full,
        "rank": plan.rank,
        "basis": split(plan.basis),
        "curvature": split(plan.curvature),
    }
    out: dict[str, Any] = {
        "returns": np.empty(count),
        "gained": np.empty(count),
        "moments": np.empty((3, 3, p)),
        "reward_sum": np.empty(spec.steps),
        "prefix_sum": np.empty(spec.steps + 1),
        "direct": np.empty((count, p), real) if o.samples else None,
        "correction": np.empty((count, p), real) if o.samples else None,
        "overflow": np.empty(2, np.int64),
    }
    _native.twin(given, model, out, bool(real == np.float64), engine)
    return result(spec, o, out)


def result(spec: KernelSpec, o: Options, out: dict[str, Any]) -> TwinResult:
    """The kernels' sums as means, errors and families; raises if a trajectory or a twin overflowed."""
    trajectory, of_twin = (int(v) for v in out["overflow"])
    if trajectory >= 0:
        kernel.explain_overflow(spec, o._replace(table=None), trajectory)
    if of_twin >= 0:
        raise _twin_overflow()
    of_total = kernel.result(
        spec,
        o._replace(samples=False),
        {**out, "moments": out["moments"][2], "record": None, "overflow": (-1, -1)},
    )
    families = lambda columns: kernel.families(spec, o, columns)
    direct, _, direct_stderr = (families(v) for v in kernel.statistics(out["moments"][0], o))
    correction, _, correction_stderr = (families(v) for v in kernel.statistics(out["moments"][1], o))
    of_each = None
    if o.samples:
        of_each = (families(out["direct"]), families(out["correction"]), families(out["direct"] + out["correction"]))
    assert o.table is not None
    return TwinResult(
        *of_total._replace(samples=of_each[2] if of_each else None),  # type: ignore[arg-type]
        direct=direct,
        direct_stderr=direct_stderr,
        correction=correction,
        correction_stderr=correction_stderr,
        direct_samples=of_each[0] if of_each else None,
        correction_samples=of_each[1] if of_each else None,
        mean_lambda=(out["gained"].sum() - out["prefix_sum"]) / o.trajectories,
        table=o.table,
    )


def _twin_overflow() -> FloatingPointError:
    return FloatingPointError(
        "the twin's noise-free path, or its adjoint, is no longer finite. Lower `dt`, or look for gain in the twin's "
        "parameters: negative damping, or Kerr shifts and couplings too large for this step."
    )
