"""The magnet of NESTbench25 against the engine's loop, spin by spin, as its source has it."""

import jax
import numpy as np
import pytest

import nestbench_ising as ising

SIDE = 4
"""1,600 spins are tried; the engine's magnet would take 102,400."""


def follow_engine(protocol, x):
    """Entropy produced and ln p of the steps that lead from x[0] to x[-1], (T+1, sites)."""
    sites = SIDE**2
    sequence = [
        y * SIDE + column
        for phase in (0, 1)
        for y in range(SIDE)
        for column in range(SIDE)
        if (column + y) % 2 == phase
    ]
    spins = np.array(x[0])
    produced = 0.0
    log = 0.0
    for tau in range(ising.SWEEPS * sites):
        temperature, field = protocol[int(tau / (ising.SWEEPS * sites / ising.ROWS))]
        site = sequence[tau % sites]
        y, column = divmod(site, SIDE)
        around = [
            spins[y * SIDE + (column - 1) % SIDE],
            spins[y * SIDE + (column + 1) % SIDE],
            spins[(y - 1) % SIDE * SIDE + column],
            spins[(y + 1) % SIDE * SIDE + column],
        ]
        change = 2 * spins[site] * (sum(around) + field)
        flips = x[tau // sites + 1][site] != spins[site]
        log -= np.logaddexp(0, change / temperature if flips else -change / temperature)
        if flips:
            produced -= change / temperature
            spins[site] = -spins[site]
    lattice = spins.reshape(SIDE, SIDE)
    bonds = np.sum(lattice * (np.roll(lattice, 1, 0) + np.roll(lattice, 1, 1)))
    return produced + (-bonds - spins.sum() + 3 * sites) / 0.7, log


@pytest.mark.long
def test_sweeps_follow_the_engine(key):
    magnet = ising.Magnet(SIDE)
    theta = ising.start(7)
    run = ising.make_estimator(SIDE).substrate
    x = np.asarray(run(key, theta, 2).x)
    assert (x[:, -1] != x[:, 0]).any()
    protocol = ising.to_protocol(theta)
    entropies = jax.jit(jax.vmap(lambda *step: magnet.produce_entropy(theta, *step, 1.0)))
    log_probs = jax.jit(jax.vmap(lambda *step: magnet.log_prob(theta, *step)))
    for path in x:
        produced, log = follow_engine(protocol, path)
        steps = (path[:-1], path[1:], np.arange(ising.SWEEPS + 0.0))
        np.testing.assert_allclose(np.sum(entropies(*steps)), produced, rtol=1e-9)
        np.testing.assert_allclose(np.sum(log_probs(*steps)), log, rtol=1e-9)


@pytest.mark.parametrize("side", [4, 8, 32])
def test_rows_repeat_with_the_sweeps(side):
    rows = ising.protocol_rows(side)
    first = ising.ROWS_PER_SWEEP * np.arange(ising.SWEEPS)[:, None]
    np.testing.assert_array_equal(rows, rows[0] + first)
    assert rows.max() == ising.ROWS - 1


def test_protocols_have_the_columns_of_the_engine():
    protocol = ising.to_protocol(ising.start(9))
    assert protocol.shape == (1000, 2)
    np.testing.assert_allclose(protocol[[0, -1]], [[0.7, -1.3], [0.7, 1.3]])
    np.testing.assert_allclose(protocol[:, 0], protocol[::-1, 0])  # there and back


@pytest.mark.long
def test_a_short_training_gives_a_protocol():
    result = ising.train(0, quick=True)
    assert result["protocol"].shape == (1000, 2)
    assert np.isfinite(result["protocol"]).all()
    assert len(result["history"]) == 5
    assert result["trajectories"] == 5 * (8 + 128)  # a pilot of 128 for each baseline
