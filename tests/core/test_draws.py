"""The counter-based generator: known answers, the native twin, and the statistics of its
normals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.draws import no_noise, philox, philox7, philox_block, philox_words
from fluctua.tcmt.native import _native


def seed_key(seed):
    return jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32))


def test_known_answer_of_philox():
    """The all-zero vector of the Random123 distribution (Salmon et al. 2011)."""
    assert _native.words(0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 6


@pytest.mark.parametrize(
    ("rounds", "inputs", "expected"),
    [
        (7, (0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_philox_with_7_and_10_rounds(rounds, inputs, expected):
    """Vectors for philox4x32 of Random123's `kat_vectors`: counter, then key."""
    words = [jnp.uint32(v) for v in inputs]
    assert [int(w) for w in philox_block(words[:4], words[4:], rounds)] == list(expected)


def draw_normals(wiener, seed, trajectories, steps, width):
    """Normals of a source of noise. (trajectories, steps, width)"""

    def one(j, n):
        return wiener.draw(wiener.stream(seed_key(seed), j), n, width)

    of_trajectory = jax.vmap(one, (None, 0))
    return np.asarray(
        jax.jit(jax.vmap(of_trajectory, (0, None)))(jnp.arange(trajectories), jnp.arange(steps))
    )


def test_one_block_of_philox7_gives_four_steps():
    z = draw_normals(philox7, 2**40 + 99, 2, 9, 3)
    seed = jnp.array([99, 2**8], jnp.uint32)
    for j, n, k in ((0, 0, 0), (1, 5, 2), (1, 7, 1), (0, 8, 0)):
        w = [float(v) for v in philox_words(seed, *(jnp.uint32(v) for v in (j, k, n // 4)), 7)]
        first, second = w[n % 4 // 2 * 2 :][:2]
        radius = np.sqrt(-2 * np.log((first + 0.5) / 2**32))
        wave = np.sin if n % 2 else np.cos
        np.testing.assert_allclose(z[j, n, k], radius * wave(2 * np.pi * second / 2**32), rtol=1e-9)


@pytest.mark.parametrize(
    ("seed", "trajectory", "site", "pair"),
    [(0, 0, 0, 0), (2**63 + 12345, 7, 3, 2**31), (1, 2**32 - 1, 2**32 - 1, 5)],
)
def test_words_are_the_same_in_python_and_c(seed, trajectory, site, pair):
    words = philox_words(
        jnp.flip(jax.random.key_data(seed_key(seed))),
        *(jnp.uint32(v) for v in (trajectory, site, pair)),
    )
    assert tuple(int(w) for w in words) == _native.words(seed, trajectory, site, pair)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_normals_are_the_same_in_python_and_c(width):
    seed = 2**40 + 99
    draw = jax.vmap(
        jax.vmap(lambda j, n: philox.draw(philox.stream(seed_key(seed), j), n, width), (None, 0)),
        (0, None),
    )
    np.testing.assert_allclose(
        draw(jnp.arange(3), jnp.arange(5)), _native.normals(seed, 3, 5, width), atol=1e-12
    )


def normals_of_philox():
    return _native.normals(20260101, 60, 400, 20)  # sites are paired as (i, i + 10)


def normals_of_philox7():
    return draw_normals(philox7, 20260101, 60, 400, 20)


@pytest.mark.parametrize("draw", [normals_of_philox, normals_of_philox7])
def test_normals_are_normal_and_uncorrelated(draw):
    z = draw()  # 480,000 numbers
    count = z.size
    error = np.sqrt(np.array([1, 2, 15, 96]) / count)  # of the first four moments: var z^k
    moments = np.array([(z**k).mean() for k in (1, 2, 3, 4)])
    assert np.all(np.abs(moments - [0, 1, 0, 3]) < 4 * error)
    for level, tail in ((2.0, 4.550e-2), (3.0, 2.700e-3), (4.0, 6.334e-5)):
        assert abs((np.abs(z) > level).mean() - tail) < 4 * np.sqrt(tail / count)
    pairs = {
        "next step": (z[:, 1:], z[:, :-1]),
        "two steps": (z[:, 2:], z[:, :-2]),
        "three steps": (z[:, 3:], z[:, :-3]),
        "four steps": (z[:, 4:], z[:, :-4]),
        "cosine and sine": (z[:, ::2], z[:, 1::2]),
        "next site": (z[..., 1:], z[..., :-1]),
        "quadratures": (z[..., :10], z[..., 10:]),
        "next trajectory": (z[1:], z[:-1]),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 4 / np.sqrt(a.size), name
        assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 4 * 2 / np.sqrt(a.size), name


@pytest.mark.parametrize(("name", "expected"), [("philox7", philox7), ("none", no_noise)])
def test_a_source_of_noise_by_name(name, expected):
    process = fl.Process(lambda theta, x: -theta * x, lambda theta, x: jnp.ones_like(x))
    run = fl.simulator(process, jnp.ones(1), jnp.linspace(0, 1, 11), wiener=name)
    assert run.recipe.wiener is expected


def test_an_unknown_source_of_noise_is_refused_by_name():
    process = fl.Process(lambda theta, x: -theta * x, lambda theta, x: jnp.ones_like(x))
    with pytest.raises(ValueError, match=r"'philox8'.*Did you mean"):
        fl.simulator(process, jnp.ones(1), jnp.linspace(0, 1, 11), wiener="philox8")


def test_native_refuses_nothing_to_do():
    with pytest.raises(ValueError, match="at least 1"):
        _native.normals(0, 0, 1, 1)


def test_zero_noise_leaves_the_skeleton():
    process = fl.Process(lambda theta, x: -theta * x, lambda theta, x: jnp.ones_like(x))
    run = fl.simulator(process, jnp.ones(1), jnp.linspace(0, 1, 11), wiener=no_noise)
    path = run(jax.random.key(0), jnp.asarray(1.0), 2).x
    np.testing.assert_allclose(path[0, :, 0], 0.9 ** np.arange(11))


def test_any_source_drives_the_simulator():
    process = fl.Process(lambda theta, x: 0.0 * x, lambda theta, x: theta * jnp.ones_like(x))
    run = fl.simulator(process, jnp.zeros(4), jnp.linspace(0, 1, 6), wiener=philox)
    key = jax.random.key(5)
    path = run(key, jnp.asarray(1.0), 3).x
    seed = int.from_bytes(
        np.asarray(jax.random.key_data(jax.random.split(key, 3)[2])).astype(">u4").tobytes(), "big"
    )
    expected = np.cumsum(_native.normals(seed, 3, 5, 4), axis=1) * np.sqrt(0.2)
    np.testing.assert_allclose(path[:, 1:], expected, atol=1e-12)
