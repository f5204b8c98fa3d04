"""The boundary of the twin correction: what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.baselines import Baseline
from fluctua.core.scores import drift_score, full_score
from fluctua.core.start import Density
from fluctua.core.types import Array, Params, Process, PyTree

if TYPE_CHECKING:
    from fluctua.core.twin import Guess, Numbers, Twin, TwinModel

HESSIAN_BYTES = 2**30
"""The most that the Hessians of a batch may take. The sweep holds a few times as much on the way."""


def twin(given: Twin, score: Callable[..., Any], process: Process) -> tuple[Process, int]:
    """The twin's process and its order, if the two make sense and the score is one that a twin can stand in for."""
    if given.order not in (1, 2):
        raise ValueError(f"`Twin.order` is 1 (a linear guess) or 2 (a quadratic one); got {given.order!r}.")
    if int(given.batch) != given.batch or given.batch < 1:
        raise ValueError(f"`Twin.batch` must be a whole number of trajectories, at least 1; got {given.batch!r}.")
    if given.theta is not None and not callable(given.theta):
        raise TypeError(
            f"`Twin.theta` is a function θ -> θ̃; got {type(given.theta).__name__}. For fixed parameters write "
            "Twin(theta=lambda theta: fixed)."
        )
    if score not in (full_score, drift_score):
        raise ValueError(
            "a Twin takes over part of the score's work by differentiating the drift and the noise, so it must be the "
            "work that the score did: use score=full_score (or drift_score), and put what your own score knows into "
            "the process."
        )
    table(given.baseline)
    own = process if given.process is None else given.process
    if not isinstance(own, Process) or own.drift is None:
        raise TypeError(
            "a twin needs a model of the drift: Twin(process=Process(drift, noise)), or no `process` at all to use the "
            f"one of the score; got {type(own).__name__}{' without a drift' if isinstance(own, Process) else ''}."
        )
    return check.process(own), int(given.order)


def table(given: Any) -> None:
    """A baseline for Λ: nothing is run besides."""
    if not isinstance(given, Baseline):
        raise TypeError(f"`Twin.baseline` must be a fluctua.Baseline, e.g. mean(); got {type(given).__name__}.")
    if given.pilot:
        raise ValueError(
            "a time-only baseline of the twin's Λ needs its `values` (T+1,), the `mean_lambda` of other trajectories; "
            "no pilot is run for it. Use Twin(baseline=mean()) or give time_only(values)."
        )


def initial(given: Any) -> Baseline:
    """A baseline for the draw of X₀, which meets V₀ and Λ₀ one after the other."""
    if not isinstance(given, Baseline) or given.pilot or given.values is not None:
        raise ValueError(
            "with a Twin the `initial_baseline` is one that needs no table, such as optimal(), mean() or none(): it is "
            "applied to the twin's guess and to what is left of it, each with its own mean."
        )
    return given


def enough(baseline: Baseline, first: Baseline, start: Any, count: int, batch: int, t: Array) -> None:
    """Every batch can leave one out where its baselines do."""
    check.baseline(baseline._replace(fewest=1), count, t)
    fewest = max(baseline.fewest, first.fewest if isinstance(start, Density) else 1)
    smallest = count // -(-count // batch)
    if smallest < fewest:
        raise ValueError(
            f"the baseline of the twin's Λ leaves one out and needs {fewest} trajectories in a batch; there "
            f"{'is' if smallest == 1 else 'are'} {smallest}. Take more, a larger Twin.batch, or Twin(baseline=none())."
        )


def parameters(given: Twin, theta: Params) -> Params:
    """θ̃."""
    if given.theta is None:
        return theta
    try:
        return check.parameters(given.theta(theta))
    except ValueError as error:
        raise ValueError(f"the twin's parameters, Twin.theta(theta): {error}") from None


def fits(twin: TwinModel, numbers: Numbers, x: Array, t: Array, context: PyTree, batch: int) -> None:
    """The twin's process has the state of the measured one, and its Hessians fit in memory."""
    one = jax.tree.map(lambda leaf: leaf[0], context)
    try:
        check.shapes(twin.process, numbers.twin, x[0], t[0], one)
    except ValueError as error:
        raise ValueError(f"the twin's process does not fit the measured states: {error}") from None
    size = x.shape[1]
    needed = size**2 * batch * x.dtype.itemsize
    if twin.order == 2 and needed > HESSIAN_BYTES:
        most = HESSIAN_BYTES // (size**2 * x.dtype.itemsize)
        advice = f"Use order=1, or Twin(batch={most}) at most." if most else "Use order=1."
        raise ValueError(
            f"a twin of order 2 keeps a Hessian of {size} × {size} numbers for each of {batch} trajectories, "
            f"{needed / 2**30:.1f} GiB. {advice}"
        )


def finite_path(xbar: Array, t: Array) -> None:
    """The noise-free path did not overflow."""
    if bool(jnp.all(jnp.isfinite(xbar))):
        return
    step = float(np.max(np.diff(np.asarray(t))))
    raise FloatingPointError(
        f"the twin's noise-free path overflowed. Its drift is unstable at its parameters with a time step of up to "
        f"{step:g}: bound Twin.theta, refine `t`, or do without a twin."
    )


def finite_guess(guess: Guess) -> None:
    """The derivatives of the noise-free return exist."""
    for name, array in (("gradient", guess.slope), ("Hessian", guess.bend)):
        if array is not None and not bool(jnp.all(jnp.isfinite(array))):
            raise FloatingPointError(
                f"the {name} of the twin's noise-free return is not finite. Its path is; a derivative of the twin's "
                "drift or of a reward on that path is not (sqrt or abs at zero?), or the adjoint grows without bound. "
                "Write it so that it has one, or give the twin a smooth `process`."
            )
