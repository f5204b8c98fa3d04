"""The check of an instrument against its model: what fits passes, each misfit is named."""

import numpy as np
import pytest

import fluctua as fl
import own_lab as lab
from fluctua.insitu import check_instrument
from fluctua.insitu.instrument import InstrumentError, Retry
from fluctua.insitu.instrument_check.report import Latency

ONCE = Retry(attempts=1, first=0.0)


@pytest.fixture(scope="module")
def passed():
    return check_instrument(lab.Trap, lab.ready, trajectories=40)


def test_what_fits_passes(passed):
    assert passed.ok, passed.problems
    assert passed.trajectories == 2 + 3 * 40
    assert passed.identity == "trap 7"
    assert passed.record == (81, pytest.approx(1 / 80), True, ("position in µm",))
    (knob,) = passed.knobs
    assert (knob.limits, knob.bounds, knob.unit) == ((-10.0, 10.0), (-4.0, 4.0), "pN")
    assert passed.repeatability.ok


def test_residuals_have_the_noise_of_the_model(passed):
    """v has a standard error of √(2/steps); the gain of the device is found too."""
    residuals = passed.residuals.residuals
    z = (residuals.v - 1) / residuals.stderr
    assert np.abs(z).max() < 4
    assert residuals.stderr == pytest.approx(np.sqrt(2 / residuals.steps), rel=0.2)
    name, value, _, error = passed.residuals.calibration.splitlines()[1].split()
    assert name == "gain"
    assert abs(float(value) - lab.GAIN) < 4 * float(error)


def test_the_time_of_a_training_is_predicted(passed):
    latency = passed.latency
    assert 0 < latency.trajectory < 0.1
    assert latency.size == 40
    expected = latency.connect + 3 * latency.visit + 120 * latency.trajectory
    assert latency.predict_seconds(3, 120) == pytest.approx((expected, expected))


@pytest.mark.parametrize("size", [2, 20, 100])
@pytest.mark.parametrize(("fixed", "each"), [(0.08, 0.002), (0.0, 0.01), (0.5, 0.0)])
def test_the_predicted_time_holds_the_true_one(size, fixed, each):
    """An acquisition of n trajectories takes fixed + n·each; the check measured `size` of them."""
    latency = Latency(1.0, 0.01, fixed / size + each, size)
    for acquisitions, trajectories in ((300, 30_000), (10, 20)):
        truth = 1.0 + acquisitions * (0.01 + fixed) + trajectories * each
        least, most = latency.predict_seconds(acquisitions, trajectories)
        assert least <= truth * (1 + 1e-9)
        assert most >= truth * (1 - 1e-9)


def test_few_trajectories_are_a_short_check():
    check = check_instrument(lab.Trap, lab.ready, trajectories=2)
    assert check.ok
    assert check.trajectories == 4
    assert check.repeatability is check.residuals is None
    none = check_instrument(lab.Narrow, lab.model(-2.0, 2.0), trajectories=0)
    assert (none.ok, none.trajectories, none.record) == (True, 0, None)


@pytest.mark.parametrize(
    ("driver", "model", "used", "message"),
    [
        (lab.Narrow, lab.ready, 0, "takes force from -3 to 3; the bounds of the model are -4 … 4"),
        (lab.Narrow, lab.model(3.5, 4.0, 3.5), 0, "from -3 to 3; the start of the model is 3.5"),
        (lab.Trap, lab.model(start=5.0), 0, "force starts at 5, outside its bounds -4 … 4"),
        (lab.Trap, lab.model(low=4.0), 0, "bounds of the knob force must be (low, high); got (4,"),
        (lab.Trap, lab.renamed, 0, 'it lacks forse. Give both the same names. Did you mean "force'),
        (lab.Other, lab.ready, 0, "has limits of torque: it lacks force"),
        (lab.Mute, lab.ready, 0, "`set` of the driver raised KeyError, line"),
        (lab.Reads, lab.ready, 2, "knobs force, and `health` of the driver reads back strength"),
        (lab.Stuck, lab.ready, 2, "force was set to 0 and reads back 0.5"),
        (lab.Short, lab.ready, 2, "the model has 81 times, and a record of the instrument has 41"),
        (lab.Slow, lab.ready, 2, "0.0125 apart, and the instrument samples from 0 to 2, 0.025"),
        (lab.Wide, lab.ready, 2, "the model has 1 channels, and a sample of the instrument has 2"),
        (lab.Wide, lab.untimed, 2, "drift of the model has shape (1,), and a sample"),
        (lab.Frozen, lab.ready, 22, "10 trajectories are the same as earlier ones"),
        (lab.Flat, lab.ready, 3, "2 trajectories are the same as earlier ones"),
        (lab.Drifts, lab.ready, 32, "the same setting gave different records"),
        (lab.Trap, lab.faint, 32, "not those of the model"),
    ],
)
def test_a_misfit_is_named(driver, model, used, message):
    check = check_instrument(driver, model, trajectories=10, retry=ONCE)
    assert message in " ".join(check.problems)
    assert check.trajectories == used
    with pytest.raises(ValueError, match=r"."):
        check.refuse_problems()


@pytest.mark.parametrize(
    ("argument", "name", "message"),
    [
        (0, "stiffness", "'stiffness', which is no knob of the model (force) and no"),
        (0, "gain", "'gain' as a setting: it is no knob of the model (force)"),
        (3, "force", "'force' as an unknown: it is no unknown (gain)"),
    ],
)
def test_a_name_that_the_model_does_not_have_is_named(argument, name, message):
    def drift(*arguments):
        return arguments[argument][name] - arguments[1]

    process = fl.Process(drift, lambda settings, x: np.array([lab.NOISE]))
    check = check_instrument(lab.Trap, lab.ready._replace(process=process), trajectories=2)
    assert message in " ".join(check.problems)


def test_an_instrument_that_does_not_answer_is_a_problem():
    def connect():
        raise InstrumentError("no answer")

    check = check_instrument(connect, lab.ready)
    assert check.problems == ("no answer.",)
    assert not check.connected


def test_passing_failures_are_retried_and_noted():
    faults = iter([True, False])

    class Sometimes(lab.Trap):
        def acquire(self):
            if next(faults, False):
                raise TimeoutError("late")
            return super().acquire()

    check = check_instrument(Sometimes, lab.ready, trajectories=2, retry=Retry(3, first=0.0))
    assert check.ok
    assert "1 failure retried" in check.notes


def test_the_instrument_is_left_at_the_start():
    traps = []

    def connect():
        traps.append(lab.Trap())
        return traps[-1]

    check_instrument(connect, lab.model(start=0.5), trajectories=8)
    assert [trap.force for trap in traps] == [0.5]
