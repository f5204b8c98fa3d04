"""Several devices as one substrate: shares, failures, population errors, training and resuming."""

import dataclasses
import functools
import itertools
import threading

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.core.estimate import Samples
from fluctua.insitu import Plan, files, network_model
from fluctua.insitu.bench import device, processes
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.instrument import Retry, array
from fluctua.insitu.instrument.device_array import split_count
from fluctua.insitu.instrument.protocol import Batch, CommandRejected, Health, InstrumentError
from fluctua.insitu.model import Methods, share_parameters
from fluctua.store import history
from fluctua.tcmt import exact

# one Euler step a sample and no ageing: the score and exact moments are then those of the box
SHEETS = [
    device.Sheet(rows=2, columns=2, seed=k, interval=0.05, oversample=1, disorder=0.5, ageing=0.0)
    for k in range(4)
]
BOXES = [device.draw_hidden(sheet) for sheet in SHEETS]
POINTS = 41
TASK = tcmt.transmission(SHEETS[0].nominal, horizon=(POINTS - 1) * 0.05, dt=0.05)


def truth(box):
    """The calibration that a perfect laboratory would find."""
    lead = np.array([1.0, 0, 0, 1.0])
    parts = {
        f"{name}_{part}": getattr(box, part)[name]
        for name in knobs.KNOBS
        for part in ("offset", "gain")
    }
    parts |= {
        "decay": lead + box.gamma,
        "drive_re": np.array([10 * np.sqrt(2)]),
        "drive_im": np.zeros(1),
    }
    return parts | {"diffusion": SHEETS[0].sigma_w ** 2 * (lead + box.gamma)}


def compute_exact(sheet, box, settings):
    """J of one box, and ∂J/∂θ of its network."""
    at = {
        name: box.offset[name] + box.gain[name] * np.asarray(settings[name]) for name in knobs.KNOBS
    }
    return exact.value_and_gradient(
        TASK, at | {"gamma": box.gamma}
    )  # in θ: compiled once for all boxes


class Direct:
    """A bench without a line: an instrument of this process."""

    def __init__(self, bench, points=POINTS, dead=lambda: False):
        self.bench, self.points, self.dead = bench, points, dead

    def set(self, settings):
        self.bench.settings = {name: np.array(v, float) for name, v in settings.items()}

    def arm(self, count):
        self.count = count

    def acquire(self):
        if self.dead():
            raise InstrumentError("no answer")
        b = self.bench
        codes = device.measure(
            b.sheet, b.hidden, b.settings, count=self.count, points=self.points, shots=b.shots
        )
        b.shots += self.count
        t = np.arange(self.points) * b.sheet.interval
        return Batch(t, codes, b.sheet.scale, b.sheet.adc_range, device.INVALID)

    def health(self):
        return Health(self.bench.settings, identity=f"box {self.bench.sheet.seed}")

    def close(self):
        pass


def stack_rows(values):
    return lambda count: jax.tree.map(lambda v: np.broadcast_to(v, (count, *np.shape(v))), values)


@functools.cache
def model():
    return network_model(SHEETS[0].nominal, interval=SHEETS[0].interval, points=POINTS)


def an_array(benches, dead=None, **options):
    dead = dead or {}
    connects = [
        functools.partial(Direct, b, dead=dead.get(k, lambda: False)) for k, b in enumerate(benches)
    ]
    options = {
        "rates": [1] * len(benches),
        "retry": Retry(attempts=2),
        "sleep": lambda seconds: None,
        **options,
    }
    return array(connects, contexts=[stack_rows(truth(b.hidden)) for b in benches], **options)


# ------------------------------------------------------------------------------------------- shares


def test_shares_add_up_and_follow_the_rates():
    assert split_count(10, np.array([1.0, 1.0, 2.0])) == [3, 2, 5]
    rng = np.random.default_rng(0)
    for count in (1, 7, 100):
        weights = rng.uniform(0.1, 3, 5)
        shares = split_count(count, weights)
        assert sum(shares) == count
        assert np.abs(shares - count * weights / weights.sum()).max() < 1


def test_a_fast_device_gets_more_once_it_is_known_to_be():
    substrate = an_array([Bench(sheet) for sheet in SHEETS[:2]], rates=None)
    substrate._run_on_each = run_timed(substrate, {0: 1.0, 1: 3.0})
    settings = model().start
    assert list(np.bincount(substrate(None, settings, 40).group)) == [20, 20]
    assert list(np.bincount(substrate(None, settings, 40).group)) == [30, 10]
    substrate._run_on_each = run_timed(substrate, {0: 1.2, 1: 3.0})  # within the noise of a clock
    assert list(np.bincount(substrate(None, settings, 40).group)) == [30, 10]


def run_timed(substrate, seconds):
    """`_run_on_each`, with so many seconds for a trajectory of each device."""
    plain = type(substrate)._run_on_each

    def each(shares, act):
        return {
            k: (n, failure, seconds[k] * n)
            for k, (n, failure, _) in plain(substrate, shares, act).items()
        }

    return each


def test_a_silent_device_is_made_up_for_and_comes_back():
    """Nothing is acquired twice, and what a device gave before it failed is used."""
    benches, incidents, down = [Bench(sheet) for sheet in SHEETS[:3]], [], []
    dead = lambda: bool(down) and benches[1].shots >= down[0]
    substrate = an_array(benches, {1: dead}, batch=4, report=incidents.append)
    settings = model().start
    substrate(None, settings, 30)
    down.append(14)  # in the middle of its share of 10, after one batch of 4
    t, x, context, _, group = substrate(None, settings, 30)
    assert list(np.bincount(group)) == [13, 4, 13]
    assert len(np.unique(x[:, -1, 0])) == 30
    np.testing.assert_array_equal(
        context["decay"], np.stack([truth(BOXES[k])["decay"] for k in group])
    )
    assert [b.shots for b in benches] == [23, 14, 23]
    assert [i.kind for i in incidents] == ["failure", "failure", "device down"]
    assert "device 2 (box 1)" in incidents[-1].message
    assert list(np.bincount(substrate(None, settings, 30).group, minlength=3)) == [
        15,
        0,
        15,
    ]  # asked once, in vain
    assert list(np.bincount(substrate(None, settings, 30).group, minlength=3)) == [
        15,
        0,
        15,
    ]  # not asked
    down.clear()
    assert list(np.bincount(substrate(None, settings, 30).group)) == [10, 10, 10]
    assert incidents[-1].kind == "device back"
    assert sum(b.shots for b in benches) == substrate.counts["good"] == 150
    assert [h.up for h in substrate.health()] == [True] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda batch: None, "returned None"),
        (lambda batch: batch._replace(samples=batch.samples[..., :3]), "got 3"),
    ],
)
def test_the_others_go_on_without_a_driver_that_answers_wrong(wrong, message):
    benches, incidents = [Bench(sheet) for sheet in SHEETS[:3]], []

    class Wrong(Direct):
        def acquire(self):
            batch = super().acquire()
            return wrong(batch) if self.bench is benches[1] and self.bench.shots > 10 else batch

    connects = [functools.partial(Wrong, bench) for bench in benches]
    substrate = array(
        connects, rates=[1] * 3, retry=Retry(2), report=incidents.append, sleep=lambda seconds: None
    )
    substrate(None, model().start, 30)
    assert list(np.bincount(substrate(None, model().start, 30).group, minlength=3)) == [15, 0, 15]
    assert [incident.kind for incident in incidents] == ["failure", "failure", "device down"]
    assert message in incidents[-1].message


def test_the_others_go_on_without_a_driver_that_hangs():
    benches, incidents, never = [Bench(sheet) for sheet in SHEETS[:3]], [], threading.Event()

    def hang():
        return benches[1].shots > 0 and never.wait()

    substrate = an_array(benches, {1: hang}, report=incidents.append, retry=Retry(limit=60))
    settings = model().start
    substrate(None, settings, 30)
    substrate.retry = Retry(limit=0.5)
    assert list(np.bincount(substrate(None, settings, 30).group, minlength=3)) == [15, 0, 15]
    assert [incident.kind for incident in incidents][-1] == "device down"
    assert "did not return within 0.5 s" in incidents[-1].message
    substrate.close()
    never.set()


def test_an_array_ends_when_nobody_answers():
    benches = [Bench(sheet) for sheet in SHEETS[:2]]
    substrate = an_array(benches, {0: lambda: True, 1: lambda: True})
    with pytest.raises(InstrumentError, match=r"none of 2 devices.*10 of 10.*no answer"):
        substrate(None, model().start, 10)


def test_one_box_under_two_addresses_is_refused():
    substrate = an_array([Bench(SHEETS[0]), Bench(SHEETS[1]), Bench(SHEETS[0])])
    with pytest.raises(CommandRejected, match=r"devices 1 and 3.*box 0"):
        substrate(None, model().start, 9)
    with pytest.raises(ValueError, match=r"1 traj.*2 devices"):
        an_array([Bench(s) for s in SHEETS[:2]])(None, model().start, 1)
    with pytest.raises(ValueError, match=r"'offsets'"):
        array([lambda: None], share="offsets")


# ------------------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize("share", ["settings", "parameters"])
def test_the_gradient_of_an_array_is_the_mean_of_the_exact_ones(share):
    """Over four boxes with Gaussian disorder: J and its gradient by exact moments, in errors of
    these four devices; and the error bars are those between devices."""
    settings = {name: np.asarray(v, np.float64) for name, v in model().start.items()}
    whole = model() if share == "settings" else share_parameters(model())
    substrate = an_array(
        [Bench(sheet) for sheet in SHEETS],
        share="settings" if share == "settings" else model().methods.correct,
        batch=400,
    )
    estimate = fl.ppgt(substrate, whole.objective, process=whole.process, baseline="twin")(
        jax.random.key(0), model().start, 800
    )
    values, gradients = [], []
    for k, (sheet, box) in enumerate(zip(SHEETS, BOXES, strict=True)):
        at = substrate.settings(model().start, k)
        value, slope = compute_exact(sheet, box, at)
        low, high = (
            {n: jax.tree.map(float, bound[n]) for n in knobs.KNOBS}
            for bound in (model().lower, model().upper)
        )
        moves = {
            n: (np.asarray(at[n]) > low[n]) & (np.asarray(at[n]) < high[n]) for n in knobs.KNOBS
        }
        chain = box.gain if share == "settings" else moves  # a knob at its limit does not follow θ
        values.append(value)
        gradients.append(np.concatenate([slope[name] * chain[name] for name in ("kappa", "omega")]))
    flat = lambda tree: np.concatenate([np.asarray(tree[name]) for name in ("kappa", "omega")])
    z = (flat(estimate.gradient) - np.mean(gradients, axis=0)) / flat(estimate.groups.stderr)
    assert np.abs(z).max() < 4
    assert abs(float(estimate.value) - np.mean(values)) < 4 * float(estimate.groups.value_stderr)
    each = np.abs(estimate.groups.values - values) / estimate.groups.value_errors
    assert each.max() < 4
    expected = (
        np.std(gradients, axis=0, ddof=1) / 2
    )  # of K = 4 devices; trajectories add a few per cent
    np.testing.assert_allclose(
        flat(estimate.stderr), expected, rtol=0.35, atol=4 * flat(estimate.groups.stderr).max()
    )
    if share == "parameters":  # devices that do the same θ differ less
        assert np.std(values) < 0.5 * np.std(
            [compute_exact(s, b, settings)[0] for s, b in zip(SHEETS, BOXES, strict=True)]
        )


def test_the_value_of_an_array_is_that_of_the_population():
    """J over Gaussian disorder, from exact moments of 300 boxes, is where 12 others put it; these
    alone are sure of another one."""
    sheets = [dataclasses.replace(SHEETS[0], seed=100 + k) for k in range(312)]
    settings = {name: np.asarray(v) for name, v in model().start.items()}
    each = np.array(
        [compute_exact(sheet, device.draw_hidden(sheet), settings)[0] for sheet in sheets[12:]]
    )
    substrate = an_array([Bench(sheet) for sheet in sheets[:12]])
    trajectories = substrate(None, settings, 120)
    rate = TASK.objective.running
    rates = jax.jit(jax.vmap(jax.vmap(lambda x: rate(settings, x, 0.0))))
    power = rates(trajectories.x[:, :-1]).sum(axis=1) * 0.05
    estimate = fl.reduce_samples(Samples({"a": power}, power, trajectories.group))
    off = float(estimate.value) - each.mean()
    assert abs(off) < 4 * np.hypot(float(estimate.value_stderr), each.std() / np.sqrt(len(each)))
    between = np.sqrt(estimate.groups.returns.between)
    assert abs(between - each.std()) < 4 * each.std() / np.sqrt(2 * 11)
    assert float(estimate.groups.value_stderr) < 0.3 * float(estimate.value_stderr)
    assert "12 devices" in substrate.describe(estimate.groups)
    assert "worth while" in substrate.describe(estimate.groups)
    assert all(cost > 0 for cost in substrate.costs())


# ----------------------------------------------------------------------------------------- training


def slope(substrate, objective, process):
    """An estimator that needs no compilation: the mean power of each trajectory, and a gradient
    that has it too.
    """

    def estimate(key, theta, count):
        trajectories = substrate(key, theta, count)
        power = np.square(trajectories.x).mean(axis=(1, 2))
        gradient = jax.tree.map(lambda v: -np.asarray(v)[None] * power[:, None], theta)
        return fl.reduce_samples(Samples(gradient, power, trajectories.group))

    return estimate


def small_plan(**changes):
    plan = {
        "iterations": 3,
        "trajectories": 24,
        "probes": 2,
        "probe_trajectories": 10,
        "batch": 10,
    }
    plan |= {"first_pause": 0.001, "longest_pause": 0.001, "attempts": 2, "rates": (1, 1, 1)}
    return Plan(**(plan | changes))


@functools.cache
def small_model():
    return network_model(SHEETS[0].nominal, interval=SHEETS[0].interval, points=21)


begin, resume = (
    functools.partial(function, estimator=slope) for function in (loop.run, loop.resume)
)


def make_connects(benches, dead=None):
    dead = dead or {}
    return [
        functools.partial(Direct, b, 21, dead.get(k, lambda: False)) for k, b in enumerate(benches)
    ]


@pytest.mark.long
def test_resumed_is_the_same_to_the_bit(tmp_path):
    """Killed after two of four iterations, and a device that falls silent in the second and is
    back in the third.
    """

    def benches():
        acquisition = (
            itertools.count()
        )  # two probes, one of iteration 0, two attempts in iteration 1
        return [Bench(sheet) for sheet in SHEETS[:3]], {1: lambda: next(acquisition) in (3, 4)}

    plan = small_plan(iterations=4, share="parameters")
    boxes, dead = benches()
    whole = list(begin(make_connects(boxes, dead), small_model(), plan, tmp_path / "whole"))
    others, dead = benches()
    rows = begin(make_connects(others, dead), small_model(), plan, tmp_path / "cut")
    first = [next(rows), next(rows)]
    rows.close()
    rest = list(resume(make_connects(others, dead), small_model(), tmp_path / "cut"))
    for (a, x), (b, y) in zip(whole, [*first, *rest], strict=True):
        assert a._replace(seconds=0) == b._replace(seconds=0)
        for leaf, same in zip(
            jax.tree.leaves(x.next_theta), jax.tree.leaves(y.next_theta), strict=True
        ):
            np.testing.assert_array_equal(leaf, same)
    assert [b.shots for b in boxes] == [b.shots for b in others]
    # nothing twice, everything counted: the last 24 at the end
    assert whole[-1][0].trajectories + 24 == sum(b.shots for b in boxes)
    assert "device down" in "".join(row.event for row, _ in whole)
    assert "device back" in "".join(row.event for row, _ in whole)
    tables = [history.read_numbers(tmp_path / name / "devices.csv") for name in ("whole", "cut")]
    assert tables[0][0] == tables[1][0]
    np.testing.assert_array_equal(tables[0][1], tables[1][1])
    kept = [files.open(f).count for f in (tmp_path / "cut" / "recordings").rglob("batch-*.nc")]
    assert sum(kept) == sum(b.shots for b in others)
    assert len([*(tmp_path / "cut").glob("calibration-*.txt")]) == 3
    assert "device 3: " in (tmp_path / "cut" / "devices.txt").read_text()


@pytest.mark.long
def test_several_addresses_on_the_command_line(tmp_path):
    """Two boxes of one process behind sockets, trained and resumed."""
    with processes.bench_processes(
        2, "--set", "rows=2", "--set", "columns=2", "--set", "interval=0.05", "--fault", "2:drop@5"
    ) as places:
        addresses = [f"tcp://{host}:{port}" for host, port in places]
        words = [
            "insitu",
            "train",
            "--out",
            str(tmp_path / "run"),
            "--iterations",
            "1",
            "--trajectories",
            "12",
        ]
        words += ["--set", "points=21", "--baseline", "none", "--set", "probes=3"]
        done = CliRunner().invoke(app, [*words, *addresses])
        assert done.exit_code == 0, done.output
        assert "2 devices: J differs" in done.output
        assert "worth while" in done.output
        again = CliRunner().invoke(
            app, ["insitu", "train", "--resume", str(tmp_path / "run"), "--iterations", "2"]
        )
        assert again.exit_code == 0, again.output
    assert (
        "device 2: " in (tmp_path / "run" / "incidents.csv").read_text()
    )  # the first has no fault
    assert "device 1: " not in (tmp_path / "run" / "incidents.csv").read_text()
    assert len(history.read(tmp_path / "run" / "history.csv")) == 2


@pytest.mark.long
def test_a_device_that_is_silent_at_first_is_calibrated_when_it_answers(tmp_path):
    boxes, finished_rows = [Bench(sheet) for sheet in SHEETS[:3]], []
    dead = {2: lambda: len(finished_rows) < 1}
    rows = begin(
        make_connects(boxes, dead), small_model(), small_plan(iterations=4), tmp_path / "run"
    )
    counts = []
    for row, record in rows:
        finished_rows.append(row)
        counts.append(record.estimate.groups.counts.tolist())
    assert counts == [
        [12, 12],
        [12, 12],
        [8, 8, 8],
        [8, 8, 8],
    ]  # asked again after one call, then after two
    assert (tmp_path / "run" / "calibration-3.txt").exists()
    names, table = history.read_numbers(tmp_path / "run" / "devices.csv")
    assert table[:, names.index("3 up")].tolist() == [0, 0, 1, 1]
    assert np.isnan(table[0, names.index("3 J")])
    assert np.isfinite(table[2, names.index("3 J")])
    assert table[2, names.index("1 drift omega_offset")] > 0
    guard = table[:, names.index("1 guard")]
    assert np.all((guard > 1 / 4) & (guard < 4))  # within what passes: half to twice, and chance
    assert [r.row for r in history.read(tmp_path / "run" / "history.csv")] == [0, 1, 2, 3]


def test_plans_that_do_not_fit_the_devices_are_refused(tmp_path):
    connects = make_connects([Bench(sheet) for sheet in SHEETS[:3]])
    for several, plan, fact in (
        (connects, small_plan(trajectories=4), r"6.*3 devices.*4"),
        (connects, small_plan(rates=(1, 2)), r"`rates`.*3.*2"),
        (connects[0], small_plan(share="parameters", rates=()), "'parameters'"),
        ([], small_plan(rates=()), "empty"),
    ):
        with pytest.raises(ValueError, match=fact):
            begin(several, small_model(), plan, tmp_path / "run")
    with pytest.raises(ValueError, match="'gains'"):
        small_plan(share="gains")
    with pytest.raises(ValueError, match="`correct`"):
        begin(
            connects,
            small_model()._replace(methods=Methods()),
            small_plan(share="parameters"),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
    list(begin(connects, small_model(), small_plan(iterations=0, rates=()), tmp_path / "run"))
    with pytest.raises(ValueError, match=r"several devices.*one"):
        list(resume(connects[0], small_model(), tmp_path / "run", iterations=1))
    with pytest.raises(ValueError, match=r"3 devices.*2"):
        list(resume(connects[:2], small_model(), tmp_path / "run", iterations=1))


def test_corrected_settings_end_where_the_knobs_do():
    """θ within its bounds, settings within those of the knobs: (1.4 − 0.1)/0.6 = 2.2, and
    −1/0.05 is not tried.
    """
    values = {f"omega_{part}": np.full(4, v) for part, v in (("offset", 0.0), ("gain", 0.05))}
    values |= {f"kappa_{part}": np.full(4, v) for part, v in (("offset", 0.1), ("gain", 0.6))}
    theta = {"omega": np.full(4, -1.0), "kappa": np.full(4, 1.4)}
    near = network_model(SHEETS[0].nominal, interval=0.05, points=21).methods.correct(theta, values)
    np.testing.assert_allclose(near["kappa"], 1.5)
    np.testing.assert_allclose(near["omega"], -1.0)  # a knob that hardly works is left where θ says
    far = network_model(
        SHEETS[0].nominal, interval=0.05, points=21, reach={"kappa": (0.0, 2.5)}
    ).methods.correct(theta, values)
    np.testing.assert_allclose(far["kappa"], 1.3 / 0.6, rtol=1e-6)
