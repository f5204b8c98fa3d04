"""A device that stands for an instrument: a network that is not what its settings say, measured state by state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.draws import philox_seed
from fluctua.core.simulate import noise_key
from fluctua.core.types import Array, Params, Trajectories
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.fused import kernel_spec
from fluctua.tcmt.kernel.run import run


@dataclass(frozen=True)
class Device:
    """A substrate on the CPU's kernel: (key, theta, count) -> Trajectories.

    Args:
        task: the network as it is; its graph may have bonds that nobody knows of.
        hidden: θ -> its parameters.
        sample_every: steps between two samples.
        readout: standard deviation of the measurement, on each quadrature of each sample.

    Without readout its states are those of `task.simulator()(key, hidden(theta), count)`.

    """

    task: Experiment
    hidden: Callable[[Params], Params]
    sample_every: int = 1
    readout: float = 0.0

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Set θ and measure."""
        spec = kernel_spec(self.task, self.hidden(theta))
        measured = run(spec, philox_seed(noise_key(key)), count, scores=False, record_every=self.sample_every)
        assert measured.trajectories is not None
        psi = measured.trajectories
        x = np.concatenate([psi.real, psi.imag], axis=-1)
        if self.readout:
            noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
            x = x + self.readout * np.asarray(noise, x.dtype)
        context = self.task.context
        if context is None:
            return Trajectories(self.task.t[:: self.sample_every], x)
        draws = jax.vmap(lambda j: context.draw(noise_key(key), j))(jnp.arange(count))
        return Trajectories(self.task.t[:: self.sample_every], x, draws)
