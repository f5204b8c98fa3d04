"""Where the Wiener increments come from.

Every source is counter based: the normals of a step are a pure function of (key, trajectory, step), so
nothing is stored, any trajectory can be replayed alone, and the first E of 2E trajectories are the same
as E.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fluctua.core.types import Array, PyTree


class Wiener(NamedTuple):
    """A source of standard normals.

    stream: (key, trajectory) -> whatever identifies one trajectory's noise.
    draw: (stream, step, width) -> (width,) standard normals.
    """

    stream: Callable[[Array, Array], PyTree]
    draw: Callable[[PyTree, Array, int], Array]


threefry = Wiener(
    stream=jax.random.fold_in,
    draw=lambda stream, step, width: jax.random.normal(jax.random.fold_in(stream, step), (width,)),
)
"""JAX's own generator: the default."""

silent = Wiener(
    stream=lambda key, trajectory: (),
    draw=lambda stream, step, width: jnp.zeros((width,)),
)
"""No noise: the deterministic skeleton of a process."""


def _mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low words of a 32 × 32 bit product, from 16-bit halves: JAX has no 64-bit integers by default."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & jnp.uint32(0xFFFF), b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    cross = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (cross >> 16), jnp.uint32(a) * b


def philox_words(seed: Array, trajectory: Array, site: Array, pair: Array) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10 (Salmon et al. 2011) of the counter (site, pair, trajectory, 0). seed: (2,) uint32 words."""
    c0, c1, c2, c3 = site, pair, trajectory, jnp.zeros_like(site)
    k0, k1 = seed[0], seed[1]
    for _ in range(10):
        h0, l0 = _mulhilo(0xD2511F53, c0)
        h1, l1 = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _philox_draw(stream: tuple[Array, Array], step: Array, width: int) -> Array:
    seed, trajectory = stream
    sites = (width + 1) // 2
    site = jnp.arange(sites, dtype=jnp.uint32)
    same = lambda v: jnp.broadcast_to(jnp.asarray(v, jnp.uint32), site.shape)
    w = philox_words(seed, same(trajectory), site, same(step // 2))
    odd = step % 2 == 1
    return jnp.concatenate(box_muller(jnp.where(odd, w[2], w[0]), jnp.where(odd, w[3], w[1])))[:width]


def box_muller(first: Array, second: Array) -> tuple[Array, Array]:
    """Two independent standard normals from two 32-bit words."""
    real = jnp.result_type(float)
    scale = 2.0**-32
    radius = jnp.sqrt(-2 * jnp.log((first.astype(real) + 0.5) * scale))
    angle = 2 * jnp.pi * (second.astype(real) * scale)
    return radius * jnp.cos(angle), radius * jnp.sin(angle)


def philox_key_words(key: Array) -> Array:
    """The seed of `philox` as two words, low word first. (2,) uint32"""
    return jnp.flip(jax.random.key_data(key))


def philox_seed(key: Array) -> int:
    """The same seed as one 64-bit number: what the native kernels take for a stream with this key."""
    low, high = (int(word) for word in philox_key_words(key))
    return high << 32 | low


philox = Wiener(
    stream=lambda key, trajectory: (philox_key_words(key), trajectory),
    draw=_philox_draw,
)
"""The noise of the native kernels, step for step. The width splits into two quadratures of ⌈W/2⌉ sites: real
parts first, then imaginary ones. The seed is the 64-bit data of the key."""
