"""References in NumPy: nothing is compiled for a value that is needed once."""

from typing import NamedTuple

import numpy as np
import scipy
from scipy.signal import lfilter

STEP = 1e-5


def value_and_slope(f, theta):
    """f(θ) and its derivative by every parameter, by central differences.

    theta: a number, or a dict of numbers and arrays. The error is 1e-9 where f and its third
    derivative are of order one.
    """
    if not isinstance(theta, dict):
        point = float(theta)
        return f(point), (f(point + STEP) - f(point - STEP)) / (2 * STEP)
    point = {name: np.asarray(value, float) for name, value in theta.items()}
    slopes = {}
    for name, value in point.items():
        slope = np.zeros(value.shape)
        for place in np.ndindex(value.shape):
            sides = []
            for step in (STEP, -STEP):
                moved = value.copy()
                moved[place] += step
                sides.append(f({**point, name: moved}))
            slope[place] = (sides[0] - sides[1]) / (2 * STEP)
        slopes[name] = slope
    return f(point), slopes


class LinearChain(NamedTuple):
    """X' = FX + b + kick, with kicks of covariance Q.

    step: F (M, M). shift: b (M,). kicks: Q (M, M).
    """

    step: np.ndarray
    shift: np.ndarray
    kicks: np.ndarray

    @property
    def mean(self):
        """Of the steady state. Shape (M,)."""
        return np.linalg.solve(np.eye(len(self.shift)) - self.step, self.shift)

    @property
    def covariance(self):
        """Of the steady state, C = FCFᵀ + Q. Shape (M, M)."""
        return scipy.linalg.solve_discrete_lyapunov(self.step, self.kicks)

    def simulate(self, steps, traces, seed):
        """Traces that begin in the steady state, mode by mode. Shape (E, T+1, M)."""
        rng = np.random.default_rng(seed)
        z = rng.normal(size=(traces, steps + 1, len(self.shift)))
        first = z[:, :1] @ np.linalg.cholesky(self.covariance).T
        added = np.concatenate([first, z[:, 1:] @ np.linalg.cholesky(self.kicks).T], axis=1)
        decays, modes = np.linalg.eig(self.step)
        inputs = added @ np.linalg.inv(modes).T
        paths = [lfilter([1.0], [1.0, -r], inputs[..., j]) for j, r in enumerate(decays)]
        return self.mean + (np.stack(paths, axis=-1) @ modes.T).real


def linear_chain(slope, force, sigma, dt):
    """The Euler chain of dX = (force + slope X) dt + sigma dW. sigma: (M,) or (M, W)."""
    slope, force, sigma = (np.asarray(part, float) for part in (slope, force, sigma))
    sigma = np.diag(sigma) if sigma.ndim == 1 else sigma
    return LinearChain(np.eye(len(slope)) + dt * slope, dt * force, dt * sigma @ sigma.T)
