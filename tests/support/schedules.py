"""Drifts that read a table of parameters by the time, in the ways that users write it."""

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl

KNOTS = np.linspace(0.0, 0.9, 150)  # the last steps are beyond them


def read_by_interp(theta, t):
    """Between two knots, and the last one beyond them."""
    return jnp.interp(t, KNOTS, theta)


def read_by_index(theta, t):
    """One of the knots; an index beyond the last is that of the last."""
    return theta[(170 * t).astype(int)]


def read_by_slice(theta, t):
    """The mean of four neighbours, whose first is a number of the time."""
    first = (100 * t).astype(int)
    return jax.lax.dynamic_slice(theta, (first,), (4,)).mean()


def read_row(theta, t):
    """A row of a table with five columns, weighed by the time."""
    return theta.reshape(30, 5)[(25 * t).astype(int)] @ jnp.array([1.0, t, 0.5, 0.0, -t])


SCHEDULES = {
    "interp": read_by_interp,
    "index": read_by_index,
    "slice": read_by_slice,
    "row": read_row,
}


def make_schedule(read):
    """A trap whose centre is read from a table by the time; the table has a price as well."""

    def drift(theta, x, t):
        return 3 * (read(theta, t) * jnp.array([1.0, -0.5]) - x)

    def running(theta, x, t):
        return -jnp.sum((x - 0.3) ** 2) - 0.1 * read(theta, t) ** 2 + 0.01 * theta[3] * x[0]

    process = fl.Process(drift, lambda theta, x, t: 0.4 * jnp.ones_like(x))
    return process, fl.Objective(running=running)
