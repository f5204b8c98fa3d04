"""Graphs, parameters and the errors at the boundary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.tcmt import (
    Drive,
    Lead,
    chain,
    from_edges,
    honeycomb,
    initial_parameters,
    paper,
    parameters,
    process,
    rectangular,
    ring,
    transmission,
)
from fluctua.tcmt.network import repeat_network


def bonds(network):
    return [tuple(pair) for pair in network.bonds.tolist()]


def test_the_papers_lattice():
    network = paper()
    assert (network.sites, len(network.bonds), network.leads) == (143, 262, 2)
    assert network.lead_sites.tolist() == [0, 142]
    theta = initial_parameters(jax.random.key(0), network)
    assert sum(leaf.size for leaf in theta.values()) == 548
    assert np.all(theta["omega"] == 0)  # detuning from the drive
    assert np.all(theta["kappa"] == 1)
    assert 0.8e-4 < float(jnp.std(theta["chi"])) < 1.2e-4


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (rectangular(3, 4), 3 * 3 + 2 * 4),
        (honeycomb(3, 4), 3 * 3 + 2 * 2),
        (ring(5), 5),
        (chain(5), 4),
        (chain(1), 0),
    ],
)
def test_bonds_are_sorted_pairs_of_neighbours(network, count):
    pairs = bonds(network)
    assert len(pairs) == count
    assert pairs == sorted(set(pairs))
    assert all(i < j for i, j in pairs)


def test_neighbours_are_one_apart_on_the_drawing():
    for network in (rectangular(3, 4), honeycomb(4, 5), chain(4)):
        ends = network.positions[network.bonds]
        np.testing.assert_allclose(np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1), 1, atol=1e-12)


def test_honeycomb_has_degree_three_at_most():
    degree = np.bincount(honeycomb(6, 7).bonds.ravel())
    assert degree.max() == 3


def test_couplings_follow_their_edges_when_sorted():
    network = from_edges([(2, 1), (0, 2), (1, 0)], kappa=[0.21, 0.02, 0.10])
    assert bonds(network) == [(0, 1), (0, 2), (1, 2)]
    np.testing.assert_array_equal(network.kappa, [0.10, 0.02, 0.21])


def test_networks_with_the_same_numbers_are_equal():
    assert rectangular(2, 3) == rectangular(2, 3)
    assert hash(rectangular(2, 3)) == hash(rectangular(2, 3))
    assert rectangular(2, 3) != rectangular(2, 3, gamma=0.1)
    assert process(rectangular(2, 3), Drive(0)) == process(rectangular(2, 3), Drive(0))
    with pytest.raises(ValueError, match="read-only"):
        rectangular(2, 3).kappa[0] = 2


def test_copies_repeat_every_family():
    one = rectangular(2, 2, kappa=[1.0, 2.0, 3.0, 4.0])
    two = repeat_network(one, 2)
    assert (two.sites, two.leads) == (8, 4)
    assert bonds(two) == bonds(one) + [(i + 4, j + 4) for i, j in bonds(one)]
    np.testing.assert_array_equal(two.kappa, np.tile(one.kappa, 2))
    assert two.lead_sites.tolist() == [0, 3, 4, 7]


def test_parameters_that_are_not_trained_come_from_the_network():
    network = chain(3, gamma=0.1)
    p = parameters(network, {"omega": jnp.ones(3)})
    np.testing.assert_array_equal(p["omega"], 1)
    np.testing.assert_array_equal(p["gamma"], 0.1)
    np.testing.assert_array_equal(p["kappa"], 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_edges([(0, 0)]), "joins a site to itself"),
        (lambda: from_edges([(0, 1), (1, 0)]), "given twice"),
        (lambda: from_edges([(0, 5)], sites=3), "outside 0…2"),
        (lambda: from_edges([]), "at least one resonator"),
        (lambda: ring(2), "at least 3"),
        (lambda: chain(3, leads=[7]), "lead 0 sits on site 7"),
        (lambda: chain(3, leads=[Lead({})]), "touches no resonator"),
        (lambda: chain(3, leads=["a"]), "site index or a Lead"),
        (lambda: chain(3, gamma=-1.0), "`gamma` must not be negative"),
        (lambda: chain(3, kappa=[1.0, 2.0, 3.0]), r"array of shape \(2,\)"),
        (lambda: chain(3, omega=np.nan), "not finite"),
        (lambda: chain(3).replace(bonds=1), "no field 'bonds'"),
        (lambda: chain(3, leads=[{0: 1.0}]), "site index or a Lead"),
        (lambda: parameters(chain(3), {"kapa": jnp.ones(2)}), "got 'kapa'"),
        (lambda: parameters(chain(3), {"kappa": jnp.ones(3)}), r"must have shape \(2,\)"),
        (
            lambda: initial_parameters(jax.random.key(0), chain(3), train=("psi",)),
            "`train` must name",
        ),
        (lambda: process(chain(3), Drive(2)), "leads 0…1"),
        (lambda: process(chain(3), 0), "Drive"),
        (lambda: process(chain(3), Drive(0), frame="spinning"), "'rotating', 'lab'"),
        (lambda: transmission(chain(3), to=5), "leads 0…1"),
        (lambda: transmission(chain(3), horizon=1.0, dt=0.3), "whole number of steps"),
        (
            lambda: transmission(chain(3), drive=Drive(0, 0.0)),
            "`amplitude` must be a positive number",
        ),
        (lambda: transmission(chain(3), sigma_kappa=-0.1), "must not be negative"),
        (lambda: transmission(chain(3)).estimator("gpu"), '"jax", "cpu" or "cuda"'),
        (lambda: transmission(chain(3)).estimator(baseline="best"), r"'best'.*none, time,.*binned"),
        (lambda: transmission(chain(3)).estimator(threads=2), "no option 'threads'"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
