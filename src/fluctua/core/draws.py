"""What chance and θ give to a trajectory: its start, and the Wiener increments along its way.

A fixed start is just an array (M,). It has no sensitivity, and most experiments are of this kind.

Every source of increments is counter based: the normals of a step are a pure function of (key,
trajectory, step), so nothing is stored, any trajectory can be replayed alone, and the first E of 2E
trajectories are the same as E.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.check import drop_extra_arguments
from fluctua.core.words import close_match


class Density(NamedTuple):
    """Random start from a density that depends on θ, X₀ ~ p₀(x; θ).

    It adds the term (λ̂₀ − λ̄ₛ) ∂θ ln p₀(X₀) to the gradient (Eqs. 16 and 17).

    log_density: (theta, x0, context) -> ln p₀, up to a constant that does not depend on θ.
    sample: (key, theta, context) -> x0 (M,); only a simulator needs it.

    >>> start = fl.Density(
    ...     log_density=lambda theta, x0: -jnp.sum((x0 - theta["mean"]) ** 2) / 2,
    ...     sample=lambda key, theta: theta["mean"] + jax.random.normal(key, (1,)),
    ... )
    >>> drawn = fl.simulator(process, start, t)
    >>> estimate = fl.ppgt(drawn, objective)(key, {**theta, "mean": jnp.array(1.0)}, 50)
    >>> sorted(estimate.gradient)
    ['k', 'mean', 's']
    """

    log_density: Callable[..., Array]
    sample: Callable[..., Array] | None = None


class Reparameterised(NamedTuple):
    """Start that is a function of θ, X₀ = f(θ, context); what is random in it is in the context.

    x0: (theta, context) -> (M,). A prepared state that depends on θ and not on chance is the same
        thing with a function that ignores the context.
    fade: time within which a displacement of the start is taken back; see below.

    The gradient needs no derivative of the return. Displace the whole path by h(t) = w(t)·dX₀ with
    a weight w that falls linearly from 1 to 0 within the time `fade`: the path that starts at the
    displaced point then ends where it did, at the price of a change in the probability of the steps
    in between, which the score of those steps measures. Any `fade` gives the same expectation; the
    variance falls as 1/fade until the drift has had time to act. 0 uses the first step alone.

    >>> start = fl.Reparameterised(lambda theta: theta["x0"] * jnp.ones(1), fade=0.5)
    >>> prepared = fl.simulator(process, start, t)
    >>> estimate = fl.ppgt(prepared, objective)(key, {**theta, "x0": jnp.array(1.0)}, 2000)
    >>> exact = -2 * (1 - np.exp(-2 * 0.8)) / (2 * 0.8)
    >>> bool(abs(estimate.gradient["x0"] - exact) < 4 * estimate.stderr["x0"])
    True
    """

    x0: Callable[..., Array]
    fade: float = 0.0

    def shift(self, theta: Params, context: PyTree) -> Callable[[Params], Array]:
        """dX₀: zero in value at `theta`, with the derivative of x0. (M,)"""
        here = jax.lax.stop_gradient(self.x0(theta, context))
        return lambda th: self.x0(th, context) - here

    def weight(self, t: Array, t0: Array, dt0: Array) -> Array:
        """w(t): 1 at the start, 0 after `fade` (one step at least)."""
        return jnp.clip(1 - (t - t0) / jnp.maximum(self.fade, dt0), 0.0, 1.0)


Start = Array | Density | Reparameterised


def check_start(start: Any) -> tuple[Density | Reparameterised | None, Array | None]:
    """(a start that depends on θ or chance, None) or (None, a fixed state), checked."""
    if isinstance(start, Density):
        sample = None if start.sample is None else drop_extra_arguments(start.sample, 3)
        return Density(drop_extra_arguments(start.log_density, 3), sample), None
    if isinstance(start, Reparameterised):
        if not start.fade >= 0:
            raise ValueError(
                f"`Reparameterised.fade` is a time and must not be negative; got {start.fade}."
            )
        return Reparameterised(drop_extra_arguments(start.x0, 2), start.fade), None
    if callable(start):
        raise TypeError(
            "a start that is a function of theta needs a rule for its derivative: wrap "
            "it in fluctua.Reparameterised(x0) or give a fluctua.Density(log_density, sample)."
        )
    x0 = jnp.asarray(start)
    if x0.ndim != 1:
        raise ValueError(
            f"a fixed start must be one state (M,); got shape {x0.shape}. For one component write "
            "jnp.array([0.0])."
        )
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        x0 = x0.astype(jnp.result_type(float))
    if not np.isfinite(np.asarray(x0)).all():
        raise ValueError(
            f"the start has non-finite components: {np.flatnonzero(~np.isfinite(x0)).tolist()}."
        )
    return None, x0


def check_score(score: Any, start: Any) -> None:
    """Refuse a score that cannot move the ends of a step, for a start that moves with θ."""
    if isinstance(start, Reparameterised) and "shift" not in inspect.signature(score).parameters:
        raise ValueError(
            "a `Reparameterised` start moves the states with θ, which this score does not "
            "differentiate; use score=full_score."
        )


# -------------------------------------------------------------------------- noise


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

no_noise = Wiener(
    stream=lambda key, trajectory: (),
    draw=lambda stream, step, width: jnp.zeros((width,)),
)
"""No noise: the deterministic skeleton of a process."""


def _mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low words of a 32 × 32 bit product, from 16-bit halves.

    JAX has no 64-bit integers by default.
    """
    a_low = jnp.uint32(a & 0xFFFF)
    a_high = jnp.uint32(a >> 16)
    b_low = b & jnp.uint32(0xFFFF)
    b_high = b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    cross = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (cross >> 16), jnp.uint32(a) * b


def philox_block(counter: Sequence[Array], key: Sequence[Array], rounds: int) -> list[Array]:
    """Philox4x32 (Salmon et al. 2011) of a counter of four words and a key of two: four words.

    rounds: 10 is the default of its authors; with 7 it passes BigCrush too.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        h0, l0 = _mulhilo(0xD2511F53, c0)
        h1, l1 = _mulhilo(0xCD9E8D57, c2)
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = k0 + jnp.uint32(0x9E3779B9)
        k1 = k1 + jnp.uint32(0xBB67AE85)
    return [c0, c1, c2, c3]


def philox_words(
    seed: Array, trajectory: Array, site: Array, pair: Array, rounds: int = 10
) -> list[Array]:
    """Philox4x32 of the counter (site, pair, trajectory, 0). seed: (2,) uint32 words."""
    counter = (site, pair, trajectory, jnp.zeros_like(site))
    return philox_block(counter, [seed[0], seed[1]], rounds)


class PhiloxStream(NamedTuple):
    """The noise of one trajectory. seed: two words, low word first. trajectory: its number."""

    seed: Array
    trajectory: Array


def _draw_words(stream: PhiloxStream, block: Array, size: int, rounds: int = 10) -> list[Array]:
    """Four words of each of `size` counters, in one block of steps. Four of shape (size,)."""
    site = jnp.arange(size, dtype=jnp.uint32)

    def same(v):
        return jnp.broadcast_to(jnp.asarray(v, jnp.uint32), site.shape)

    return philox_words(stream.seed, same(stream.trajectory), site, same(block), rounds)


def _philox_draw(stream: PhiloxStream, step: Array, width: int) -> Array:
    w = _draw_words(stream, step // 2, (width + 1) // 2)
    odd = step % 2 == 1
    return jnp.concatenate(box_muller(jnp.where(odd, w[2], w[0]), jnp.where(odd, w[3], w[1])))[
        :width
    ]


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
    """The seed of `philox` as one 64-bit number, as the native kernels take it."""
    low, high = (int(word) for word in philox_key_words(key))
    return high << 32 | low


philox = Wiener(
    stream=lambda key, trajectory: PhiloxStream(philox_key_words(key), trajectory),
    draw=_philox_draw,
)
"""The noise of the native kernels, step for step. The width splits into two quadratures of ⌈W/2⌉
sites: real parts first, then imaginary ones. The seed is the 64-bit data of the key."""


def _philox7_draw(stream: PhiloxStream, step: Array, width: int) -> Array:
    w = _draw_words(stream, step // 4, width, rounds=7)
    late = step % 4 >= 2
    cosine, sine = box_muller(jnp.where(late, w[2], w[0]), jnp.where(late, w[3], w[1]))
    return jnp.where(step % 2 == 1, sine, cosine)


philox7 = Wiener(
    stream=lambda key, trajectory: PhiloxStream(philox_key_words(key), trajectory),
    draw=_philox7_draw,
)
"""Philox with 7 rounds, the fastest in kernels: one block gives a component's normals of four
steps. Those of steps 4q and 4q + 1 are the cosine and the sine of its first two words, those of
4q + 2 and 4q + 3 of the other two."""

GENERATORS = {"threefry": threefry, "philox": philox, "philox7": philox7, "none": no_noise}
"""Sources of noise by name."""


def find_generator(wiener: Wiener | str) -> Wiener:
    """The source of noise of this name; a `Wiener` is returned as it is."""
    if not isinstance(wiener, str):
        return wiener
    if wiener not in GENERATORS:
        raise ValueError(
            f"`wiener` must be one of {', '.join(GENERATORS)}, or a `Wiener`; got {wiener!r}."
            f"{close_match(wiener, GENERATORS)}"
        )
    return GENERATORS[wiener]
