"""Keys of JAX's threefry generator, split on the host: nothing is compiled or launched for it.

Words agree with `jax.random.split` bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Array, is_on_host, on_host, put_on_host

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
ROUNDS = 5
"""Groups of four rotations: Threefry-2x32 with 20 rounds (Salmon et al. 2011), as JAX has it."""

MASK = 0xFFFFFFFF


class Words(NamedTuple):
    """Two words of 32 bits: a key, a counter, or a block of random bits.

    Numbers, or arrays of uint32 for many at once.
    """

    first: Any
    second: Any


def read_words(key: Array) -> Words | None:
    """The words of a key; None for another generator, several keys, and while JAX traces."""
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    raw = key.dtype == np.uint32
    if not partitionable or not (raw or jax.random.key_impl(key) == "threefry2x32"):
        return None
    words = key if raw else jax.random.key_data(key)
    if isinstance(words, jax.core.Tracer) or words.shape != (2,):
        return None
    return Words(*on_host(words).tolist())


def read_host_words(key: Array) -> Words | None:
    """The words of a key on the host by `read_words`; None where it is on a device."""
    return read_words(key) if is_on_host(key) else None


def move_to_host(key: Array) -> Array:
    """The key in the memory of the host, where its words are read without a transfer."""
    words = None if is_on_host(key) else read_words(key)
    return key if words is None else make_key(words, key)


def make_key(words: Words, like: Array) -> Array:
    """The key of these words, typed or raw as another key."""
    data = put_on_host(np.array(words, np.uint32))
    return data if like.dtype == np.uint32 else jax.random.wrap_key_data(data, impl="threefry2x32")


def fold_in(key: Array, number: int) -> Array:
    """`jax.random.fold_in`, by NumPy if the key is on the host."""
    words = read_host_words(key)
    if words is None or not isinstance(number, int | np.integer):
        return jax.random.fold_in(key, number)
    return make_key(split_words(words, int(number)), key)


def split_words(key: Words, index: int | np.ndarray) -> Words:
    """Key number `index` of `jax.random.split(key, count)`, whatever the count.

    It is `jax.random.fold_in(key, index)` as well. index: one, or an array of uint32.
    """
    return encrypt(key, Words(0, index))


def encrypt(key: Words, counter: Words) -> Words:
    """The block of Threefry-2x32 with a key and a counter."""
    schedule = (*key, key.first ^ key.second ^ PARITY)
    x = (counter.first + schedule[0]) & MASK
    y = (counter.second + schedule[1]) & MASK
    for group in range(ROUNDS):
        for bits in ROTATIONS[group % 2]:
            x = (x + y) & MASK
            y = ((y << bits | y >> (32 - bits)) & MASK) ^ x
        x = (x + schedule[(group + 1) % 3]) & MASK
        y = (y + schedule[(group + 2) % 3] + group + 1) & MASK
    return Words(x, y)
