"""Fused kernels: simulate a resonator network, accumulate returns and scores, reduce, in one call.

    G = Σ_n (λ̂ₙ₊₁ − λ̄ₙ)Uₙ,  λ̂ₙ₊₁ = R − Cₙ₊₁

Same noise as `fluctua.core.wiener.philox`, trajectory by trajectory, so any run can be compared with the JAX
reference step by step. Nothing of size E·T is stored unless trajectories are asked for.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel.spec import KernelSpec, checked, modulation_pieces, neighbours

MODULATION_TOLERANCE = 2.5e-7
"""Largest error of δκ/σ_κ in float32 runs: 5e-8 at σ_κ = 0.2, below the rounding of κ = 1."""


LANES = 16
"""Trajectories a block of the CPU kernel."""


class Families(NamedTuple):
    """One array per family of parameters, each (N,), (B,) or per trajectory (E, ·).

    With `rates`: damping is the derivative by Γ_n at fixed Q, log_diffusion by ln Q_n, drive by a factor
    on each drive's f, gain by each port's √(2γ_e) in the reward alone. A rate that enters several of them
    is put together by the chain rule, sample by sample.
    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    damping: np.ndarray | None = None
    log_diffusion: np.ndarray | None = None
    drive: np.ndarray | None = None
    gain: np.ndarray | None = None


class Binned(NamedTuple):
    """The paper's baseline: leave-one-out optimal within quantile bins of |ψ|² (`fluctua.core.baselines.binned`).

    bins: K. every: steps between two sortings into bins; 1 is the paper's. Membership that is some steps old
    is as independent of the kick as a fresh one, so the estimate stays unbiased. group: a larger ensemble is
    split into groups of at most so many, each with bins of its own; with 200 in a bin the baseline is as good as
    with more, and the cost stays linear. `group` ≥ count is the paper's.
    """

    bins: int = 20
    every: int = 100
    group: int = 4096


class KernelResult(NamedTuple):
    """An estimate of ∇J and what it came from.

    returns: R (E,). value, value_stderr: their mean and its standard error. gradient, stderr, second_moment:
    over trajectories (errors over pairs if antithetic), None without scores. mean_return_to_go: (T+1,), the
    `baseline` of a next run. samples: the gradient of each trajectory, on request. trajectories: complex
    (E, R, N), every `record_every` steps from 0, on request.
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


class Options(NamedTuple):
    """What both backends are told besides the network; filled in by `run`."""

    seed: int
    trajectories: int
    first: int
    dtype: str
    scores: bool
    rates: bool
    antithetic: bool
    noise: bool
    record_every: int
    samples: bool
    table: np.ndarray | None
    binned: Binned | None


def run(
    spec: KernelSpec,
    seed: int,
    count: int,
    *,
    baseline: np.ndarray | Binned | None = None,
    backend: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    antithetic: bool = False,
    noise: bool = True,
    scores: bool = True,
    rates: bool = False,
    record_every: int = 0,
    samples: bool = False,
    first_trajectory: int = 0,
    engine: str = "",
) -> KernelResult:
    """Run trajectories first_trajectory … first_trajectory + count − 1 and estimate ∇J from them.

    baseline: None, a table (T+1,) of the mean return-to-go at each time (the score of step n meets
    `baseline[n+1]`), or `Binned()`, which runs everything twice. antithetic: trajectories 2j and 2j+1 see
    opposite noise. noise: False for the deterministic skeleton, which has no scores. rates: scores of
    damping, diffusion and drive too.
    engine: one of `fluctua.tcmt.native._native.engines()`, for tests and benchmarks.

    >>> run(spec, seed=0, count=1000).gradient.omega.shape
    (143,)
    """
    spec = checked(spec)
    options = _options(
        spec,
        seed,
        count,
        first_trajectory,
        dtype,
        scores,
        rates,
        antithetic,
        noise,
        record_every,
        samples,
        baseline,
    )
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"`backend` must be 'cpu' or 'cuda'; got {backend!r}.")
    groups = 1 if options.binned is None else -(-count // options.binned.group)
    edges = np.linspace(0, count, groups + 1).astype(int).tolist()
    parts = [
        options._replace(first=options.first + begin, trajectories=end - begin)
        for begin, end in itertools.pairwise(edges)
    ]
    if backend == "cpu":
        return _combined([_run_cpu(spec, part, threads, engine) for part in parts])
    from fluctua.tcmt.kernel import cuda

    return _combined([cuda.run_cuda(spec, part) for part in parts])


def _combined(parts: list[KernelResult]) -> KernelResult:
    """One result from the results of groups of trajectories."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([len(part.returns) for part in parts])
    count, share = sizes.sum(), sizes / sizes.sum()

    def mean(name: str) -> Families:
        each = zip(*(getattr(part, name) for part in parts), strict=True)
        of_all: list[Any] = [None if of[0] is None else np.tensordot(share, np.array(of), 1) for of in each]
        return Families(*of_all)

    def joined(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if each[0] is None:
            return None
        if isinstance(each[0], np.ndarray):
            return np.concatenate(each)
        of_all: list[Any] = [None if of[0] is None else np.concatenate(of) for of in zip(*each, strict=True)]
        return Families(*of_all)

    gradient, second = mean("gradient"), mean("second_moment")
    spread: list[Any] = [
        None if g is None or s is None else np.sqrt(np.maximum(s - g**2, 0) / (count - 1))
        for g, s in zip(gradient, second, strict=True)
    ]
    returns = joined("returns")
    return KernelResult(
        returns,
        float(returns.mean()),
        float(returns.std(ddof=1) / np.sqrt(count)),
        gradient,
        Families(*spread),
        second,
        np.tensordot(share, np.array([part.mean_return_to_go for part in parts]), 1),
        joined("samples"),
        joined("trajectories"),
    )


def _options(
    spec: KernelSpec,
    seed: int,
    count: int,
    first: int,
    dtype: str,
    scores: bool,
    rates: bool,
    antithetic: bool,
    noise: bool,
    record_every: int,
    samples: bool,
    baseline: np.ndarray | Binned | None,
) -> Options:
    if count < 1 or first < 0 or first + count > 2**32:
        raise ValueError(f"trajectories {first} … {first + count - 1} must lie in 0 … 2³² − 1, at least one.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must fit 64 bits; got {seed}.")
    if dtype not in ("float32", "float64"):
        raise ValueError(f"`dtype` must be 'float32' or 'float64'; got {dtype!r}.")
    if antithetic and (count % 2 or first % 2):
        raise ValueError("antithetic trajectories come in pairs (2j, 2j+1): `count` and the first must be even.")
    if record_every < 0:
        raise ValueError(f"`record_every` is a number of steps, or 0 for no recording; got {record_every}.")
    scores = scores and noise
    if scores and not (spec.noise > 0).all():
        site = int(np.argmin(spec.noise > 0))
        raise ValueError(
            f"the diffusion is singular: site {site} has no noise, and the score divides by it. "
            "Give it some, or pass scores=False to simulate only."
        )
    table = None
    if isinstance(baseline, Binned):
        _check_binned(baseline, count, antithetic, rates)
    elif baseline is not None:
        table = np.ascontiguousarray(baseline, float)
        if table.shape != (spec.steps + 1,):
            raise ValueError(
                f"a time-only `baseline` is the mean return-to-go at each time, ({spec.steps + 1},); got {table.shape}."
            )
    return Options(
        seed=seed,
        trajectories=count,
        first=first,
        dtype=dtype,
        scores=scores,
        rates=scores and rates,
        antithetic=antithetic,
        noise=noise,
        record_every=record_every,
        samples=samples and scores,
        table=table,
        binned=baseline if isinstance(baseline, Binned) and scores else None,
    )


def _check_binned(binned: Binned, count: int, antithetic: bool, rates: bool) -> None:
    if not 1 <= binned.bins <= 256 or binned.every < 1 or binned.group < 2:
        raise ValueError(
            f"`Binned` needs 1 to 256 bins, at least 1 step between sortings and 2 trajectories a group; got {binned}."
        )
    if count < 2:
        raise ValueError("a leave-one-out baseline needs at least 2 trajectories.")
    if antithetic:
        raise ValueError(
            "a leave-one-out baseline is not independent of a trajectory whose twin with opposite noise it "
            "contains: antithetic pairs go with a time-only baseline, or with none."
        )
    if rates:
        raise ValueError("the kernels' binned baseline covers ω, χ and κ. Rates need a time-only one, or none.")


def flat(spec: KernelSpec, o: Options) -> dict[str, Any]:
    """The arrays that the kernels read: in their precision, multiplied by Δt, bonds in the kernels' order."""
    real = np.dtype(o.dtype)
    cast = lambda v: np.ascontiguousarray(v, real)
    split = lambda v: cast(np.stack([v.real, v.imag], axis=-1))
    graph = neighbours(spec.omega.size, spec.bonds)
    noise = spec.noise if o.noise else np.zeros_like(spec.noise)
    pieces, table = (1, np.zeros((1, 3, 0)))
    if spec.harmonics:
        pieces, table = modulation_pieces(spec, MODULATION_TOLERANCE if real == np.float32 else 0.0)
    return {
        "sites": spec.omega.size,
        "bonds": len(spec.bonds),
        "steps": spec.steps,
        "ports": spec.port_sites.size,
        "drives": spec.drive_sites.size,
        "harmonics": spec.harmonics,
        "seed": o.seed,
        "noise": o.noise,
        "antithetic": o.antithetic,
        "rates": o.rates,
        "dt": spec.dt,
        "lower_start": graph.lower_start,
        "lower_site": graph.lower_site,
        "lower_bond": graph.lower_bond,
        "upper_start": graph.upper_start,
        "upper_site": graph.upper_site,
        "bond_given": graph.order,
        "omega": cast(spec.omega * spec.dt),
        "chi": cast(spec.chi * spec.dt),
        "damping": cast(spec.damping * spec.dt),
        "kappa": cast(spec.kappa[graph.order] * spec.dt),
        "kick": cast(noise**2),
        "scale": cast(np.divide(np.sqrt(spec.dt), noise, out=np.zeros_like(noise), where=noise > 0)),
        "start": split(spec.start),
        "drive_site": spec.drive_sites,
        "drive": split(spec.drive * spec.dt),
        "drive_stride": 2 * spec.drive_sites.size if len(spec.drive) > 1 else 0,
        "port_site": spec.port_sites,
        "gain": cast(spec.port_gain),
        "weight": cast(spec.port_weight * spec.dt),
        "incoming": split(spec.incoming),
        "incoming_stride": 2 * spec.port_sites.size if len(spec.incoming) > 1 else 0,
        "bar": None if o.table is None else o.table[1:],  # n+1: the reward at n precedes the kick
        "reference": 0.0 if o.table is None else float(o.table[0]),
        "modulation_steps": pieces,
        "modulation_scale": spec.sigma_kappa * spec.dt,
        "modulation": cast(table),
        "count": o.trajectories,
        "first": o.first,
        "scores": o.scores,
        "record_every": o.record_every,
    }


def modulation_steps(spec: KernelSpec, o: Options) -> int:
    """Steps in one piece of the modulation."""
    return modulation_pieces(spec, MODULATION_TOLERANCE if o.dtype == "float32" else 0.0)[0]


def explain_overflow(spec: KernelSpec, o: Options, trajectory: int) -> None:
    """Run the trajectory again, looking after every step; raises."""
    first = trajectory & ~1 if o.antithetic else trajectory
    alone = o._replace(first=first, trajectories=2 if o.antithetic else 1, record_every=0, samples=False)
    _run_cpu(spec, alone, None, "")
    raise FloatingPointError(f"the state of trajectory {trajectory} is no longer finite at the end of the run.")


def width(spec: KernelSpec, o: Options) -> int:
    """P, the number of columns of the kernels' gradients."""
    sites = spec.omega.size
    rates = 2 * sites + spec.drive_sites.size + spec.port_sites.size if o.rates else 0
    return 2 * sites + len(spec.bonds) + rates if o.scores else 0


def _run_cpu(spec: KernelSpec, o: Options, threads: int | None, engine: str) -> KernelResult:
    from fluctua.tcmt.native import _native  # here, so that a GPU run does not need the compiled core

    given = flat(spec, o)
    given["threads"] = threads or cores()
    p, real = width(spec, o), np.dtype(o.dtype)
    records = spec.steps // o.record_every + 1 if o.record_every else 0
    out: dict[str, Any] = {
        "returns": np.empty(o.trajectories),
        "moments": np.empty((3, p)),
        "reward_sum": np.empty(spec.steps),
        "samples": np.empty((o.trajectories, p), real) if o.samples else None,
        "record": np.empty((o.trajectories, records, spec.omega.size, 2), real) if records else None,
        "overflow": np.empty(2, np.int64),
    }
    is_double = bool(real == np.float64)
    if o.binned is None:
        _native.sweep(given, out, is_double, engine)
        return result(spec, o, out)

    # The returns first; then the same noise again, with every trajectory's λ̂ known at every step.
    returns_only = {**out, "moments": np.empty((3, 0)), "samples": None}
    _native.sweep({**given, "scores": False}, returns_only, is_double, engine)
    if out["overflow"][0] < 0:
        whole_blocks = -o.trajectories % LANES
        second = {
            "bins": o.binned.bins,
            "rebin_every": o.binned.every,
            "first_returns": np.pad(out["returns"], (0, whole_blocks)),
            "centre": mean_to_go(out["reward_sum"], o.trajectories),
        }
        _native.binned({**given, **second}, out, is_double, engine)
    return result(spec, o, out)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def result(spec: KernelSpec, o: Options, out: dict[str, Any]) -> KernelResult:
    """The kernels' sums as means, errors and families; raises if a trajectory overflowed."""
    trajectory, step = (int(v) for v in out["overflow"])
    if trajectory >= 0:
        raise FloatingPointError(
            f"the state of trajectory {trajectory} is no longer finite after step {step} "
            f"(t = {step * spec.dt:g}). Lower `dt`, or look for gain: negative damping, or Kerr shifts and "
            "couplings too large for this step."
        )
    returns, count = out["returns"], o.trajectories
    value_moments = np.array(
        [[returns.sum()], [(returns**2).sum()], [((returns[::2][: count // 2] + returns[1::2]) ** 2).sum()]]
    )
    mean, _, error = statistics(value_moments, o)
    to_go = mean_to_go(out["reward_sum"], count)
    gradient = stderr = second = None
    if o.scores:
        gradient, second, stderr = (families(spec, o, v) for v in statistics(out["moments"], o))
    record = out["record"]
    return KernelResult(
        returns,
        float(mean[0]),
        float(error[0]),
        gradient,
        stderr,
        second,
        to_go,
        families(spec, o, out["samples"]) if o.samples else None,
        None if record is None else record.view(np.dtype(f"c{2 * record.dtype.itemsize}"))[..., 0],
    )


def mean_to_go(reward_sum: np.ndarray, count: int) -> np.ndarray:
    """Mean reward still to come at each time, (T+1,)."""
    return np.append(np.cumsum(reward_sum[::-1])[::-1], 0.0) / count


def statistics(moments: np.ndarray, o: Options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, mean square and standard error of the mean from Σv, Σv² and Σ(v₂ⱼ + v₂ⱼ₊₁)²."""
    mean, second = moments[0] / o.trajectories, moments[1] / o.trajectories
    units = o.trajectories // 2 if o.antithetic else o.trajectories  # the two of a pair are not independent
    square = moments[2] / 4 / max(units, 1) if o.antithetic else second
    if units < 2:
        return mean, second, np.full_like(mean, np.nan)
    return mean, second, np.sqrt(np.maximum(square - mean**2, 0) / (units - 1))


def families(spec: KernelSpec, o: Options, columns: np.ndarray) -> Families:
    """Split the kernels' columns (..., P), and put the bonds back into the order they were given in."""
    n, b, d, m = spec.omega.size, len(spec.bonds), spec.drive_sites.size, spec.port_sites.size
    sizes = [n, n, b] + ([n, n, d, m] if o.rates else [])
    omega, chi, kappa, *rest = np.split(columns, np.cumsum(sizes)[:-1], axis=-1)
    given = np.empty_like(kappa)
    given[..., neighbours(n, spec.bonds).order] = kappa
    return Families(omega, given, chi, *rest)
