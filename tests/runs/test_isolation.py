"""The isolation preset: none without Kerr effect, the other sign for the lattice turned round,
and a run reads back.
"""

import jax
import numpy as np
import pytest

from fluctua.runs.build import make_network, make_task
from fluctua.runs.config import PRESETS, apply_changes
from fluctua.runs.evaluate import evaluate
from fluctua.runs.lattice import complete
from fluctua.runs.reading import read_run
from fluctua.tcmt import exact
from isolation import both_ways

CONFIG = apply_changes(PRESETS["isolation"], {"task.horizon": 5.0, "backend": "cpu"})
ROUNDING = 1e-5  # of sums of 10,000 rewards in single precision
KERR = 0.02


def theta(chi_size):
    network = make_network(CONFIG)
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, family: jax.random.normal(key, network.shape(family))
    omega, kappa = 0.5 * draw(keys[0], "omega"), 1 + 0.3 * draw(keys[1], "kappa")
    return {"omega": omega, "kappa": kappa, "chi": chi_size * draw(keys[2], "chi")}


def turn_lattice(values):
    """The parameters of the lattice turned by 180°: sites, and so sorted bonds, in reverse
    order.
    """
    network = make_network(CONFIG)
    last = network.sites - 1
    place = {tuple(bond): k for k, bond in enumerate(network.bonds.tolist())}
    bonds = [place[last - j, last - i] for i, j in network.bonds.tolist()]
    return {
        "omega": values["omega"][::-1],
        "kappa": values["kappa"][np.array(bonds)],
        "chi": values["chi"][::-1],
    }


def compute_isolation(values):
    return evaluate(CONFIG, values, trajectories=2, sigma_w=0.0).J


def test_there_is_no_isolation_without_kerr_effect():
    linear = theta(0.0)
    forward, _, backward, _ = both_ways(CONFIG, linear, 2, sigma_w=0.0)
    assert forward > 0.02  # power does arrive
    assert abs(forward - backward) < ROUNDING
    assert abs(compute_isolation(linear)) < ROUNDING
    assert abs(exact.value(make_task(CONFIG, sigma_w=0.0), linear)) < 1e-12
    assert abs(compute_isolation(theta(KERR))) > 100 * ROUNDING


def test_isolation_is_forward_minus_backward_and_changes_its_sign_with_the_lattice():
    values = theta(KERR)
    forward, _, backward, _ = both_ways(CONFIG, values, 2, sigma_w=0.0)
    assert compute_isolation(values) == pytest.approx(forward - backward, abs=ROUNDING)
    assert compute_isolation(turn_lattice(values)) == pytest.approx(
        -compute_isolation(values), abs=ROUNDING
    )


def test_a_run_reads_back_as_the_task_it_was_trained_for(tmp_path):
    config = apply_changes(
        CONFIG, {"iterations": 2, "task.horizon": 0.5, "ensemble.trajectories": 2}
    )
    complete(config, tmp_path / "run")
    task = read_run(tmp_path / "run").task
    assert task.copies == 2
    np.testing.assert_allclose(task.weights, make_task(config).weights)
    complete(apply_changes(config, {"task.reward": "transmission"}), tmp_path / "other")
    assert read_run(tmp_path / "other").task.copies == 1
