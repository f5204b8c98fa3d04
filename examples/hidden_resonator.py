"""Hidden resonators
=================

Three resonators of which only the last is read, through noise: the hidden ones are trained as well.

The network is linear, so that its gradient is known. Run it with
`python examples/hidden_resonator.py`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl
from fluctua import tcmt

jax.config.update("jax_enable_x64", True)

# A driven chain; the reward is the power that leaves at its end.
network = tcmt.chain(3)
task = tcmt.transmission(network, horizon=4.0, dt=0.05, drive=tcmt.Drive(0, 3.0))
theta = {"omega": jnp.array([0.8, -1.2, 0.5]), "kappa": jnp.ones(2)}

# Of the state [Re ψ, Im ψ] the readout gives both quadratures of site 2, with noise of variance
# 0.02 on each.
quadratures = [2, 5]
process = fl.Observed(task.process, observe=np.eye(6)[quadratures], noise=0.02, start=task.start)


send = tcmt.outputs(network, task.drives)  # s⁻ at a state; other sites do not feed the lead


def power(theta, y, t):
    state = jnp.zeros(6).at[jnp.array(quadratures)].set(y)
    return jnp.abs(send(theta, state, t)[1]) ** 2 / (3.0**2 * 4.0)


objective = fl.Objective(running=power)
estimator = fl.ppgt(fl.simulator(process, t=task.t), objective)

estimate = estimator(jax.random.key(0), theta, 2000)
_, of_network = tcmt.exact.value_and_gradient(task, theta)  # linear, so known
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for name, value in of_network.items():
    for i, g in enumerate(value):
        measured, error = estimate.gradient[name][i], estimate.stderr[name][i]
        print(
            f"∂J/∂{name}[{i}] = {measured:7.4f} ± {error:.4f}   exact {g:7.4f}   "
            f"{(measured - g) / error:+.1f} σ"
        )
        axes.errorbar(f"{name}[{i}]", measured, 2 * error, fmt="C0o", capsize=4)
        axes.plot(f"{name}[{i}]", g, "kx")
axes.axhline(0, color="0.6", lw=0.8)
axes.set(ylabel="∂J ± 2 standard errors; × exact")

training = fl.train(
    fl.Training(estimator, theta, optax.adam(0.1), trajectories=300, seed=1), iterations=30
)
trained = list(training)[-1].next_theta
before, after = tcmt.exact.value(task, theta), tcmt.exact.value(task, trained)
print(f"transmission of the chain: {before:.3f} before, {after:.3f} after 30 × 300 trajectories")
plt.show()
