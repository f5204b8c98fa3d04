"""Knobs for χ, the generator that modulates couplings and records what it played, and the one
that injects noise.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from fluctua import tcmt
from fluctua.core.estimator import ppgt
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import Plan, files, instrument_substrate, network_model, run
from fluctua.insitu.bench import bench_model, device, server
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.device_training.model_parts import describe_model
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import InstrumentError
from fluctua.insitu.instrument.substrate import Retry
from fluctua.insitu.instrument.virtual import BenchDescription, VirtualBench
from fluctua.insitu.networks import BOUNDS

# one Euler step a sample, and next to no readout noise: the residuals of the true model are its
# noise
SHEET = device.Sheet(
    rows=2, columns=2, seed=5, interval=0.02, oversample=1, ageing=0.0, readout=1e-5
)
BOX = device.draw_hidden(SHEET)
POINTS, NOISE, SIGMA_KAPPA = 51, 1.0, 0.5
SETTINGS = {**device.reset_settings(SHEET), "chi": np.array([0.1, -0.1, 0.1, 0.1])}


@functools.cache
def model(sigma_kappa=SIGMA_KAPPA):
    return network_model(
        SHEET.nominal,
        interval=SHEET.interval,
        points=POINTS,
        bounds=BOUNDS | {"chi": (-0.05, 0.05)},
        sigma_kappa=sigma_kappa,
    )


def truth():
    lead, scale = np.array([1.0, 0, 0, 1.0]), SHEET.sigma_w**2 + NOISE**2
    parts = {
        f"{name}_{part}": getattr(BOX, part)[name]
        for name in knobs.KNOBS
        for part in ("offset", "gain")
    }
    parts |= {"chi_offset": np.zeros(4), "chi_gain": BOX.chi_gain}
    parts |= {
        "decay": lead + BOX.gamma,
        "drive_re": np.array([10 * np.sqrt(2)]),
        "drive_im": np.zeros(1),
    }
    return parts | {"diffusion": scale * (lead + BOX.gamma)}


def rows(values, count):
    return {name: np.broadcast_to(v, (count, *np.shape(v))) for name, v in values.items()}


def excess(process, trajectories, **changes):
    """ν − 1 of all components together, in standard errors, by the truth but for some changes."""
    context = {**rows(truth(), len(trajectories.x)), **trajectories.context, **changes}
    noise = ResidualGuard(process).measure(SETTINGS, trajectories._replace(context=context))
    steps = len(trajectories.t) - 1
    return float((noise.mean() - 1) / np.sqrt(2 / (noise.size * steps)))


@pytest.mark.long
def test_what_the_box_does_is_what_its_settings_and_records_say():
    """With χ, recorded δκ and injected noise the residuals are the noise; without any of them
    they are not.
    """
    with server.background(Bench(SHEET)) as port:
        bench = functools.partial(
            VirtualBench,
            f"tcp://127.0.0.1:{port}",
            points=POINTS,
            noise=NOISE,
            sigma_kappa=SIGMA_KAPPA,
        )
        substrate = instrument_substrate(bench, batch=100)
        trajectories = substrate(None, SETTINGS, 150)
        again = substrate(None, SETTINGS, 20)
        substrate.close()
    process = model().process
    assert trajectories.context["sine"].shape == (150, 4, 10)
    assert abs(excess(process, trajectories)) < 4
    # one trajectory's modulation does not explain another
    moved = {name: np.roll(v, 1, axis=0) for name, v in trajectories.context.items()}
    assert excess(process, trajectories, **moved) > 10
    assert excess(process, trajectories, chi_gain=np.zeros((150, 4))) > 6
    quiet = rows(truth(), 150)["diffusion"] * SHEET.sigma_w**2 / (SHEET.sigma_w**2 + NOISE**2)
    assert excess(process, trajectories, diffusion=quiet) > 100
    assert abs(excess(process, again)) < 4


@pytest.mark.long
def test_gains_of_the_kerr_knobs_are_found():
    rng, runs = np.random.default_rng(0), []
    for k in range(4):
        settings = model().probe(rng)
        codes = device.measure(
            SHEET, BOX, settings, count=60, points=POINTS, shots=1000 * k, sigma_kappa=SIGMA_KAPPA
        )
        t = np.arange(POINTS) * SHEET.interval
        runs.append(
            (
                settings,
                Trajectories(t, codes * SHEET.scale, device.draw_modulation(SHEET, 60, 1000 * k)),
            )
        )
    values = model().calibrate(runs).values
    task = tcmt.transmission(
        SHEET.nominal,
        horizon=(POINTS - 1) * SHEET.interval,
        dt=SHEET.interval,
        sigma_kappa=SIGMA_KAPPA,
    )
    lines = knobs.fit_gains(runs, knobs.fit_runs(task, runs, kerr=True))
    for name, g in lines.items():
        offset, gain = truth()[f"{name}_offset"], truth()[f"{name}_gain"]
        z = [(g.offset - offset) / g.offset_stderr, (g.gain - gain) / g.gain_stderr]
        assert np.abs(np.concatenate(z)).max() < 4
    np.testing.assert_array_equal(values["chi_gain"], lines["chi"].gain)
    assert (
        np.median(lines["chi"].gain_stderr) < 0.1
    )  # half of the spread of the gains: a lost one would show
    corrected = knobs.compute_settings(values, {"chi": np.full(4, 0.01)}, {"chi": (-0.05, 0.05)})[
        "chi"
    ]
    np.testing.assert_allclose(
        values["chi_offset"] + values["chi_gain"] * corrected, 0.01, atol=1e-6
    )


def test_generators_that_fell_silent_are_noticed(tmp_path):
    """A brownout stops the modulation: that batch is not used, and the next is made with it."""
    bench, incidents = Bench(SHEET), []
    with server.background(bench) as port:
        connect = functools.partial(
            VirtualBench, f"tcp://127.0.0.1:{port}", points=POINTS, sigma_kappa=SIGMA_KAPPA
        )
        VirtualBench(f"tcp://127.0.0.1:{port}").line.write("DIAG:FAUL BROWNOUT,2")
        substrate = instrument_substrate(
            connect, batch=10, report=incidents.append, retry=Retry(3, 0.001, 0.001)
        )
        trajectories = substrate(None, SETTINGS, 20)
        substrate.close()
    assert len(trajectories.x) == len(trajectories.context["sine"]) == 20
    assert incidents
    assert bench.sigma_kappa == SIGMA_KAPPA
    with server.background(bench) as port, pytest.raises(InstrumentError, match="3"):
        VirtualBench(f"tcp://127.0.0.1:{port}", noise=3.0)


@pytest.mark.long
def test_a_run_with_modulation_records_it(tmp_path):
    """Through the loop: probes calibrate χ, δκ is in every recording, and a gradient comes out."""
    plan = Plan(iterations=1, trajectories=40, probes=4, probe_trajectories=40)
    with server.background(Bench(SHEET)) as port:
        connect = functools.partial(
            VirtualBench,
            f"tcp://127.0.0.1:{port}",
            points=POINTS,
            noise=NOISE,
            sigma_kappa=SIGMA_KAPPA,
        )
        ((row, record),) = run(connect, model(), plan, tmp_path / "run")
    assert set(record.estimate.gradient) == {"omega", "kappa", "chi"}
    assert np.isfinite(row.gradient_norm)
    step = {
        name: np.abs(np.asarray(record.next_theta[name] - record.theta[name])).max()
        for name in record.theta
    }
    np.testing.assert_allclose(
        step["chi"], 0.01 * step["kappa"], rtol=1e-3
    )  # Adam's first step is its rate
    with files.open(sorted((tmp_path / "run" / "recordings").glob("*.nc"))[-1]) as file:
        assert file.trajectories(0, 1).context["sine"].shape == (1, 4, 10)


def test_the_model_of_a_bench_is_that_of_its_data_sheet():
    """As earlier versions built it: their runs go on."""
    sheet = BenchDescription("box", 2, 2, 0.5, 0.02, 16.0, 1e-3, sites=(0, 1, 2, 3), readout=0.0)
    bench = SimpleNamespace(description=sheet, points=21, generators={"NOIS": 0.0, "MOD": 0.0})
    bounds = {"omega": (-2.5, 2.5), "kappa": (0.0, 1.5)}
    network = tcmt.rectangular(2, 2, sigma_w=0.5)
    expected = network_model(network, interval=0.02, points=21, bounds=bounds)
    made = bench_model.make_model(bench, omega_max=2.5)
    assert describe_model(made, ppgt) == describe_model(expected, ppgt)
    noisy = SimpleNamespace(description=sheet, points=21, generators={"NOIS": 1.2, "MOD": 0.0})
    twin = bench_model.make_model(noisy).methods.self_calibration.model
    np.testing.assert_allclose(twin.fused.task.network.sigma_r, 1.3)
    with pytest.raises(ValueError, match=r"`kappa_max`.*-1"):
        bench_model.make_model(bench, kappa_max=-1.0)
