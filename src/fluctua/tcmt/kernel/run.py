"""Runs of the fused kernels: simulate a network, sum returns and scores, and reduce, in one call.

    G = Σ_n (λ̂ₙ₊₁ − λ̄ₙ)Uₙ,  λ̂ₙ₊₁ = R − Cₙ₊₁

The noise is that of `fluctua.core.draws.philox`, trajectory by trajectory, so any run can be
compared with the JAX reference step by step. Nothing of size E·T is stored unless trajectories are
recorded.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.estimate import standard_error
from fluctua.tcmt.kernel import cpu
from fluctua.tcmt.kernel.cpu import EnsembleSums, mean_to_go
from fluctua.tcmt.kernel.layout import list_neighbours
from fluctua.tcmt.kernel.options import Binned, KernelJob, KernelOptions, KernelSpec


class Families(NamedTuple):
    """One array per family of parameters, each (N,), (B,) or per trajectory (E, ·).

    The last four only with `rates`. A rate that enters several of them is their sum by the chain
    rule, sample by sample.

    omega: by ω_n.
    kappa: by κ_b.
    chi: by χ_n.
    damping: by Γ_n at fixed Q.
    log_diffusion: by ln Q_n.
    drive: by a factor on each drive's f.
    gain: by each port's √(2γ_e) in the reward alone.
    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    damping: np.ndarray | None = None
    log_diffusion: np.ndarray | None = None
    drive: np.ndarray | None = None
    gain: np.ndarray | None = None


class KernelResult(NamedTuple):
    """An estimate of ∇J, with returns and samples.

    returns: R (E,).
    value: J, the mean return.
    value_stderr: standard error of J.
    gradient: mean over trajectories; None without scores.
    stderr: standard errors (over pairs if antithetic); None without scores.
    second_moment: mean squares over trajectories; None without scores.
    mean_return_to_go: (T+1,), the `baseline` of a next run.
    samples: gradient of each trajectory, on request.
    trajectories: complex (E, R, N), every `record_every` steps from 0, on request.
    """

    returns: np.ndarray
    value: float
    value_stderr: float
    gradient: Families | None
    stderr: Families | None
    second_moment: Families | None
    mean_return_to_go: np.ndarray
    samples: Families | None
    trajectories: np.ndarray | None


def run(
    spec: KernelSpec,
    seed: int,
    count: int,
    *,
    baseline: np.ndarray | Binned | None = None,
    first_trajectory: int = 0,
    **options: Any,
) -> KernelResult:
    """Run trajectories and estimate ∇J from them.

    Args:
        spec: the network.
        seed: of the noise, 64 bits.
        count: E; trajectories first_trajectory … first_trajectory + count − 1.
        baseline: None, a table (T+1,) of the mean return-to-go at each time (`baseline[n+1]` for
            the score of step n), or `Binned()`, which runs everything twice.
        first_trajectory: number of the first trajectory.
        options: those of `KernelOptions`.

    Returns: a `KernelResult`.

    >>> run(spec, seed=0, count=64).gradient.omega.shape
    (6,)

    """
    binned = baseline if isinstance(baseline, Binned) else None
    table = None if isinstance(baseline, Binned) else baseline
    ensemble = KernelJob(
        spec, seed, count, KernelOptions(**options), first_trajectory, table, binned
    )
    if not ensemble.scores:
        ensemble = ensemble.replace(binned=None)
    groups = _split_groups(ensemble)

    if ensemble.options.backend == "cuda" and len(groups) > 1:
        from fluctua.tcmt.kernel import gpus

        return _combine(gpus.map_over_gpus(_run_group, groups))
    return _combine([_run_group(part) for part in groups])


def _run_group(group: KernelJob) -> KernelResult:
    return make_result(group, _sum_ensemble(group))


def _split_groups(e: KernelJob) -> list[KernelJob]:
    """Split a job into groups with bins of their own, by `Binned.group` and what a GPU can sort."""
    if e.binned is None:
        return [e]
    group = e.binned.group
    if e.options.backend == "cuda":
        from fluctua.tcmt.kernel import cuda_binned

        group = min(group, cuda_binned.largest_group(e))
    groups = -(-e.count // group)
    if groups == 1:
        return [e]
    edges = np.linspace(0, e.count, groups + 1).astype(int).tolist()
    return [
        e.replace(first=e.first + begin, count=end - begin)
        for begin, end in itertools.pairwise(edges)
    ]


def _sum_ensemble(e: KernelJob) -> EnsembleSums:
    if e.options.backend == "cpu":
        return cpu.run(e)
    from fluctua.tcmt.kernel import cuda, cuda_binned

    return cuda.run(e) if e.binned is None else cuda_binned.run(e)


def _combine(parts: list[KernelResult]) -> KernelResult:
    """Combine the results of groups of trajectories into one."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([len(part.returns) for part in parts])
    count = int(sizes.sum())
    share = sizes / sizes.sum()

    def mean(name: str) -> Families:
        families = zip(*(getattr(part, name) for part in parts), strict=True)
        means: list[Any] = [
            None if values[0] is None else np.tensordot(share, np.array(values), 1)
            for values in families
        ]
        return Families(*means)

    def concatenate(name: str) -> Any:
        fields = [getattr(part, name) for part in parts]
        if fields[0] is None:
            return None
        if isinstance(fields[0], np.ndarray):
            return np.concatenate(fields)
        rows: list[Any] = [
            None if values[0] is None else np.concatenate(values)
            for values in zip(*fields, strict=True)
        ]
        return Families(*rows)

    gradient = mean("gradient")
    second = mean("second_moment")
    errors: list[Any] = [
        None if g is None or s is None else standard_error(g, s, count)
        for g, s in zip(gradient, second, strict=True)
    ]
    returns = concatenate("returns")
    value = returns.mean()
    return KernelResult(
        returns,
        float(value),
        float(standard_error(value, (returns**2).mean(), count)),
        gradient,
        Families(*errors),
        second,
        np.tensordot(share, np.array([part.mean_return_to_go for part in parts]), 1),
        concatenate("samples"),
        concatenate("trajectories"),
    )


def make_result(e: KernelJob, sums: EnsembleSums) -> KernelResult:
    """Return means, errors and families of a backend's sums; raise if a trajectory overflowed."""
    explain_overflow(e, *(int(v) for v in sums.overflow))
    value, error = reduce_returns(e, sums.returns)
    gradient = stderr = second = None
    if e.scores:
        statistics = split_families(e, np.stack(compute_statistics(e, sums.moments)))
        rows: Any = zip(*((None,) * 3 if v is None else v for v in statistics), strict=True)
        gradient, second, stderr = (Families(*row) for row in rows)
    record = sums.record
    return KernelResult(
        sums.returns,
        value,
        error,
        gradient,
        stderr,
        second,
        mean_to_go(sums.reward_sum, e.count)[: e.spec.steps + 1],
        None if sums.samples is None else split_families(e, sums.samples),
        None if record is None else record.view(np.dtype(f"c{2 * record.dtype.itemsize}"))[..., 0],
    )


def explain_overflow(e: KernelJob, trajectory: int, step: int) -> None:
    """Raise if a trajectory overflowed; if its step is unknown, it runs again on the CPU."""
    if trajectory < 0:
        return
    if step < 0:
        first = trajectory & ~1 if e.options.antithetic else trajectory
        count = 2 if e.options.antithetic else 1
        alone = e.replace(
            first=first, count=count, binned=None, record_every=0, samples=False, backend="cpu"
        )
        step = int(cpu.run(alone).overflow[1])
    when = f"after step {step} (t = {step * e.spec.dt:g})" if step >= 0 else "at the end of the run"
    raise FloatingPointError(
        f"the state of trajectory {trajectory} is no longer finite {when}. Lower `dt`, or look for "
        "gain: negative damping, or Kerr shifts and couplings too large for this step."
    )


def reduce_returns(e: KernelJob, returns: np.ndarray) -> tuple[float, float]:
    """Return J and its standard error."""
    paired = 0.0  # used with antithetic pairs alone
    if e.options.antithetic:
        paired = ((returns[::2] + returns[1::2]) ** 2).sum()
    moments = np.array([[returns.sum()], [(returns**2).sum()], [paired]])
    mean, _, error = compute_statistics(e, moments)
    return float(mean[0]), float(error[0])


def compute_statistics(
    e: KernelJob, moments: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, mean square and standard error from Σv, Σv² and Σ(v₂ⱼ + v₂ⱼ₊₁)²."""
    antithetic = e.options.antithetic
    mean = moments[0] / e.count
    second = moments[1] / e.count
    units = e.count // 2 if antithetic else e.count  # the two of a pair are not independent
    square = moments[2] / 4 / max(units, 1) if antithetic else second
    return mean, second, standard_error(mean, square, units)


def split_families(e: KernelJob, columns: np.ndarray) -> Families:
    """Split the kernels' columns (..., P) into families, with bonds in the order of the spec."""
    spec = e.spec
    n = spec.sites
    b = len(spec.bonds)
    d = spec.drive_sites.size
    m = spec.port_sites.size
    edges = itertools.accumulate([0, n, n, b] + ([n, n, d, m] if e.rates else []))
    omega, chi, kappa, *rest = (columns[..., begin:end] for begin, end in itertools.pairwise(edges))
    in_order = np.empty_like(kappa)
    in_order[..., list_neighbours(n, spec.bonds).order] = kappa
    return Families(omega, in_order, chi, *rest)
