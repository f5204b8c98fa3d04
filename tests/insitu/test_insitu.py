"""In situ: calibration from recordings, gradients at the bench, training that survives a kill,
and the whole of it.
"""

import dataclasses
import functools
import json
import math
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.core.estimate import Estimate
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import files
from fluctua.insitu.bench import demo, device, server, simulated
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.calibrate.actuators import fit_own_gains
from fluctua.insitu.calibrate.fit import fit_system
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.instrument.substrate import instrument_substrate
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.networks import network_model
from fluctua.store import history
from problems import flat
from processes import environment_to_die_in, wait_until

# one Euler step a sample: the score is then exact, and so is what it is compared with
SHEET = device.Sheet(
    rows=2, columns=2, seed=3, interval=0.02, oversample=1, disorder=0.6, ageing=0.0
)
HIDDEN = device.draw_hidden(SHEET)
POINTS = 101
TASK = tcmt.transmission(SHEET.nominal, horizon=(POINTS - 1) * SHEET.interval, dt=SHEET.interval)


def recorded(settings, count=300, shots=0, sheet=SHEET):
    codes = device.measure(sheet, HIDDEN, settings, count=count, points=POINTS, shots=shots)
    return Trajectories(np.arange(POINTS) * sheet.interval, codes * np.float64(sheet.scale))


def truth():
    """The calibration that a perfect laboratory would find."""
    lead = np.array([1.0, 0, 0, 1.0])
    amplitude = SHEET.sigma_w * np.sqrt(2 * (lead + HIDDEN.gamma))
    parts = {f"{name}_offset": v for name, v in HIDDEN.offset.items()} | {
        f"{name}_gain": v for name, v in HIDDEN.gain.items()
    }
    parts |= {
        "decay": lead + HIDDEN.gamma,
        "drive_re": np.array([10 * np.sqrt(2)]),
        "drive_im": np.zeros(1),
    }
    quiet = {"readout": np.full(4, SHEET.readout**2), "readout_seen": np.array(0.0)}
    return parts | {"diffusion": amplitude**2 / 2} | quiet


@functools.cache
def make_model(points=POINTS):
    """One model for all tests, so that what is made of it is compiled once."""
    return network_model(SHEET.nominal, interval=SHEET.interval, points=points)


def small_model():
    return make_model(points=21)


def fit_settings(settings, **options):
    return fit_system(recorded(settings, **options), *knobs._make_model(TASK, settings))


# -------------------------------------------------------------------------------------- calibration


def test_least_squares_find_the_hidden_parameters():
    settings = device.reset_settings(SHEET)
    fit, true = fit_settings(settings), truth() | device.compute_parameters(SHEET, HIDDEN, settings)
    theta, stderr = fit.drift.theta, fit.drift.stderr
    z = np.concatenate([(theta[name] - true[name]) / stderr[name] for name in theta])
    assert np.abs(z).max() < 4
    assert 0.4 < z.std() < 1.7  # the errors are neither too small nor too large
    np.testing.assert_allclose(fit.noise.diffusion, np.tile(truth()["diffusion"], 2), rtol=0.06)


def test_readout_noise_is_told_from_the_noise_of_the_resonators():
    loud = device.Sheet(
        rows=2,
        columns=2,
        seed=3,
        interval=0.02,
        oversample=1,
        disorder=0.6,
        ageing=0.0,
        readout=0.02,
    )
    noise = fit_settings(device.reset_settings(SHEET), sheet=loud).noise
    z = (noise.diffusion - np.tile(truth()["diffusion"], 2)) / noise.diffusion_stderr
    assert np.abs(z).max() < 4
    assert np.abs((noise.observation_variance - 0.02**2) / noise.observation_stderr).max() < 4


@pytest.mark.parametrize("readout", [1e-3, 0.02])
def test_a_start_far_off_changes_neither_errors_nor_values(readout):
    """From the data sheet, whose ω is off by many hundred errors, as from the truth: what is
    missing in the drift is neither taken for noise, nor does it hide the readout's."""
    sheet = dataclasses.replace(SHEET, readout=readout)
    settings = device.reset_settings(SHEET)
    data, model = recorded(settings, count=60, sheet=sheet), knobs._make_model(TASK, settings)
    true = truth() | device.compute_parameters(SHEET, HIDDEN, settings)
    ours = fit_system(data, *model)
    best = fit_system(data, model.process, {name: true[name] for name in model.theta})
    assert ours.noise.observation_seen == best.noise.observation_seen == (readout > 0.01)
    np.testing.assert_allclose(flat(ours.drift.stderr), flat(best.drift.stderr), rtol=0.02)
    z = (flat(ours.drift.theta) - flat(best.drift.theta)) / flat(best.drift.stderr)
    assert np.abs(z).max() < 0.1  # the same data, and weights that differ by a few per cent at most


def test_gains_and_offsets_of_the_knobs():
    rng, runs = np.random.default_rng(0), []
    model = make_model()
    for k in range(5):
        settings = model.probe(rng)
        runs.append((settings, recorded(settings, count=100, shots=1000 * k)))
    lines = knobs.fit_gains(runs, knobs.fit_runs(TASK, runs))
    for name, g in lines.items():
        z = [
            (g.offset - HIDDEN.offset[name]) / g.offset_stderr,
            (g.gain - HIDDEN.gain[name]) / g.gain_stderr,
        ]
        assert np.abs(np.concatenate(z)).max() < 4
        assert g.p_values.min() > 1e-3
        assert g.gain_stderr.max() < 0.1  # half of the spread of the gains: a lost one would show
    calibrated = model.calibrate(runs)
    np.testing.assert_array_equal(calibrated.values["omega_gain"], lines["omega"].gain)
    assert "CALIBRATION   5 settings, 500 trajectories" in calibrated.report
    assert "not linear" not in calibrated.report
    with pytest.raises(ValueError, match="two different settings"):
        fit_own_gains(np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 2)))


def test_a_bent_knob_is_seen():
    s = np.linspace(-1, 1, 6)[:, None]
    straight = fit_own_gains(s, 0.3 + 1.2 * s, np.full((6, 1), 0.01))
    assert straight.p_values[0] > 0.99
    np.testing.assert_allclose([straight.offset[0], straight.gain[0]], [0.3, 1.2])
    assert fit_own_gains(s, 0.3 + 1.2 * s + 0.1 * s**2, np.full((6, 1), 0.01)).p_values[0] < 1e-6


def test_a_slow_change_is_followed():
    settings = device.reset_settings(SHEET)
    wrong = truth()
    wrong["omega_offset"] = wrong["omega_offset"] + 0.2
    now = wrong
    for k in range(12):
        now = knobs.follow(
            now, TASK, settings, recorded(settings, count=60, shots=100 * k), rate=0.4
        )
    assert np.abs(now["omega_offset"] - HIDDEN.offset["omega"]).max() < 0.05
    np.testing.assert_array_equal(now["omega_gain"], wrong["omega_gain"])


def test_a_dark_batch_does_not_spoil_the_calibration():
    """The drive failed and the readout is loud: such a batch knows ω to σ ≈ 1, the probes knew it
    to 0.01. It may move it by 0.3 · (3 · 0.01/σ)² of σ, 3e-4: 3e-3 after ten, were all in one
    direction."""
    sheet = dataclasses.replace(SHEET, readout=0.2)
    settings = device.reset_settings(SHEET)
    free = truth() | {"readout": np.full(4, 0.04), "readout_seen": np.array(1.0)}
    now = {**free, "omega_stderr": np.full(4, 0.01)}
    for k in range(10):
        codes = device.measure(
            sheet, HIDDEN, settings, count=10, points=POINTS, shots=100 * k, amplitude=0.0
        )
        dark = Trajectories(np.arange(POINTS) * sheet.interval, codes * np.float64(sheet.scale))
        now = knobs.follow(now, TASK, settings, dark)
        free = knobs.follow(free, TASK, settings, dark)
    assert np.abs(now["omega_offset"] - HIDDEN.offset["omega"]).max() < 0.02
    assert np.abs(free["omega_offset"] - HIDDEN.offset["omega"]).max() > 0.2


def test_what_a_batch_leaves_open_stays(monkeypatch):
    settings, start = device.reset_settings(SHEET), truth()
    open_ = knobs.fit_drift

    def half_blind(*words, **options):
        fit = open_(*words, **options)
        return fit._replace(stderr={**fit.stderr, "decay": np.array([np.inf, 1, 1, 1])})

    monkeypatch.setattr(knobs, "fit_drift", half_blind)
    now = knobs.follow(start, TASK, settings, recorded(settings, count=10))
    assert now["decay"][0] == start["decay"][0]
    assert np.all(now["decay"][1:] != start["decay"][1:])


def test_probes_that_hardly_differ_are_refused():
    model = make_model()
    runs = []
    for k in range(3):
        settings = device.reset_settings(SHEET)
        settings["omega"] = settings["omega"] + 1e-6 * k
        settings["kappa"] = settings["kappa"] + 0.2 * k
        runs.append((settings, recorded(settings, count=60, shots=100 * k)))
    with pytest.raises(ValueError, match="do not determine the gains of omega.*further apart"):
        model.calibrate(runs)


def test_the_gradient_at_the_bench_is_the_gradient_of_the_hidden_network():
    """∂J/∂setting = gain · ∂J/∂θ, exactly known for a linear network, though the estimate never
    saw its parameters.
    """
    model = make_model()
    task = tcmt.transmission(
        SHEET.nominal.replace(gamma=HIDDEN.gamma),
        horizon=(POINTS - 1) * SHEET.interval,
        dt=SHEET.interval,
    )
    expected = simulated.Exact(task, HIDDEN.offset, HIDDEN.gain)(None, model.start, 1)
    with server.background(Bench(SHEET)) as port:
        substrate = instrument_substrate(
            lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS), batch=500
        )
        substrate.context = lambda count: jax.tree.map(
            lambda v: np.broadcast_to(v, (count, *np.shape(v))), truth()
        )
        estimate = fl.ppgt(substrate, model.objective, process=model.process)(
            jax.random.key(0), model.start, 2000
        )
        substrate.close()
    assert abs(estimate.value - expected.value) < 4 * estimate.value_stderr
    z = np.concatenate(
        [(estimate.gradient[n] - expected.gradient[n]) / estimate.stderr[n] for n in knobs.KNOBS]
    )
    assert np.abs(z).max() < 4
    signal_to_noise = np.concatenate(
        [np.abs(expected.gradient[n] / estimate.stderr[n]) for n in knobs.KNOBS]
    )
    assert signal_to_noise.max() > 4  # a lost factor of two would show


# ----------------------------------------------------------------------------------------- the loop


class Slope:
    """An estimator that needs no compilation: the mean power, and a gradient that points at its
    settings' zero.
    """

    def __init__(self, substrate, objective, process):
        self.substrate = substrate

    def __call__(self, key, theta, count):
        x = self.substrate(key, theta, count).x
        gradient = jax.tree.map(jnp.negative, theta)
        zero = jax.tree.map(jnp.zeros_like, theta)
        return Estimate(
            gradient, zero, zero, jnp.asarray(np.square(x).mean()), jnp.asarray(0.0), count
        )


def small_plan(**changes):
    return loop.Plan(
        **{
            "iterations": 3,
            "trajectories": 20,
            "probes": 2,
            "probe_trajectories": 10,
            "first_pause": 0.01,
            "longest_pause": 0.3,
            **changes,
        }
    )


@pytest.mark.long
def test_a_run_leaves_everything_behind(tmp_path):
    bench = Bench(SHEET)
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        connect().line.write("DIAG:FAUL NAN,4")
        rows = [
            row
            for row, _ in loop.run(
                connect, small_model(), small_plan(), tmp_path / "run", estimator=Slope
            )
        ]
    assert [row.iteration for row in rows] == [0, 1, 2]
    assert rows[-1].trajectories == 86  # 2 × 10 to calibrate, 3 × 20, 6 in place of bad ones
    assert bench.shots == 86 + 20  # at the end
    assert rows[1].event == "6 invalid"
    assert [row.J for row in history.read(tmp_path / "run" / "history.csv")] == [
        row.J for row in rows
    ]
    assert "6 of 20 trajectories invalid" in (tmp_path / "run" / "incidents.csv").read_text()
    batches = sorted((tmp_path / "run" / "recordings").glob("batch-*.nc"))
    assert sum(files.open(f).count for f in batches) == 86 + 20
    with np.load(tmp_path / "run" / "final.npz") as final:
        assert np.abs(final["kappa"]).max() < 1  # it walked towards zero
    with pytest.raises(ValueError, match="not empty"):
        next(loop.run(connect, small_model(), small_plan(), tmp_path / "run"))


@pytest.mark.long
def test_what_a_run_recorded_is_calibrated_by_itself(tmp_path):
    """The probes as files: gains and offsets of every knob in standard errors, from `fluctua
    calibrate` alone. Half of a gain would be 60 errors of the best known ω and κ.
    """
    bench, plan = (
        Bench(SHEET),
        small_plan(iterations=0, probes=4, probe_trajectories=32, batch=32),
    )
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS)
        model = make_model()
        assert not list(loop.run(connect, model, plan, tmp_path / "run", estimator=Slope))
    files = [str(path) for path in sorted((tmp_path / "run" / "recordings").glob("batch-*.nc"))]
    done = CliRunner().invoke(app, ["calibrate", *files, "--json"])
    assert done.exit_code == 0, done.output
    gains = json.loads(done.stdout)["gains"]
    for name in knobs.KNOBS:
        g = {
            part: np.array(gains[name][part])
            for part in ("offset", "offset_stderr", "gain", "gain_stderr")
        }
        z = [
            (g["offset"] - HIDDEN.offset[name]) / g["offset_stderr"],
            (g["gain"] - HIDDEN.gain[name]) / g["gain_stderr"],
        ]
        assert np.abs(np.concatenate(z)).max() < 4
    shown = CliRunner().invoke(app, ["calibrate", *files]).output
    assert "a line? p" in shown
    one = CliRunner().invoke(app, ["estimate", files[0]])
    assert one.exit_code == 0, one.output


@pytest.mark.long
def test_going_on_after_giving_up(tmp_path):
    bench = Bench(SHEET)
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        connect().line.write("DIAG:FAUL SHORT,4,3")
        plan = small_plan(attempts=3)
        with pytest.raises(RuntimeError, match="failed 3 times in a row"):
            list(loop.run(connect, small_model(), plan, tmp_path / "run", estimator=Slope))
        assert len(history.read(tmp_path / "run" / "history.csv")) == 1
        rest = list(
            loop.resume(connect, small_model(), tmp_path / "run", iterations=4, estimator=Slope)
        )
    assert [row.iteration for row, _ in rest] == [1, 2, 3]
    assert [row.iteration for row in history.read(tmp_path / "run" / "history.csv")] == [0, 1, 2, 3]
    assert loop.read_plan(tmp_path / "run").iterations == 4
    assert rest[-1][0].trajectories == 100  # calibrated once, and the calibration was kept


def test_going_on_with_another_model_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    with server.background(Bench(SHEET)) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        list(loop.run(connect, small_model(), small_plan(iterations=1), folder, estimator=Slope))
        model = small_model()
        narrow = model.knobs | {"omega": model.knobs["omega"]._replace(bounds=(-1.0, 2.0))}
        stiff = model.process._replace(drift=lambda settings, x, t, context: -x)
        for other, estimator, name in (
            (model._replace(process=stiff), Slope, "`process.drift`"),
            (model._replace(knobs=narrow), Slope, "`lower`"),
            (model, None, "`estimator`"),
        ):
            with pytest.raises(ValueError, match=name):
                loop.resume(connect, other, folder, iterations=2, estimator=estimator)
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | {"learning_rate": math.inf}))
        with pytest.raises(ValueError, match="`learning_rate` was 0.1 and is inf"):
            loop.resume(connect, model, folder, estimator=Slope)
        old = {
            name: value
            for name, value in plan.items()
            if name not in ("checksum", "parts", "made_with")
        }
        (folder / "plan.json").write_text(json.dumps(old))
        incidents = []
        options = {"iterations": 2, "estimator": Slope, "report": incidents.append}
        assert len(list(loop.resume(connect, small_model(), folder, **options))) == 1
    assert "no fingerprints" in incidents[0].message


@pytest.mark.parametrize(
    "kind",
    [
        "dead",
        pytest.param("random", marks=pytest.mark.long),
        pytest.param("frozen", marks=pytest.mark.long),
    ],
)
def test_a_box_that_dies_after_calibration_ends_the_run(tmp_path, kind):
    """Its data are kept as left out, and no row of the history has them."""
    bench = Bench(SHEET)
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        connect().line.write(f"DIAG:FAUL {kind},4,99")
        rows, plan = [], small_plan(attempts=3)
        with pytest.raises(RuntimeError, match="no usable trajectory"):
            rows += loop.run(connect, small_model(), plan, tmp_path / "run", estimator=Slope)
        connect().line.write("DIAG:FAUL:CLE")
        rest = list(loop.resume(connect, small_model(), tmp_path / "run", estimator=Slope))
    assert [row.iteration for row, _ in rest] == [1, 2]
    assert len(history.read(tmp_path / "run" / "history.csv")) == 3
    incidents = (tmp_path / "run" / "incidents.csv").read_text()
    assert ("repeated" if kind == "frozen" else "as much as at calibration") in incidents
    left_out = [
        files.open(f).count for f in (tmp_path / "run" / "recordings").glob("*-left-out.nc")
    ]
    assert sum(left_out) == 60


def test_a_frozen_box_is_known_across_a_resume(tmp_path):
    bench = Bench(SHEET)
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        plan = small_plan(iterations=1, attempts=2)
        list(loop.run(connect, small_model(), plan, tmp_path / "run", estimator=Slope))
        connect().line.write("DIAG:FAUL FROZEN,1,99")
        with pytest.raises(RuntimeError, match="40 repeated"):
            list(
                loop.resume(connect, small_model(), tmp_path / "run", iterations=2, estimator=Slope)
            )


def test_resuming_on_another_box_is_refused(tmp_path):
    other = Bench(dataclasses.replace(SHEET, seed=4))
    with server.background(Bench(SHEET)) as port, server.background(other) as elsewhere:
        connect = lambda at: lambda: VirtualBench(f"tcp://127.0.0.1:{at}", points=21)
        list(
            loop.run(
                connect(port),
                small_model(),
                small_plan(iterations=1),
                tmp_path / "run",
                estimator=Slope,
            )
        )
        go_on = lambda at: list(
            loop.resume(connect(at), small_model(), tmp_path / "run", iterations=2, estimator=Slope)
        )
        with pytest.raises(
            RuntimeError, match="'fluctua,virtual bench,4'.*'fluctua,virtual bench,3'"
        ):
            go_on(elsewhere)
        assert len(go_on(port)) == 1


@pytest.mark.long
def test_rows_without_a_checkpoint_are_kept(tmp_path):
    """Measured once, they cannot be had again."""
    bench, folder = Bench(SHEET), tmp_path / "run"
    with server.background(bench) as port:
        connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=21)
        first = [
            row.J
            for row, _ in loop.run(connect, small_model(), small_plan(), folder, estimator=Slope)
        ]
        shutil.rmtree(folder / "checkpoints")
        assert len(list(loop.resume(connect, small_model(), folder, estimator=Slope))) == 3
    assert [row.J for row in history.read(folder / "history.damaged")] == first
    assert "history.damaged" in (folder / "incidents.csv").read_text()


@pytest.mark.long
def test_going_on_after_a_kill(tmp_path):
    """The command, killed without warning in the middle of an acquisition or wherever it is;
    the bench lives on.
    """
    bench, folder = Bench(SHEET), tmp_path / "run"
    environment = environment_to_die_in(tmp_path, JAX_ENABLE_X64="1")
    options = "--iterations 1000 --trajectories 20 --set probes=2 --set points=21"
    with server.background(bench) as port:
        words = f"insitu train tcp://127.0.0.1:{port} --out {folder} {options}"
        command = [sys.executable, "-m", "fluctua", *words.split()]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        rows = folder / "history.csv"
        wait_until(lambda: rows.exists() and len(history.read(rows)) >= 3, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        before = history.read(folder / "history.csv")
        kept = len(list((folder / "recordings").glob("*.nc")))
        last = before[-1].iteration
        words = ["insitu", "train", "--resume", str(folder), "--iterations", str(last + 4)]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    after = history.read(folder / "history.csv")
    assert [row.iteration for row in after] == list(range(last + 4))
    assert after[:last] == before[:last]
    batches = list((folder / "recordings").glob("*.nc"))
    assert len(batches) >= kept + 3
    recorded = sum(files.open(f).count for f in batches)
    spent = json.loads((folder / "summary.json").read_text())["trajectories"]
    assert spent == recorded + 4  # what was cut off was spent too, and the check
    assert after[-1].trajectories == spent - 20  # before the final evaluation
    assert "trajectories on the instrument" in done.stdout
    assert json.loads((folder / "plan.json").read_text())["instruments"][0].startswith("tcp://127")


# ------------------------------------------------------------------------------------- start to end


@pytest.mark.long
def test_training_in_situ_closes_the_gap(tmp_path):
    """A bench of its own, calibrated and trained over its socket, with faults: ≥ 90 % of the true
    optimum, and more than the nominal training."""
    sheet = device.Sheet(rows=2, columns=2, seed=3, interval=0.02, disorder=0.8)
    plan = loop.Plan(
        options={"points": 151},
        iterations=24,
        trajectories=32,
        probes=4,
        probe_trajectories=32,
        record=False,
        longest_pause=1.0,
    )
    result = demo.run(
        tmp_path / "run",
        sheet=sheet,
        plan=plan,
        reference=60,
        measure=100,
        say=lambda text: None,
        bench_options=("--fault", "nan@12", "--fault", "reboot@20"),
    )
    assert result.share > 0.9
    assert result.in_situ.J > 1.5 * result.nominal.J
    assert result.nominal_predicted > 1.5 * result.nominal.J
    assert result.discarded["invalid"] > 0
    from fluctua.plot.insitu import draw_in_situ

    draw_in_situ(result).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
