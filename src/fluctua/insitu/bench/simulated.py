"""Trainings by simulation with exact gradients: what an in-situ training is compared with."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua import tcmt
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate
from fluctua.insitu.bench import device
from fluctua.insitu.model import Model
from fluctua.learn.training import Training, train
from fluctua.tcmt import exact


class Exact(NamedTuple):
    """Estimator without noise: J and ∂J/∂u of a known linear network with θ = offset + gain · u.

    task: the network and its reward.
    offset, gain: of each knob, by family.
    """

    task: tcmt.Task
    offset: Params
    gain: Params

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Return J and its gradient in the settings; `key` and `count` are not used."""
        effective = {
            name: self.offset[name] + self.gain[name] * np.asarray(u) for name, u in theta.items()
        }
        value, by_theta = exact.value_and_gradient(self.task, effective)
        gradient = {
            n: jnp.asarray(g * self.gain[n], jnp.asarray(theta[n]).dtype)
            for n, g in by_theta.items()
        }
        zero = jax.tree.map(jnp.zeros_like, gradient)
        return Estimate(
            gradient,
            zero,
            jax.tree.map(jnp.square, gradient),
            jnp.asarray(value),
            jnp.asarray(0.0),
            count,
        )


def train_by_simulation(
    sheet: device.Sheet,
    model: Model,
    points: int,
    *,
    hidden: device.Hidden | None,
    shots: float,
    iterations: int,
) -> tuple[Params, float]:
    """Train settings by simulation with exact gradients; returns them with their simulated J.

    hidden: parameters of the box; None takes those of the data sheet.
    shots: trajectories after which the ageing of the box is evaluated.

    With exact gradients: the best that a simulation could do.
    """
    network = sheet.nominal if hidden is None else sheet.nominal.replace(gamma=hidden.gamma)
    dt = sheet.interval / sheet.oversample
    task = tcmt.transmission(network, horizon=(points - 1) * sheet.interval, dt=dt)
    if hidden is None:
        offset = {name: np.zeros(np.shape(v)) for name, v in model.start.items()}
        gain = {name: np.ones(np.shape(v)) for name, v in model.start.items()}
    else:
        offset = device.compute_offsets(sheet, hidden, shots)
        gain = hidden.gain
    estimator = Exact(task, offset, gain)
    rule = optax.adam(optax.cosine_decay_schedule(0.05, iterations, alpha=0.05))
    bounds = (model.lower, model.upper)
    training = Training(estimator, model.start, rule, trajectories=1, bounds=bounds)
    *_, last = train(training, iterations)
    return last.next_theta, float(estimator(jax.random.key(0), last.next_theta, 1).value)
