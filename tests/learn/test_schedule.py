"""Each rule of the escalation on histories made by hand. W = 20 keeps them short; the rules
scale with it.
"""

import numpy as np
import pytest
from scipy import stats

from fluctua.learn.optimisers import (
    BUDGETS,
    find_escalation,
    find_onset,
    find_rising_root,
    fit_trend,
    is_rising,
    student_quantile,
)

W = 20


def noise(n, size=0.01, seed=0):
    return size * np.random.default_rng(seed).normal(size=n)


def rise_then_flat(rise, flat, size=0.0):
    """A parabola that reaches 1 with a positive slope at iteration `rise`, then stays there."""
    x = np.arange(rise) / rise
    return np.concatenate([1.5 * x - 0.5 * x**2, np.ones(flat)]) + noise(rise + flat, size)


RISING = np.linspace(0, 1, 15 * W)
FLAT = np.ones(15 * W)


def test_budgets_are_the_papers():
    assert BUDGETS[:3] == (1000, 2000, 3000)
    assert BUDGETS[19:] == (20_000, 25_000, 30_000)
    assert len(BUDGETS) == 22


# ---------------------------------------------------------------------------------------- the trend


def test_trend_equals_linear_regression():
    y = 0.3 * np.arange(50) + noise(50, 2.0)
    expected = stats.linregress(np.arange(50), y)
    np.testing.assert_allclose(fit_trend(y), [expected.slope, expected.stderr], rtol=1e-10)


def test_trend_needs_three_values():
    with pytest.raises(ValueError, match="at least 3"):
        fit_trend([1.0, 2.0])


@pytest.mark.parametrize(
    ("degrees", "tolerance"), [(8, 1e-3), (30, 1e-5), (98, 1e-5), (1000, 1e-5)]
)
def test_quantiles_of_student(degrees, tolerance):
    for p in (0.9, 0.975, 0.995):
        assert student_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), abs=tolerance)


def test_rising():
    assert is_rising(RISING[-W:])
    assert is_rising(RISING[-W:] + noise(W, 1e-3))


def test_flat_falling_and_noisy_flat():
    assert not is_rising(FLAT[-W:])
    assert not is_rising(-RISING[-W:])
    called = sum(is_rising(noise(100, seed=s)) for s in range(2000))
    assert called == pytest.approx(
        0.025 * 2000, abs=4 * np.sqrt(0.025 * 2000)
    )  # the upper half of 5 %


# ---------------------------------------------------------------------------------------- the onset


@pytest.mark.parametrize(
    ("coefficients", "root"),
    [
        ((1, 0, -4), 2.0),  # opens upwards: it rises at the right root
        ((-1, 0, 4), -2.0),  # opens downwards: at the left one
        ((0, 2, -6), 3.0),
        ((0, -2, 6), None),  # a line that falls
        ((-1, 0, -1), None),  # never met
        ((1, 0, 0), None),  # touched
        ((1e-18, 2, -6), 3.0),  # nearly a line: no cancellation
        ((-1, -3, 4), -4.0),
    ],
)
def test_rising_root(coefficients, root):
    assert find_rising_root(*map(float, coefficients)) == (
        None if root is None else pytest.approx(root)
    )


def test_onset_is_where_the_rise_ends():
    """The plateau began 3W/2 ago: behind the fit window, so the parabola is extrapolated."""
    rise = 15 * W - 3 * W // 2
    assert find_onset(rise_then_flat(rise, 3 * W // 2), W) == pytest.approx(rise, abs=1)
    assert find_onset(rise_then_flat(rise, 3 * W // 2, 1e-3), W) == pytest.approx(rise, abs=4)


def test_onset_inside_the_fit_window():
    """J overshot and came back: the parabola crosses the plateau twice, and the first crossing
    is the rise.
    """
    x = np.arange(13 * W)
    begin, end = W, 11 * W
    hump = 1 - ((x - (begin + end) / 2) / (5 * W)) ** 2
    values = np.where(x < end, hump, 0.36)
    assert find_onset(values, W) == pytest.approx(
        (begin + end) / 2 - 0.8 * 5 * W, abs=1
    )  # 1 − 0.8² = 0.36


def test_no_onset():
    assert find_onset(FLAT[: 12 * W - 1], W) is None  # too short for the fit
    never = np.concatenate([np.zeros(13 * W), np.full(2 * W, 5.0)])
    assert (
        find_onset(never + noise(15 * W, 1e-3), W) is None
    )  # a flat parabola does not get there in time
    late = np.concatenate([RISING[: 13 * W], np.full(2 * W, 1.5)])
    assert find_onset(late, W) is None  # the rise would get there only after l − W


# ------------------------------------------------------------------------------------- put together


def test_rising_goes_on():
    assert find_escalation(RISING + noise(len(RISING), 1e-3), 0, window=W) is None


def test_a_young_tier_is_not_judged():
    assert find_escalation(FLAT, len(FLAT) - W + 1, window=W) is None
    assert find_escalation(FLAT, len(FLAT) - W, window=W) is not None


def test_too_short_for_the_fit_goes_on_in_place():
    assert find_escalation(FLAT[: 12 * W - 1], 0, window=W) == 12 * W - 1


def test_plateau_is_rewound_to_its_onset():
    rise = 15 * W - 3 * W // 2
    assert find_escalation(rise_then_flat(rise, 3 * W // 2, 1e-3), 0, window=W) == pytest.approx(
        rise, abs=4
    )


def test_without_an_admissible_onset_it_is_l_minus_w():
    never = np.concatenate([np.zeros(13 * W), np.full(2 * W, 5.0)]) + noise(15 * W, 1e-3)
    assert find_escalation(never, 0, window=W) == 14 * W


def test_an_onset_near_the_tiers_start_runs_the_tier_again():
    rise = 15 * W - 3 * W // 2
    values = rise_then_flat(rise, 3 * W // 2)
    assert find_escalation(values, rise - W + 2, window=W) == rise - W + 2  # within W of the start
    assert find_escalation(values, rise - W - 2, window=W) == pytest.approx(rise, abs=1)  # just not


def test_noisy_flat_from_the_start():
    values = 0.5 + noise(15 * W)
    back_to = find_escalation(values, 0, window=W)
    assert back_to is None or 0 <= back_to <= 14 * W
