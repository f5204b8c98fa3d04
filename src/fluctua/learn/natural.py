"""Natural gradient: steps measured by how far they change the law of the paths.

The Fisher information of a path contains scores alone, F = E[Σ_n U_n U_nᵀ]: no reward enters, so it
is known far better than the gradient. Scores of different steps are uncorrelated, so that sums S_b
of U over blocks of steps give the same mean, F = E[Σ_b S_b S_bᵀ], with less variance the more
blocks there are. F⁻¹∇J is the direction in which J rises most for a given KL(θ ‖ θ + s) ≈ ½ sᵀFs.
It is computed by conjugate gradients from products F v = Σ S (S·v)/E; F is never formed.

>>> estimator = natural(ppgt(simulator, objective))
>>> training = Training(estimator, theta, optimisers.kl_ascent(0.01), trajectories=200)
>>> train(training, iterations=50)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import check, recorded, simulate, streamed
from fluctua.core import estimator as estimators
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.diffusion import check_model
from fluctua.core.estimate import Estimate
from fluctua.core.protocols import EstimatorWrapper
from fluctua.learn import fisher_information


@dataclass(frozen=True)
class Natural(EstimatorWrapper):
    """The estimator made by `natural`; its estimates have `natural` filled in."""

    estimator: Any
    damping: float = fisher_information.DAMPING
    blocks: int | None = None

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """∇θJ and F⁻¹∇θJ from the same `count` trajectories."""
        theta = check.parameters(theta)
        estimator = self.estimator
        if not isinstance(estimator, estimators.PPGT):
            estimate = estimator(key, theta, count)
            information = fisher_information.Fisher(
                estimator.scores(key, theta, count, self.blocks), count, theta
            )
        elif isinstance(
            estimator.substrate, simulate.Simulator
        ):  # replayed: the noise is a function of the key
            estimate = estimator(key, theta, count)
            information = fisher_information.Fisher(
                _streamed_rows(estimator, key, theta, count, self.blocks), count, theta
            )
        else:  # an instrument runs once
            trajectories = estimator.substrate(streamed.split_key(key)[0], theta, count)
            estimate = replace(estimator, substrate=lambda *_: trajectories)(key, theta, count)
            rows = fisher_information.sum_recorded_scores(
                estimator.method.model, theta, recorded.Recording(trajectories, theta), self.blocks
            )
            information = fisher_information.Fisher(rows, count, theta)
        return estimate._replace(natural=information.solve(estimate.gradient, damping=self.damping))


def natural(
    estimator: Any, *, damping: float = fisher_information.DAMPING, blocks: int | None = None
) -> Natural:
    """Add the natural gradient F⁻¹∇θJ to the estimates of an estimator, for `kl_ascent`.

    F comes from the scores of the same trajectories; no further ones are run.

    Args:
        estimator: made by `ppgt`, or one with a method scores(key, theta, count, blocks) -> (E·B,
            P).
        damping: added to F, relative to its diagonal.
        blocks: number of blocks of steps over which scores are summed; by default enough for 20
            rows per parameter.

    Returns: the estimator, a `Natural`.

    >>> estimate = fl.natural(estimator)(key, theta, 200)
    >>> sorted(estimate.natural)  # F⁻¹∇J, beside the plain gradient
    ['k', 's']
    """
    if not isinstance(estimator, estimators.PPGT) and not hasattr(estimator, "scores"):
        raise TypeError(
            "`natural` needs the scores of the trajectories: an estimator made by `ppgt`, or one "
            f"with `scores`; got {type(estimator).__name__}."
        )
    if isinstance(estimator, estimators.PPGT) and estimator.method.stops:
        raise ValueError(
            "the Fisher information is that of whole paths, and this objective has a `stop`. Use "
            "the estimator itself, with another rule than `kl_ascent`."
        )
    if not damping >= 0:
        raise ValueError(f"`damping` must not be negative; got {damping!r}.")
    if blocks is not None:
        check.count(blocks)
    return Natural(estimator, damping, blocks)


def _streamed_rows(
    estimator: estimators.PPGT,
    key: Array,
    theta: Params,
    count: int,
    blocks: int | None,
) -> Array:
    substrate: Any = estimator.substrate
    k_run, _ = streamed.split_key(key)
    first, context = simulate.first_state(substrate, k_run, theta)
    model = estimator.method.model
    model = terms.replace_process(
        model, check_model(model.process, model.objective, theta, first, substrate.t, context)
    )
    block_count = fisher_information.count_blocks(
        count, fisher_information.count_parameters(theta), len(substrate.t) - 1, blocks
    )
    run = streamed.Run(k_run, theta, substrate.times, substrate.x0)
    rows = _sum_scores(model, substrate.recipe, count, block_count, run)
    return rows.reshape(-1, rows.shape[-1])


@partial(jit, static_argnums=(0, 1, 2, 3))
def _sum_scores(
    model: terms.EstimatorModel, recipe: simulate.Recipe, count: int, blocks: int, run: streamed.Run
) -> Array:
    """ΣU over each block of steps, for every trajectory. Shape (B, E, P)."""
    theta = run.theta
    times = run.times
    ensemble = simulate.start_ensemble(recipe, count, run.key, theta, run.x0)
    total = times.dt.shape[0]

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, rows = carry
        n, t, dt = step
        x_next, events = simulate.transition(recipe, theta, ensemble._replace(x=x), n, t, dt)
        moment = terms.Moment(n, t, dt, x, x_next, ensemble.context, events)
        score = terms.scores(model, theta, moment, times.t[:2]).score
        return (x_next, rows.at[moment.n * blocks // total].add(score)), None

    rows = jnp.zeros((blocks, count, ravel_pytree(theta)[0].size), ravel_pytree(theta)[0].dtype)
    rows = rows.at[0].add(
        fisher_information.start_score(model, theta, ensemble.x, times, ensemble.context)
    )
    return jax.lax.scan(body, (ensemble.x, rows), simulate.enumerate_steps(times))[0][1]
