"""Test of E[r | x] = 0, and the bias of the gradient where it fails.

The score takes r for noise. If the drift is wrong by b(x), so that E[r | x] = bΔt, the gradient is
biased by

    B = E[Σ_n (λ̂ₙ₊₁ − λ̄ₙ) ½ b(X_n)ᵀ Q⁻¹ ∂μ/∂θ Δt].

b is regressed on features of the state, r_i/Δt = β_i·φ(x), φ = (1, x, x³) in units of their spread.
For B the trajectories are dealt into groups; β from one group is put into B on the next, so that
the noise in β is independent of what it multiplies, and the scatter over the groups is its error:
of β and of the average together. A regression of increments on the states that they lead to is
itself biased by 1/(trajectories per group), which leaves up to about one such error in B with ten
trajectories per group, and less with more.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.estimate import sample_error
from fluctua.core.likelihood import bias, sources
from fluctua.core.likelihood import steps as model_steps
from fluctua.core.objective import Objective
from fluctua.core.process import Process, Step
from fluctua.core.scores import euler
from fluctua.core.trajectories import Times, Trajectories

GROUPS = 10


class ResidualReport(NamedTuple):
    """Whether E[r | x] is zero, and the bias of the gradient.

    p_values: of E[r_i | x] = 0 (M,).
    coefficients, stderr: β (K, M) in units of drift per spread of φ, and errors.
    features: K names.
    relative: the spread of b_i over the spread of μ_i (M,).
    bias, bias_stderr: B like θ, NaN where it was not examined: B is of the drift, and does
        not include parameters of the noise alone.
    groups: how many B was averaged over.
    in_drift, in_noise: whether a parameter was seen to act on μ and on Q (P,).
    """

    p_values: np.ndarray
    coefficients: np.ndarray
    stderr: np.ndarray
    features: tuple[str, ...]
    relative: np.ndarray
    bias: Params
    bias_stderr: Params
    groups: int
    in_drift: np.ndarray
    in_noise: np.ndarray


def examine_residuals(
    source: sources.Source,
    process: Process,
    objective: Objective,
    theta: Params,
    *,
    components: tuple[str, ...] | None = None,
    transition: model_steps.Transition = euler,
    usable: np.ndarray | None = None,
    noisy_states: bool = False,
    window: int | None = None,
) -> ResidualReport:
    """Test whether the drift fits, E[r | x] = 0, and measure the bias that it puts on the gradient.

    From four trajectories or more.

    Args:
        source: a recording or trajectories.
        process: the model under test.
        objective: what is maximised, for the bias.
        theta: θ at which it was recorded.
        components: their names, for the report.
        transition: of the model between two samples.
        usable: (M,) components whose residual is known, if channels are hidden.
        noisy_states: the states carry observation noise, which sits in r and in φ(x) both; φ is
            then taken at the sample before, which shares no noise with r. The p-values are too
            large then, never too small.
        window: steps over which a kick is remembered, for the bias of a long-run average; the
            return of a trajectory if not given.

    Returns: p-values of the components, and the bias of the gradient with its error.

    >>> trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> simulator = fl.simulator(trap, jnp.ones(1), t=jnp.linspace(0.0, 1.0, 101))
    >>> measured = simulator(key, {"k": jnp.array(0.8)}, 200)
    >>> reward = fl.Objective(running=lambda theta, x: x[0] ** 2)
    >>> wrong = {"k": jnp.array(2.0)}  # the trap has 0.8
    >>> report = insitu.calibrate.examine_residuals(measured, trap, reward, wrong)
    >>> bool(report.p_values.min() < 1e-6)
    True
    """
    data = sources.open_source(source)
    rewards = check.objective(objective)
    theta = check.parameters(theta)
    process = sources.mark_noiseless(data, process, theta)
    count, _, width = data.x.shape
    if count < 4:
        raise ValueError(f"the residuals are examined on four trajectories or more; got {count}.")
    groups = min(GROUPS, count // 2)
    named = components or tuple(f"x[{i}]" for i in range(width))
    units = bias.measure_units(data, usable)
    sums = _sum_regression(
        data, _RegressionLaw(process, transition, noisy_states), theta, units, groups
    )
    whole = sums.gram.sum(axis=0)
    variance = np.maximum(sums.square / sums.steps, 1e-300)
    inverse = np.linalg.pinv(whole, rcond=1e-10, hermitian=True)
    beta = inverse @ sums.right.sum(axis=0)
    explained = np.einsum("km,kl,lm->m", beta, whole, beta)
    rank = np.linalg.matrix_rank(whole, rtol=1e-10, hermitian=True)
    # what the noise alone puts into b̂ is taken off before the spread of b is quoted
    spread = np.maximum(explained - rank * variance, 0) / sums.steps
    each = [
        np.linalg.pinv(gram, rcond=1e-10, hermitian=True) @ right
        for gram, right in zip(sums.gram, sums.right, strict=True)
    ]
    model = bias.BiasModel(process, rewards, window)
    biases = bias.measure_bias(data, model, theta, np.stack(each), units)
    slopes = bias.find_slopes(data, process, theta)
    in_noise = np.any(np.asarray(slopes.noise) != 0, axis=0)
    # a bias is seen along all trajectories, a slope along the first
    in_drift = np.any(np.asarray(slopes.drift) != 0, axis=0) | np.any(biases != 0, axis=0)
    unknown = in_noise & ~in_drift
    mean = np.where(unknown, np.nan, biases.mean(axis=0))
    error = np.where(unknown, np.nan, sample_error(biases))
    unravel = ravel_pytree(theta)[1]
    real = jnp.result_type(float)
    return ResidualReport(
        p_values=scipy.stats.chi2.sf(explained / variance, rank),
        coefficients=beta,
        stderr=np.sqrt(np.outer(np.diag(inverse), variance)),
        features=("1", *named, *(f"({name})³" for name in named)),
        relative=np.sqrt(spread / np.maximum(sums.drift / sums.steps, 1e-300)),
        bias=unravel(jnp.asarray(mean, real)),
        bias_stderr=unravel(jnp.asarray(error, real)),
        groups=groups,
        in_drift=in_drift,
        in_noise=in_noise,
    )


class _RegressionLaw(NamedTuple):
    """Static part of the compiled sums. lagged: features are taken at the sample before."""

    process: Process
    transition: model_steps.Transition
    lagged: bool


class _Regression(NamedTuple):
    """Σφφᵀ (G, K, K) and Σφrᵀ/Δt (G, K, M) of every group; Σ(r/Δt)² and Σμ² (M,) of all steps."""

    gram: np.ndarray
    right: np.ndarray
    square: np.ndarray
    drift: np.ndarray
    steps: int


def _sum_regression(
    data: Trajectories, law: _RegressionLaw, theta: Params, units: bias.FeatureUnits, groups: int
) -> _Regression:
    width = data.x.shape[2]
    size = 1 + 2 * width
    gram = np.zeros((groups, size, size))
    right = np.zeros((groups, size, width))
    square = np.zeros(width)
    drift = np.zeros(width)
    for first, piece in sources.load_pieces(data, bias.BATCH):
        x, times = bias.prepare(piece, theta)
        sums = _regress(law, theta, x, times, piece.context, units)
        a, b, s, d = (np.asarray(v, np.float64) for v in sums)
        group = (first + np.arange(len(x))) % groups
        np.add.at(gram, group, a)
        np.add.at(right, group, b)
        square = square + s.sum(axis=0)
        drift = drift + d.sum(axis=0)
    steps = len(data.x) * (data.x.shape[1] - 1 - int(law.lagged))
    return _Regression(gram, right, square, drift, steps)


@partial(jit, static_argnums=0)
def _regress(
    law: _RegressionLaw,
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    units: bias.FeatureUnits,
) -> tuple[Array, Array, Array, Array]:
    """Σφφᵀ (E, K, K), Σφ rᵀ/Δt (E, K, M), Σ(r/Δt)² (E, M) and Σμ² (E, M) of each trajectory."""

    def one(step: Step) -> tuple[Array, Array]:
        mean = law.transition(law.process, theta, step).mean
        drift = law.process.drift(theta, step.x, step.t, step.context)
        return (step.x_next - mean) / step.dt * units.mask, drift

    k = int(law.lagged)
    steps = x.shape[1] - 1
    some = Times(times.t[k:-1], times.dt[k:])
    r, mu = model_steps.map_ends(one, x[:, k:-1], x[:, k + 1 :], some, context)
    phi = jax.vmap(jax.vmap(lambda x: bias.form_features(x, units)))(x[:, : steps - k])
    gram = jnp.einsum("enk,enl->ekl", phi, phi)
    return gram, jnp.einsum("enk,enm->ekm", phi, r), (r**2).sum(axis=1), (mu**2).sum(axis=1)
