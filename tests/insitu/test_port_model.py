"""A bench that is read at its ports: its model, and training over the socket."""

import dataclasses
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.bench import device, server, simulated
from fluctua.insitu.bench.bench_model import make_model
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.networks import network_model
from fluctua.insitu.port_networks import port_network_model
from fluctua.learn.effective import Effective
from fluctua.store import history
from fluctua.tcmt import conversion
from problems import flat

SHEET = device.Sheet(rows=2, columns=3, seed=0, ageing=0.0, read="ports")
HIDDEN = device.draw_hidden(SHEET)
POINTS = 101
MODEL = port_network_model(
    SHEET.nominal, interval=SHEET.interval, points=POINTS, readout=SHEET.readout
)
OWN = MODEL.find_self_calibration()
COLUMNS = [0, 5, 6, 11]


def make_plan(**changes):
    return loop.Plan(
        **{
            "iterations": 4,
            "trajectories": 2,
            "calibration": "training",
            "first_pause": 0.01,
            "longest_pause": 0.3,
            **changes,
        }
    )


@contextmanager
def serving(bench):
    with server.background(bench) as port:
        yield lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS)


def measure(sheet, settings, count):
    codes = device.measure(sheet, HIDDEN, settings, count=count, points=POINTS)
    return Trajectories(np.arange(POINTS) * sheet.interval, codes * sheet.scale)


def test_returns_are_those_of_the_whole_record():
    whole = measure(dataclasses.replace(SHEET, read="all"), device.reset_settings(SHEET), 3)
    ports = whole._replace(x=whole.x[..., COLUMNS])
    full = network_model(SHEET.nominal, interval=SHEET.interval, points=POINTS)
    running = full.objective.running
    rate = jax.vmap(jax.vmap(lambda x: running(full.start, x, 0.0)))(whole.x)
    expected = np.trapezoid(np.asarray(rate, np.float64), dx=SHEET.interval, axis=1)
    assert OWN.returns(MODEL.start, ports) == pytest.approx(expected, rel=1e-5)
    assert expected.min() > 0


@pytest.mark.parametrize("interval", [0.1, 0.2])
def test_returns_of_a_noiseless_record_are_those_in_closed_form(interval):
    """∫|ψ|²dt of ψ(t) = Σ bₖ(e^{λₖt} − 1)/λₖ. Trapezoids are off by Δ²/12 times the last slope.

    A sum that left out the last sample would be off by Δ/2 times the last rate, 3 to 6 %.
    """
    network = tcmt.rectangular(2, 3, gamma=0.05)
    horizon = 20.0
    points = round(horizon / interval) + 1
    model = port_network_model(network, interval=interval, points=points)
    theta = model.start
    task = tcmt.transmission(network, horizon=horizon, dt=interval)
    p = {"omega": np.zeros(6), "kappa": np.ones(7), "chi": np.zeros(6)}
    spec = conversion.kernel_spec(task, p)
    i, j = spec.bonds.T
    generator = np.diag(-1j * spec.omega - spec.damping)
    generator[i, j] -= 1j * spec.kappa
    generator[j, i] -= 1j * spec.kappa
    rates, modes = np.linalg.eig(generator)
    source = np.zeros(6, complex)
    source[spec.drive_sites] = spec.drive[0]
    share = modes[-1] * np.linalg.solve(modes, source) / rates
    t = interval * np.arange(points)
    psi = (share * np.expm1(t[:, None] * rates)).sum(axis=1)
    # ∫(e^{at} − 1)(e^{bt} − 1) dt
    a, b = rates[:, None], rates.conj()
    integrals = np.expm1((a + b) * horizon) / (a + b) + horizon
    integrals = integrals - np.expm1(a * horizon) / a - np.expm1(b * horizon) / b
    gain = spec.port_weight[-1] * np.abs(spec.port_gain[-1]) ** 2
    exact = gain * (share[:, None] * share.conj() * integrals).sum().real
    x = np.zeros((1, points, 4))
    x[0, :, 1] = psi.real
    x[0, :, 3] = psi.imag
    returns = model.find_self_calibration().returns(theta, Trajectories(t, x))
    rate = gain * np.abs(psi) ** 2
    slope = abs(rate[-1] - rate[-2]) / interval
    assert exact > 0.1
    assert returns[0] == pytest.approx(exact, abs=interval**2 / 6 * slope + 1e-5)
    assert abs(rate[-1]) * interval / 2 > 10 * abs(returns[0] - exact)


def test_the_score_of_the_bench_has_mean_zero_at_its_true_numbers():
    """Score and χ² of 40 records at the hidden numbers, in standard errors of the two.

    The bench takes ten Euler steps per sample, which the model takes for a continuous motion: its
    numbers are off by |A|²Δt/2 < 0.01 of their size, less than the errors of 40 short records.
    """
    truth = {
        "omega_offset": HIDDEN.offset["omega"],
        "omega_gain": HIDDEN.gain["omega"],
        "kappa_offset": HIDDEN.offset["kappa"],
        "kappa_gain": HIDDEN.gain["kappa"],
        "loss": np.log(HIDDEN.gamma / SHEET.nominal.gamma),
    }
    settings = device.reset_settings(SHEET)
    records = measure(SHEET, settings, 40)
    leaves, tree = jax.tree.flatten(OWN.start)
    at = Effective(OWN.effective, tree, tuple(leaf.shape for leaf in leaves))
    u = np.concatenate(jax.tree.leaves(truth))
    evidence = OWN.model.evidence(at, settings, u, records, 1, SHEET.readout)
    size = np.sqrt(np.diag(evidence.information))
    informative = size > 0  # detunings are set to 0, where their gains have no effect
    assert informative.sum() == len(u) - SHEET.nominal.sites
    z = evidence.score[informative] / size[informative]
    assert np.abs(z).max() < 4
    assert np.std(z) > 0.3  # of the size of chance, not of zero
    samples = 40 * 20 * 4
    chance = 4 * np.sqrt(2 / samples)
    p = OWN.effective(settings, truth)
    assert OWN.model.misfit(p, records, SHEET.readout) == pytest.approx(1, abs=chance)
    sheet = OWN.effective(settings, OWN.start)
    assert OWN.model.misfit(sheet, records, SHEET.readout) > 1 + chance


def test_records_are_thinned_for_the_fit_only():
    records = measure(SHEET, device.reset_settings(SHEET), 2)
    p = OWN.effective(MODEL.start, OWN.start)
    thinned = records._replace(t=records.t[::5], x=records.x[:, ::5])
    assert OWN.model.thin == 5
    assert OWN.model.misfit(p, records, 0.0) == replace(OWN.model, thin=1).misfit(p, thinned, 0.0)


def test_other_ways_to_train_are_refused(tmp_path):
    with pytest.raises(ValueError, match='"probes".*calibration="training"'):
        loop.run(lambda: None, MODEL, make_plan(calibration="probes"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="chi"):
        port_network_model(
            SHEET.nominal, interval=0.01, bounds={"omega": (-1, 1), "kappa": (0, 1), "chi": (0, 1)}
        )


def test_the_model_of_an_address_is_that_of_what_is_read():
    with server.background(Bench(SHEET)) as port:
        bench = VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS)
        model = make_model(bench)
        bench.close()
    assert model.expected.channels == 4
    assert model.methods.self_calibration.required
    assert model.methods.self_calibration.readout == SHEET.readout


@pytest.mark.long
def test_the_command_needs_an_address_only(tmp_path):
    """Check, train and resume, without a word about calibration or model."""

    def command(*words):
        outcome = CliRunner().invoke(app, ["insitu", *words], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return outcome.output

    folder = tmp_path / "run"
    with server.background(Bench(SHEET)) as port:
        address = f"tcp://127.0.0.1:{port}"
        points = ("--set", f"points={POINTS}")
        checked = command("check", address, *points)
        assert "4 channels" in checked
        assert "squared residuals" in checked
        output = command("train", address, "--out", str(folder), "--iterations", "2", *points)
        assert "train and calibrate at once" in output
        command("train", "--resume", str(folder), "--iterations", "3")
        refused = CliRunner().invoke(
            app, ["insitu", "train", address, "--out", str(tmp_path / "no"), "--baseline", "none"]
        )
    assert refused.exit_code == 2
    assert "--baseline none" in refused.output
    rows = history.read(folder / "history.csv")
    # four were for the check, and 20 for the end after two iterations
    assert [row.trajectories for row in rows] == [6, 8, 10 + 20]
    assert not (folder / "incidents.csv").exists()


@pytest.mark.long
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    whole = tmp_path / "whole"
    with serving(Bench(SHEET)) as connect:
        assert len(list(loop.run(connect, MODEL, make_plan(), whole))) == 4
    parts = tmp_path / "parts"
    with serving(Bench(SHEET)) as connect:
        first_part = loop.run(connect, MODEL, make_plan(), parts)
        for row, _ in first_part:
            if row.iteration == 1:
                break
        first_part.close()
        assert len(list(loop.resume(connect, MODEL, parts))) == 2
    with np.load(whole / "final.npz") as one, np.load(parts / "final.npz") as other:
        assert np.array_equal(flat(dict(one)), flat(dict(other)))
        assert not np.array_equal(flat(dict(one)), flat(MODEL.start))
    with insitu.files.open(min((whole / "recordings").iterdir())) as recording:
        assert recording.description.channels == ("psi[0]", "psi[5]")
        assert recording.x.shape == (2, POINTS, 4)


@pytest.mark.long
def test_ports_train_as_far_as_the_whole_record(tmp_path):
    """40 trajectories at two ports against 40 of all resonators; J by the hidden numbers, exactly.

    Both calibrate as they go. The ports tell less of each number, but the training needs only what
    moves the power at the output: it has to gain 80 % of what the whole record gains.
    """
    task = tcmt.transmission(
        SHEET.nominal.replace(gamma=HIDDEN.gamma),
        horizon=(POINTS - 1) * SHEET.interval,
        dt=SHEET.interval / SHEET.oversample,
    )
    exact = simulated.Exact(task, HIDDEN.offset, HIDDEN.gain)

    def evaluate(settings):
        return float(exact(None, settings, 1).value)

    reached = {}
    for read in device.READ:
        sheet = dataclasses.replace(SHEET, read=read)
        with serving(Bench(sheet)) as connect:
            bench = connect()
            model = make_model(bench)
            bench.close()
            plan = make_plan(iterations=40, measure_every=2)
            *_, (row, record) = loop.run(connect, model, plan, tmp_path / read)
        assert row.trajectories == 40
        reached[read] = evaluate(record.next_theta)
    start = evaluate(MODEL.start)
    assert reached["all"] > 1.5 * start
    assert reached["ports"] - start > 0.8 * (reached["all"] - start)
