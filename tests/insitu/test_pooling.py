"""Several recordings, one estimate: the trajectories of all, whoever read them."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from chaos import Chaos
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.insitu import pooling
from fluctua.insitu.estimating import estimate_model
from fluctua.insitu.pooling import Reading, estimate_files

NETWORK = tcmt.rectangular(1, 2, leads=[tcmt.Lead(0, 0.5), tcmt.Lead(1, 0.5)])
TASK = tcmt.transmission(NETWORK, horizon=0.5, dt=0.01)
THETA = tcmt.initial_parameters(jax.random.key(1), NETWORK)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    paths = [folder / f"{n}.nc" for n in range(4)]
    for n, path in enumerate(paths):
        head = insitu.describe(TASK, THETA if n < 3 else {**THETA, "kappa": 2 * THETA["kappa"]}, every=1, seed=n)
        for _ in insitu.record(path, TASK, head, 30):
            pass
    return paths


def leaves(estimate):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(estimate)]


def test_the_pool_is_the_mean_of_its_files(files):
    each = []
    for path in files[:3]:
        with insitu.open_recording(path) as recording, jax.enable_x64(False):  # as it was recorded
            each.append(estimate_model(recording, insitu.model_of(recording), baseline="time").estimate)
    pooled = estimate_files(files[:3]).result.estimate
    assert pooled.count == 90
    for name, value in pooled.gradient.items():
        mean = sum(e.count * np.asarray(e.gradient[name], np.float64) for e in each) / pooled.count
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


def test_the_same_bits_whoever_reads(files, monkeypatch):
    expected = estimate_files(files[:3]).result.estimate
    pool = Chaos(Reading(), 3, seed=4, risk=0.3)
    monkeypatch.setattr(pooling, "Cluster", lambda *arguments: pool)
    actual = estimate_files(files[:3], cluster="there").result.estimate
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert pool.deaths
    assert not pool.alive


def test_other_settings_are_refused(files):
    with pytest.raises(ValueError, match=r"`kappa` .*3\.nc"):
        estimate_files([files[0], files[3]])


def test_the_command_pools(files, tmp_path):
    expected = estimate_files(files[:2]).result.estimate
    command = ["estimate", *map(str, files[:2]), "--json", "--out", str(tmp_path / "g.npz")]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    numbers = json.loads(ended.stdout)
    assert numbers["trajectories"] == 60
    assert [one["trajectories"] for one in numbers["files"]] == [30, 30]
    np.testing.assert_array_equal(numbers["gradient"]["kappa"], np.asarray(expected.gradient["kappa"]).tolist())
    with np.load(tmp_path / "g.npz") as written:
        np.testing.assert_array_equal(written["gradient.omega"], expected.gradient["omega"])
    refused = CliRunner().invoke(app, ["estimate", *map(str, files[:2]), "--continuing"])
    assert refused.exit_code != 0
    assert "--continuing" in refused.output
