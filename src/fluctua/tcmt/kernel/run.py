"""Fused kernels: simulate a resonator network, accumulate returns and scores, reduce, in one call.

    G = Σ_n (λ̂ₙ₊₁ − λ̄ₙ)Uₙ,  λ̂ₙ₊₁ = R − Cₙ₊₁

Same noise as `fluctua.core.draws.philox`, trajectory by trajectory, so any run can be compared with
the JAX reference step by step. Nothing of size E·T is stored unless trajectories are asked for.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.estimate import standard_error
from fluctua.tcmt.kernel import cpu, cuda, cuda_binned, gpus
from fluctua.tcmt.kernel.cpu import EnsembleSums, mean_to_go
from fluctua.tcmt.kernel.layout import neighbours
from fluctua.tcmt.kernel.options import Binned, KernelJob, KernelOptions, KernelSpec


class Families(NamedTuple):
    """One array per family of parameters, each (N,), (B,) or per trajectory (E, ·).

    With `rates`: damping is the derivative by Γ_n at fixed Q, log_diffusion by ln Q_n, drive by a
    factor on each drive's f, gain by each port's √(2γ_e) in the reward alone. A rate that enters
    several of them is put together by the chain rule, sample by sample.
    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    damping: np.ndarray | None = None
    log_diffusion: np.ndarray | None = None
    drive: np.ndarray | None = None
    gain: np.ndarray | None = None


class KernelResult(NamedTuple):
    """An estimate of ∇J and what it came from.

    returns: R (E,). value, value_stderr: their mean and its standard error. gradient, stderr,
    second_moment: over trajectories (errors over pairs if antithetic), None without scores.
    mean_return_to_go: (T+1,), the `baseline` of a next run. samples: the gradient of each
    trajectory, on request. trajectories: complex (E, R, N), every `record_every` steps from 0, on
    request.
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
    """Run some trajectories and estimate ∇J from them.

    Args:
        spec: the network.
        seed: of the noise, 64 bits.
        count: E; trajectories first_trajectory … first_trajectory + count − 1.
        baseline: None, a table (T+1,) of the mean return-to-go at each time (the score of step n
            meets `baseline[n+1]`), or `Binned()`, which runs everything twice.
        first_trajectory: where to begin.
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
    groups = _groups(ensemble)

    on_gpus = ensemble.options.backend == "cuda" and len(groups) > 1
    return _combine(
        gpus.over_gpus(_run_group, groups) if on_gpus else [_run_group(part) for part in groups]
    )


def _run_group(group: KernelJob) -> KernelResult:
    return result(group, _sums(group))


def _groups(e: KernelJob) -> list[KernelJob]:
    """Parts that have bins of their own, of at most `Binned.group` trajectories and as many as
    the GPU can sort.
    """
    if e.binned is None:
        return [e]
    group = e.binned.group
    if e.options.backend == "cuda":
        group = min(group, cuda_binned.largest_group(e))
    groups = -(-e.count // group)
    if groups == 1:
        return [e]
    edges = np.linspace(0, e.count, groups + 1).astype(int).tolist()
    return [
        e.replace(first=e.first + begin, count=end - begin)
        for begin, end in itertools.pairwise(edges)
    ]


def _sums(e: KernelJob) -> EnsembleSums:
    if e.options.backend == "cpu":
        return cpu.run(e)
    return cuda.run(e) if e.binned is None else cuda_binned.run(e)


def _combine(parts: list[KernelResult]) -> KernelResult:
    """One result from the results of groups of trajectories."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([len(part.returns) for part in parts])
    count = int(sizes.sum())
    share = sizes / sizes.sum()

    def mean(name: str) -> Families:
        each = zip(*(getattr(part, name) for part in parts), strict=True)
        of_all: list[Any] = [
            None if of[0] is None else np.tensordot(share, np.array(of), 1) for of in each
        ]
        return Families(*of_all)

    def joined(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if each[0] is None:
            return None
        if isinstance(each[0], np.ndarray):
            return np.concatenate(each)
        of_all: list[Any] = [
            None if of[0] is None else np.concatenate(of) for of in zip(*each, strict=True)
        ]
        return Families(*of_all)

    gradient = mean("gradient")
    second = mean("second_moment")
    spread: list[Any] = [
        None if g is None or s is None else standard_error(g, s, count)
        for g, s in zip(gradient, second, strict=True)
    ]
    returns = joined("returns")
    value = returns.mean()
    return KernelResult(
        returns,
        float(value),
        float(standard_error(value, (returns**2).mean(), count)),
        gradient,
        Families(*spread),
        second,
        np.tensordot(share, np.array([part.mean_return_to_go for part in parts]), 1),
        joined("samples"),
        joined("trajectories"),
    )


def result(e: KernelJob, sums: EnsembleSums) -> KernelResult:
    """The kernels' sums as means, errors and families; raises if a trajectory overflowed."""
    explain_overflow(e, *(int(v) for v in sums.overflow))
    value, error = reduce_returns(e, sums.returns)
    gradient = stderr = second = None
    if e.scores:
        of_all = families(e, np.stack(statistics(e, sums.moments)))
        rows: Any = zip(*((None,) * 3 if v is None else v for v in of_all), strict=True)
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
        None if sums.samples is None else families(e, sums.samples),
        None if record is None else record.view(np.dtype(f"c{2 * record.dtype.itemsize}"))[..., 0],
    )


def explain_overflow(e: KernelJob, trajectory: int, step: int) -> None:
    """Raise if a trajectory overflowed; where its step is not known, it runs again, on the CPU."""
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
        "gain: negative "
        "damping, or Kerr shifts and couplings too large for this step."
    )


def reduce_returns(e: KernelJob, returns: np.ndarray) -> tuple[float, float]:
    """J and its standard error."""
    paired = 0.0  # asked for of antithetic pairs alone
    if e.options.antithetic:
        paired = ((returns[::2] + returns[1::2]) ** 2).sum()
    moments = np.array([[returns.sum()], [(returns**2).sum()], [paired]])
    mean, _, error = statistics(e, moments)
    return float(mean[0]), float(error[0])


def statistics(e: KernelJob, moments: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, mean square and standard error of the mean from Σv, Σv² and Σ(v₂ⱼ + v₂ⱼ₊₁)²."""
    antithetic = e.options.antithetic
    mean = moments[0] / e.count
    second = moments[1] / e.count
    units = e.count // 2 if antithetic else e.count  # the two of a pair are not independent
    square = moments[2] / 4 / max(units, 1) if antithetic else second
    return mean, second, standard_error(mean, square, units)


def families(e: KernelJob, columns: np.ndarray) -> Families:
    """Split the kernels' columns (..., P), and put the bonds back into the order they were
    given in.
    """
    spec = e.spec
    n = spec.sites
    b = len(spec.bonds)
    d = spec.drive_sites.size
    m = spec.port_sites.size
    edges = itertools.accumulate([0, n, n, b] + ([n, n, d, m] if e.rates else []))
    omega, chi, kappa, *rest = (columns[..., begin:end] for begin, end in itertools.pairwise(edges))
    in_order = np.empty_like(kappa)
    in_order[..., neighbours(n, spec.bonds).order] = kappa
    return Families(omega, in_order, chi, *rest)
