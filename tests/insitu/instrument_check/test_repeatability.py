"""Two ensembles of one setting: chance passes as often as it should, and a change does not."""

import numpy as np
import pytest

from fluctua.insitu.instrument_check.repeatability import compare_ensembles


def draw(rng, count=20, times=64, channels=3, scale=1.0, shift=0.0):
    """Random walks (E, T+1, M), whose stretches are correlated as those of a device are."""
    steps = rng.normal(size=(count, times, channels))
    return scale * np.cumsum(steps, axis=1) / np.sqrt(times) + shift


def test_equal_ensembles_differ_as_often_as_was_asked():
    """With a chance of 0.2 per check, Bonferroni's bound over correlated stretches: at most that,
    and more than a fiftieth of it. 400 checks know the share to 0.02.
    """
    rng = np.random.default_rng(0)
    found = [not compare_ensembles(draw(rng), draw(rng), chance=0.2).ok for _ in range(400)]
    assert 0.004 < np.mean(found) < 0.2 + 4 * 0.02


@pytest.mark.parametrize("change", [{"shift": 1.5}, {"scale": 4.0}])
def test_another_mean_or_variance_is_found_in_its_channel(change):
    rng = np.random.default_rng(1)
    a, b = draw(rng, 60), draw(rng, 60)
    b[..., 1] = draw(rng, 60, **change)[..., 1]
    compared = compare_ensembles(a, b)
    assert not compared.ok
    assert compared.channel == 1


def test_the_difference_is_in_standard_errors():
    """One stretch of constant trajectories: the t of the textbook."""
    a = np.array([1.0, 2.0, 3.0, 4.0])[:, None, None]
    b = np.array([2.0, 4.0, 6.0, 8.0])[:, None, None]
    error = np.sqrt((5 / 3) / 4 + (20 / 3) / 4)
    assert compare_ensembles(a, b).mean == pytest.approx(2.5 / error)


def test_a_channel_without_noise_is_repeated_exactly():
    still = np.ones((10, 30, 2))
    assert compare_ensembles(still, still).ok
    assert not compare_ensembles(still, still + 1e-3).ok
