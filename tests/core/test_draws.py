"""The counter-based generator: known answers, the native twin, and the statistics of its
normals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.draws import no_noise, philox, philox_words
from fluctua.tcmt.native import _native


def seed_key(seed):
    return jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32))


def test_known_answer_of_philox():
    """The all-zero vector of the Random123 distribution (Salmon et al. 2011)."""
    assert _native.words(0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


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


def test_normals_are_normal_and_uncorrelated():
    z = _native.normals(20260101, 60, 400, 20)  # 480,000 numbers; sites are paired as (i, i + 10)
    count = z.size
    error = np.sqrt(np.array([1, 2, 15, 96]) / count)  # of the first four moments: var z^k
    moments = np.array([(z**k).mean() for k in (1, 2, 3, 4)])
    assert np.all(np.abs(moments - [0, 1, 0, 3]) < 4 * error)
    for level, tail in ((2.0, 4.550e-2), (3.0, 2.700e-3), (4.0, 6.334e-5)):
        assert abs((np.abs(z) > level).mean() - tail) < 4 * np.sqrt(tail / count)
    pairs = {
        "next step": (z[:, 1:], z[:, :-1]),
        "two steps": (z[:, 2:], z[:, :-2]),
        "next site": (z[..., 1:], z[..., :-1]),
        "quadratures": (z[..., :10], z[..., 10:]),
        "next trajectory": (z[1:], z[:-1]),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 4 / np.sqrt(a.size), name
        assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 4 * 2 / np.sqrt(a.size), name


def test_native_refuses_nothing_to_do():
    with pytest.raises(ValueError, match="at least 1"):
        _native.normals(0, 0, 1, 1)


def test_silent_noise_leaves_the_skeleton():
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
