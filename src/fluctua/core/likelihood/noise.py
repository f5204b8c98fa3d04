"""The diffusion from the quadratic variation, and other properties of the noise from residuals.

r_n = x_{n+1} − E[x_{n+1} | x_n] of a system without observation noise has variance 2QΔt, and no
memory. With observation noise of variance s² on each sample, r_n ≈ kick + ε_{n+1} − ε_n, so

    E[r_n²] = 2QΔt + 2s²,     E[r_n r_{n+1}] = −s²:

the intercept and the slope of the quadratic variation against the lag. Every number comes with an
error from the scatter of single trajectories, times Student's factor for their number: ±1.96 of
them cover 95 %.

Over an interval Δ that needs local linearisation the kicks of all components reach each other
through F(s) = e^{Js}, J = ∂μ/∂x, and so does the observation noise of the sample before. For a
diagonal Q and s²,

    E[r_i²] = 2Δ Σ_j W_ij Q_j + s_i² + Σ_j F_ij² s_j²,     W_ij = ∫₀^Δ F_ij(s)² ds/Δ,     E[r_i
    r_i'] = −F_ii s_i²,

which is undone (`spreading.py`). A component without noise of its own has Q = 0, known; its
residuals are left to the guard (`guard.py`). Noise of its readout shows in E[r r'] as that of any
other. For Euler's transition W = F = 1, and a residual is of its own component alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from scipy.linalg import toeplitz

from fluctua.core import arrays, check
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import sample_error
from fluctua.core.likelihood import sources, spreading
from fluctua.core.likelihood.steps import Transition, map_steps, with_diffusion
from fluctua.core.process import Process, Step
from fluctua.core.scores import euler
from fluctua.core.trajectories import Times, Trajectories

LAGS = 8
BATCH = 64
CLEAR = 5.0
"""Standard errors beyond which observation noise counts as seen, and is taken off the diffusion."""

DOUBT = 2.0
"""Standard errors beyond which observation noise that does not count as seen is put into the error
of Q.
"""


class NoiseFit(NamedTuple):
    """One entry for each component of the state (M,).

    diffusion, diffusion_stderr: Q, free of observation noise where `observation_seen`.
    quadratic_variation, quadratic_variation_stderr: E[r²]/2Δt as it is.
    observation_variance, observation_stderr: s².
    observation_seen: whether s² stands out from its error.
    ratio, ratio_stderr: Q over the process's own.
    correlation: of the kicks (M, M).
    autocorrelation: of the kicks (LAGS, M).
    whiteness: p-values of Ljung and Box at lags 2…8 (M,); lag 1 is that of s².
    state_dependence: relative change of Q per standard deviation of x_i and of x_i² (M, 2).
    state_dependence_z: the same over its standard error.
    transitions, trajectories: used.
    """

    diffusion: np.ndarray
    diffusion_stderr: np.ndarray
    quadratic_variation: np.ndarray
    quadratic_variation_stderr: np.ndarray
    observation_variance: np.ndarray
    observation_stderr: np.ndarray
    observation_seen: bool
    ratio: np.ndarray
    ratio_stderr: np.ndarray
    correlation: np.ndarray
    autocorrelation: np.ndarray
    whiteness: np.ndarray
    state_dependence: np.ndarray
    state_dependence_z: np.ndarray
    transitions: int
    trajectories: int = 0


def fit_noise(
    source: sources.Source,
    process: Process,
    theta: Params,
    *,
    transition: Transition = euler,
    diffusion: np.ndarray | None = None,
    usable: np.ndarray | None = None,
) -> NoiseFit:
    """Fit diffusion and observation noise, and test whether residuals are white.

    The drift is taken for known.

    Args:
        source: a recording or trajectories.
        process: whose drift is known.
        theta: its parameters.
        transition: of the model between two samples.
        diffusion: Q (M,) in place of the process's own, which `ratio` is relative to.
        usable: (M,) components whose residual is known, if channels are hidden. Of the others
            nothing is: they get that Q ± all of it, and the mean s².

    Returns: each with its error.

    >>> fit = insitu.calibrate.fit_noise(recording, model.process, model.theta)
    >>> fit.diffusion.shape  # Q of both quadratures of six resonators
    (12,)
    """
    data = sources.open_source(source)
    theta = check.parameters(theta)
    process = sources.mark_noiseless(data, process, theta)
    law = _NoiseLaw(process, transition)
    parts: list[Any] = []
    cross: Any = 0.0
    for _, piece in sources.load_pieces(data, BATCH):
        if len(piece.t) < LAGS + 3:
            raise ValueError(
                f"the noise is fitted from {LAGS + 3} times per trajectory or more; got "
                f"{len(piece.t)}."
            )
        x = jnp.asarray(piece.x, arrays.working_dtype(theta, piece.x))
        states = Trajectories(piece.t, x, piece.context)
        each, products = _sum_moments(law, theta, states, check.grid(piece.t), diffusion)
        parts.append(jax.tree.map(lambda v: np.asarray(v, np.float64), each))
        cross = cross + np.asarray(products, np.float64)
    sums = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    width = sums["rate"].shape[1]
    noiseless = np.isin(np.arange(width), process.noiseless)
    _refuse_constant(np.where(noiseless, 1, sums["rate"].mean(axis=0)))
    # those of noiseless components may be nothing at all, and are no unit for the rest
    sums["e2"] = np.where(noiseless, 1, sums["e2"])
    if transition is euler and process.integrator == "euler":
        mixed = spreading.Spreading(np.eye(width), np.eye(width), np.ones(width))
    else:
        first = next(sources.load_pieces(data, BATCH))
        mixed = spreading.measure_spreading(process, theta, first.trajectories)
    mask = np.ones(width, bool) if usable is None else np.asarray(usable, bool)
    fit = _finish_fit(sums, cross, len(data.t) - 1, mixed, mask, noiseless)
    if not mask.all():
        fit = _leave_hidden(fit, mask, sums["model"].mean(axis=0))
    return _replace_rest(~noiseless, fit, WITHOUT_NOISE) if noiseless.any() else fit


class _NoiseLaw(NamedTuple):
    """Static part of the compiled sums."""

    process: Process
    transition: Transition


def _refuse_constant(rate: np.ndarray) -> None:
    """Refuse residuals that are no fluctuations: overflowed, or zero to the last digit.

    rate: E[r²]/2Δt (M,).
    """
    if not np.all(np.isfinite(rate)):
        raise ValueError(
            f"the residuals of component {int(np.argmin(np.isfinite(rate)))} overflowed: use "
            "units in which states are of order one, or record in double precision."
        )
    if not np.all(rate > 0):
        raise ValueError(
            f"component {int(np.argmin(rate))} does not fluctuate: its residuals are zero. Is its "
            "channel connected? The score divides by the noise."
        )


@partial(arrays.jit, static_argnums=0)
def _sum_moments(
    law: _NoiseLaw, theta: Params, states: Trajectories, times: Times, q: Array | None
) -> tuple[dict[str, Array], Array]:
    """Means over the steps of each trajectory, (E, …), and Σ e eᵀ (M, M)."""
    process = with_diffusion(law.process, q)
    x = states.x
    dt = times.dt

    def one(step: Step) -> tuple[Array, Array]:
        mean, covariance = law.transition(process, theta, step)
        return step.x_next - mean, jnp.diagonal(covariance)

    r, c = map_steps(one, x, times, states.context)
    if process.noiseless:
        c = jnp.where(c > 0, c, 1)
    e = r / jnp.sqrt(c)
    before = x[:, :-1]
    lagged = [jnp.mean(e[:, k:] * e[:, :-k], axis=1) for k in range(1, LAGS + 1)]
    scaled = r / jnp.sqrt(dt)[:, None]
    sums = {
        "model": jnp.mean(c / dt[:, None], axis=1) / 2,
        "rate": jnp.mean(scaled**2, axis=1) / 2,  # E[r²]/2Δt
        "next": jnp.mean(r[:, 1:] * r[:, :-1], axis=1),  # E[r r']
        "next_rate": jnp.mean(r[:, 1:] * r[:, :-1] / dt[1:, None], axis=1),
        "e2": jnp.mean(e**2, axis=1),
        "lags": jnp.stack(lagged, axis=1),
        "e2_next": jnp.mean(r[:, 1:] * r[:, :-1] / jnp.sqrt(c[:, 1:] * c[:, :-1]), axis=1),
    }
    for name, f in (("x", before), ("xx", before**2)):
        sums |= {
            name: f.mean(axis=1),
            f"{name}_2": (f**2).mean(axis=1),
            f"{name}_e2": (f * e**2).mean(axis=1),
        }
    return sums, jnp.einsum("eni,enj->ij", e, e)


def is_observation_seen(variance: np.ndarray, stderr: np.ndarray) -> bool:
    """Whether s² of all components together stands out by more than `CLEAR` standard errors.

    variance, stderr: s² and its error (M,).
    """
    return _combined_significance(variance, stderr) > CLEAR


def _combined_significance(variance: np.ndarray, stderr: np.ndarray) -> float:
    """The weighted mean of s² over its error; zero where errors are not known."""
    if not np.all(np.isfinite(stderr) & (stderr > 0)):
        return 0.0
    return float(np.sum(variance / stderr**2) / np.sqrt(np.sum(1 / stderr**2)))


WITHOUT_NOISE: dict[str, float] = {
    "diffusion": 0.0,
    "diffusion_stderr": 0.0,
    "quadratic_variation": 0.0,
    "quadratic_variation_stderr": 0.0,
    "ratio": 1.0,
    "ratio_stderr": 0.0,
    "autocorrelation": 0.0,
    "whiteness": 1.0,
}
"""Result of a fit for a component without noise, but for the rows of `OF_STATE`, which are zero.
"""

OF_STATE = ("state_dependence", "state_dependence_z")


def _leave_hidden(fit: NoiseFit, usable: np.ndarray, model: np.ndarray) -> NoiseFit:
    """The fit without the residuals that lack what a hidden channel does. model: Q (M,)"""
    weight = usable / fit.observation_stderr**2
    s2 = np.sum(weight * fit.observation_variance) / weight.sum()
    error = weight.sum() ** -0.5
    of_model = (
        "diffusion",
        "diffusion_stderr",
        "quadratic_variation",
        "quadratic_variation_stderr",
    )
    others = WITHOUT_NOISE | dict.fromkeys(of_model, model) | {"ratio_stderr": 1.0}
    return _replace_rest(
        usable, fit, others | {"observation_variance": s2, "observation_stderr": error}
    )


def _replace_rest(
    keep: np.ndarray, fit: NoiseFit, others: Mapping[str, np.ndarray | float]
) -> NoiseFit:
    """The fit with `others` in place of its results for components that are not kept. keep: (M,)"""
    replaced: dict[str, Any] = {
        name: np.where(keep, getattr(fit, name), other) for name, other in others.items()
    }
    pair = keep & keep[:, None]
    of_state: dict[str, Any] = {
        name: np.where(keep[:, None], getattr(fit, name), 0.0) for name in OF_STATE
    }
    return fit._replace(
        correlation=np.where(pair, fit.correlation, np.eye(len(keep))), **replaced, **of_state
    )


def _finish_fit(
    sums: dict[str, np.ndarray],
    cross: np.ndarray,
    steps: int,
    mixed: spreading.Spreading,
    usable: np.ndarray,
    noiseless: np.ndarray,
) -> NoiseFit:
    """The fit from sums of E trajectories of so many steps. cross: Σ e eᵀ (M, M)."""
    count, size = sums["rate"].shape
    factor = sources.student_factor(count - 1)

    def mean(v: np.ndarray) -> np.ndarray:
        return v.mean(axis=0)

    def error(v: np.ndarray) -> np.ndarray:
        if count == 1:
            return np.full(v.shape[1:], np.nan)
        return sample_error(v, factor)

    s2 = -mean(sums["next"]) / mixed.own
    s2_error = error(sums["next"] / mixed.own)
    s2_error = np.where(noiseless & (s2_error == 0), np.inf, s2_error)
    noisy = usable & ~noiseless
    seen = is_observation_seen(s2[noisy], s2_error[noisy])
    # what an Euler step leaves out of a noiseless component makes its neighbouring residuals alike:
    # only noise of the readout makes them opposed
    seen = seen or bool(np.any((s2 > CLEAR * s2_error)[usable & noiseless]))
    if noiseless.any():  # their Q is zero and known: the others' residuals determine the others'
        mixed = mixed._replace(
            weights=np.where(noiseless | noiseless[:, None], np.eye(size), mixed.weights)
        )
    blur = -sums["next_rate"] / mixed.own if seen else np.zeros_like(sums["rate"])  # s²/Δt
    own = sums["rate"] - (blur + blur @ mixed.squares.T) / 2  # Euler: E[r²]/2Δt + E[r r']/Δt
    corrected = np.linalg.solve(mixed.weights, own.T).T
    ratio = sums["e2"] + (2 * sums["e2_next"] if seen else 0.0)
    rho = mean(sums["lags"]) / mean(sums["e2"])  # (LAGS, M)
    box = _test_whiteness(rho, count * (steps - np.arange(1, LAGS + 1)), seen)
    spread = error(corrected)
    if not seen and _combined_significance(s2[noisy], s2_error[noisy]) > DOUBT:
        # left in Q, because taking it off costs more than it is worth; the error of Q has it
        rate = -mean(sums["next_rate"]) / mixed.own
        weight = noisy / s2_error**2
        left = np.full(size, np.sum(weight * rate) / np.sum(weight))
        spread = np.hypot(spread, np.linalg.solve(mixed.weights, (left + mixed.squares @ left) / 2))
    dependence = _measure_dependence(sums, count)
    scale = np.sqrt(np.where(noiseless, 1, np.diag(cross)))
    return NoiseFit(
        diffusion=mean(corrected),
        diffusion_stderr=spread,
        quadratic_variation=mean(sums["rate"]),
        quadratic_variation_stderr=error(sums["rate"]),
        observation_variance=s2,
        observation_stderr=s2_error,
        observation_seen=seen,
        ratio=mean(ratio),
        ratio_stderr=error(ratio),
        correlation=cross / scale / scale[:, None],
        autocorrelation=rho,
        whiteness=scipy.stats.chi2.sf(box, LAGS - 1),
        state_dependence=dependence.slope,
        state_dependence_z=dependence.z,
        transitions=count * steps,
        trajectories=count,
    )


def _test_whiteness(rho: np.ndarray, products: np.ndarray, seen: bool) -> np.ndarray:
    """χ² of ρ₂…ρ₈ (LAGS, M), each a mean of so many products (LAGS,). (M,)

    The moving average that ε makes of r, with ρ₁, widens the scatter of every later ρ_k and ties
    neighbours together (Bartlett): n Cov[ρ_k, ρ_l] = 1 + 2ρ₁², 2ρ₁, ρ₁² for |k − l| = 0, 1, 2.
    """
    statistics = []
    for first, later in zip(rho[0] if seen else np.zeros(rho.shape[1]), rho[1:].T, strict=True):
        first = np.clip(first, -0.5, 0.5)  # as far as a moving average goes
        tie = toeplitz(np.pad([1 + 2 * first**2, 2 * first, first**2], (0, LAGS - 4)))
        z = later * np.sqrt(products[1:])
        statistics.append(z @ np.linalg.solve(tie, z))
    return np.array(statistics)


class _Dependence(NamedTuple):
    """Slopes of e² against x_i and x_i², and their z. (M, 2) each"""

    slope: np.ndarray
    z: np.ndarray


def _measure_dependence(sums: dict[str, np.ndarray], count: int) -> _Dependence:
    """Slopes of e² against x_i and x_i², in units of Q per standard deviation, and their z.

    (M, 2) each
    """
    slopes = []
    zs = []
    e2 = sums["e2"].mean(axis=0)
    for name in ("x", "xx"):
        f = sums[name].mean(axis=0)
        spread = np.sqrt(np.maximum(sums[f"{name}_2"].mean(axis=0) - f**2, 1e-300))
        # mean of (e² − ē²)(f − f̄)
        each = sums[f"{name}_e2"] - e2 * sums[name] - f * sums["e2"] + e2 * f
        slope = each.mean(axis=0) / (spread * e2)
        slopes.append(slope)
        zs.append(
            slope / np.maximum(sample_error(each) / (spread * e2), 1e-300)
            if count > 1
            else np.zeros_like(slope)
        )
    return _Dependence(np.stack(slopes, axis=1), np.stack(zs, axis=1))
