"""Objects that tests share, so that JAX compiles what is made of them once."""

import functools

import jax


def keep_per_precision(make):
    """Make the object of the same arguments once in single and once in double precision."""

    @functools.cache
    def make_once(_double, *arguments):
        return make(*arguments)

    @functools.wraps(make)
    def give(*arguments):
        return make_once(jax.config.jax_enable_x64, *arguments)

    return give
