"""Optimisers: the paper's ascent for optax, optax's own by name, and growing ensembles.

    θ ← Π[θ + α ⟨G⟩/h̃],   h̃ = clamp(h, h̄/ρ, ρh̄),   h̄ ← βh̄ + (1 − β)h,   h = √⟨G²⟩ + ε

⟨·⟩ is over the single trajectories of one iteration, so ⟨G⟩/h is the signal-to-noise ratio of one
trajectory: a component moves by at most α, and only as far as it is known (Optimization Details).

For the escalation, `values` is the history of J, one number per iteration: values[i] belongs to
iteration i, and l = len(values) is the next iteration. W is the window. Each rule of the paper is
one function; `find_escalation` combines them. The paper leaves three things open, read here as
follows.

- A falling trend has stopped improving too: only a significantly rising one prevents escalation.
- A breakpoint is admissible between the start of the fit and l − W, where the plateau was seen.
- A tier must be W iterations old before it is judged: earlier values had a smaller ensemble.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua.core.arrays import Params
from fluctua.core.words import close_match

__all__ = ["kl_ascent", "rms_ascent"]

WINDOW = 100
"""W, in iterations."""
BUDGETS = (*range(1_000, 20_001, 1_000), 25_000, 30_000)
"""The paper's ensemble sizes."""
FIT_FROM = 12
FIT_TO = 2
"""The quadratic is fitted on [l − 12W, l − 2W]."""


class RmsAscentState(NamedTuple):
    """State of `rms_ascent`.

    average: h̄, with the structure of θ.
    iterations: so far.
    """

    average: Params
    iterations: jax.Array


def rms_ascent(
    learning_rate: float = 0.05, *, rho: float = 10.0, beta: float = 0.9, epsilon: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The paper's rule as an optax transformation (Optimization Details).

    Its `update` needs `second_moment=`, which `train` passes. Like every optax rule it takes the
    gradient of a loss, −⟨G⟩, and its updates are added to θ. The average starts at the first h, so
    the first clamp does nothing. It averages h itself and not the clamped h̃, so a lasting change
    of scale is followed.

    Args:
        learning_rate: α, the size of a step.
        rho: the factor by which h may leave its average before it is clamped.
        beta: decay rate of the average.
        epsilon: keeps the denominator from zero.

    Returns: an optax transformation.

    >>> rule = fl.optimisers.rms_ascent(0.05)
    >>> training = fl.Training(estimator, theta, rule, trajectories=200, bounds=(0.1, 2.0))
    >>> for record in fl.train(training, iterations=2):
    ...     print(round(float(record.theta["k"]), 2))  # a stiffer trap keeps the bead at 0
    0.8
    0.83
    """
    for name, value, fits in (
        ("learning_rate", learning_rate, learning_rate > 0),
        ("rho", rho, rho >= 1),
        ("beta", beta, 0 <= beta < 1),
        ("epsilon", epsilon, epsilon >= 0),
    ):
        if not fits:
            raise ValueError(
                f"`{name}` = {value} does not fit: learning_rate > 0, rho ≥ 1, 0 ≤ beta < 1, "
                "epsilon ≥ 0."
            )

    def init(theta: Params) -> RmsAscentState:
        return RmsAscentState(jax.tree.map(jnp.zeros_like, theta), jnp.zeros((), jnp.int32))

    def update(
        updates: Params,
        state: RmsAscentState,
        params: Params = None,
        *,
        second_moment: Params = None,
        **_: Any,
    ) -> tuple[Params, RmsAscentState]:
        if second_moment is None:
            raise ValueError(
                "rms_ascent needs the mean square over single trajectories: call update(..., "
                "second_moment=estimate.second_moment), as `fluctua.train` does."
            )
        h = jax.tree.map(lambda square: jnp.sqrt(square) + epsilon, second_moment)
        average = jax.tree.map(
            lambda old, new: jnp.where(state.iterations == 0, new, beta * old + (1 - beta) * new),
            state.average,
            h,
        )
        # h > 0 by ε, so a component without any signal, whose G is 0 in every trajectory, stays
        # where it is
        steps = jax.tree.map(
            lambda descent, new, mean: (
                -learning_rate * descent / jnp.clip(new, mean / rho, mean * rho)
            ),
            updates,  # −⟨G⟩: two signs, uphill
            h,
            average,
        )
        return steps, RmsAscentState(average, state.iterations + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def kl_ascent(kl: float = 0.01) -> optax.GradientTransformationExtraArgs:
    """Natural-gradient steps of a fixed length in probability, about `kl` nats (TRPO).

        θ ← θ + √(2 kl / ∇JᵀF⁻¹∇J) F⁻¹∇J

    Its `update` needs `natural=`, which `train` passes from the estimates of `natural`. The step
    has the same length also where the gradient is all noise: add a decay (`optax.chain`) to average
    the noise.

    Args:
        kl: Kullback–Leibler divergence of a step, in nats per trajectory.

    Returns: an optax transformation.

    >>> rule = fl.optimisers.kl_ascent(0.01)
    >>> training = fl.Training(fl.natural(estimator), theta, rule, trajectories=200)
    >>> for record in fl.train(training, iterations=2):
    ...     print(round(float(record.theta["k"]), 2))
    0.8
    0.88
    """
    if not kl > 0:
        raise ValueError(f"`kl` must be positive; got {kl!r}.")

    def update(
        updates: Params,
        state: optax.EmptyState,
        params: Params = None,
        *,
        natural: Params = None,
        **_: Any,
    ) -> tuple[Params, optax.EmptyState]:
        if natural is None:
            raise ValueError(
                "kl_ascent needs F⁻¹∇J: wrap the estimator, train(key, theta, natural(estimator), "
                "...)."
            )
        rise = -sum(
            jnp.vdot(g, n)
            for g, n in zip(jax.tree.leaves(updates), jax.tree.leaves(natural), strict=True)
        )
        size = jnp.where(rise > 0, jnp.sqrt(2 * kl / jnp.where(rise > 0, rise, 1)), 0)
        return jax.tree.map(lambda n: (size * n).astype(n.dtype), natural), state

    return optax.GradientTransformationExtraArgs(lambda theta: optax.EmptyState(), update)


def scale_by_family(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply the updates of each family of a dict θ by its own factor.

    Adam moves every component by about the learning rate, though a relevant Kerr coefficient is a
    thousandth of a relevant coupling.
    """
    return optax.stateless(
        lambda updates, _: {name: factors.get(name, 1.0) * value for name, value in updates.items()}
    )


def scale_by_decay(decay: float) -> optax.GradientTransformation:
    """Multiply the updates of iteration l by 1/√(1 + l/decay), so that noise averages out.

    The schedule does not depend on the length of the training, so that a training can be continued.
    """
    return optax.scale_by_schedule(lambda iteration: (1 + iteration / decay) ** -0.5)


def make_optimiser(
    rule: str,
    learning_rate: float,
    options: Mapping[str, Any],
    scale: Mapping[str, float] | None = None,
    decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser "paper", or any of optax that takes a learning rate: "adam", "sgd", "lion", …

    >>> make_optimiser("adam", 0.02, {"b1": 0.8}, {"chi": 0.01})
    """
    make = rms_ascent if rule == "paper" else getattr(optax, rule, None)
    names = list(inspect.signature(make).parameters) if callable(make) else []
    if not names or names[0] != "learning_rate":
        known = ["paper", *sorted(n for n in dir(optax) if _takes_rate(getattr(optax, n)))]
        raise ValueError(
            '`rule` is "paper" or an optimiser of optax, such as "adam", "sgd", "lion" or '
            f'"adabelief"; got {rule!r}.' + close_match(rule, known)
        )
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ValueError(
            f"{rule} has no option {unknown[0]!r}; it has {', '.join(names[1:])}."
            + close_match(unknown[0], names[1:])
        )
    chosen = optax.with_extra_args_support(make(learning_rate, **options))  # type: ignore[misc]
    further = (
        [scale_by_family(scale)] if scale and any(factor != 1 for factor in scale.values()) else []
    )
    further += [scale_by_decay(decay)] if decay else []
    return optax.with_extra_args_support(optax.chain(chosen, *further)) if further else chosen


def _takes_rate(thing: Any) -> bool:
    if isinstance(thing, type) or not callable(thing):
        return False
    try:
        return next(iter(inspect.signature(thing).parameters), None) == "learning_rate"
    except (TypeError, ValueError):
        return False


# --------------------------------------------------------------------------------------- escalation


class Trend(NamedTuple):
    """A least-squares line.

    slope: per iteration.
    stderr: standard error of the slope, from the residuals.
    """

    slope: float
    stderr: float


def fit_trend(values: Sequence[float] | np.ndarray) -> Trend:
    """Fit a straight line to `values`, at least three of them."""
    y = np.asarray(values, float)
    if y.ndim != 1 or len(y) < 3:
        raise ValueError(
            f"a trend and its error need a sequence of at least 3 values; got shape {y.shape}."
        )
    x = np.arange(len(y)) - (len(y) - 1) / 2
    spread = x @ x
    slope = float(x @ y / spread)
    residual = y - y.mean() - slope * x
    return Trend(slope, math.sqrt(float(residual @ residual) / (len(y) - 2) / spread))


def is_rising(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> bool:
    """Whether the slope is positive beyond its two-sided confidence interval (Student's t)."""
    slope, stderr = fit_trend(values)
    return slope > student_quantile((1 + confidence) / 2, len(values) - 2) * stderr


def find_onset(values: Sequence[float] | np.ndarray, window: int = WINDOW) -> int | None:
    """Iteration at which the plateau began: where the earlier rise, extrapolated, meets its mean.

    A parabola is fitted to [l − 12W, l − 2W]; of its intersections with the mean of the last W
    values the rising one counts. None if there is none, or none between l − 12W and l − W.
    """
    l = len(values)  # noqa: E741, the paper's letter
    level = float(np.mean(values[-window:]))
    begin = l - FIT_FROM * window
    end = l - FIT_TO * window
    if begin < 0:
        return None
    x = np.arange(begin, end)
    middle = (begin + end - 1) / 2  # in units of half the span the fit is well conditioned
    half = (end - begin) / 2
    crossing = find_rising_root(
        *np.polyfit((x - middle) / half, np.asarray(values[begin:end], float) - level, 2)
    )
    if crossing is None:
        return None
    crossing_at = middle + half * crossing
    return math.floor(crossing_at) if begin <= crossing_at <= l - window else None


def find_rising_root(a: float, b: float, c: float) -> float | None:
    """The x with ax² + bx + c = 0 and 2ax + b > 0, or None."""
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return None  # never met, or only touched: there it does not rise
    root = math.sqrt(discriminant)  # the slope 2ax + b at the wanted root
    # two forms of one number: each is used where it subtracts nothing
    return -2 * c / (b + root) if b >= 0 else (root - b) / (2 * a) if a != 0 else None


def find_escalation(
    values: Sequence[float] | np.ndarray,
    tier_start: int,
    *,
    window: int = WINDOW,
    confidence: float = 0.95,
) -> int | None:
    """None while J rises; else the iteration from which to continue with the next ensemble size.

    The result is `len(values)` to continue in place, before the fit window exists; otherwise the
    plateau's onset, or l − W where no onset is admissible; or `tier_start` if that lies within W of
    it.

    tier_start: iteration at which the present ensemble size began.
    """
    l = len(values)  # noqa: E741
    if l - tier_start < window or is_rising(values[-window:], confidence):
        return None
    if l < FIT_FROM * window:
        return l
    begin_of_plateau = find_onset(values, window)
    breakpoint_ = l - window if begin_of_plateau is None else begin_of_plateau
    return tier_start if breakpoint_ < tier_start + window else breakpoint_


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t by Hill's expansion.

    Accurate to 1e-3 from 8 degrees of freedom on, to 1e-5 from 30.
    """
    z = NormalDist().inv_cdf(probability)
    n = degrees
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / n + g2 / n**2 + g3 / n**3 + g4 / n**4
