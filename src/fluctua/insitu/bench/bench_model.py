"""The model of a virtual bench, from its description: what `--model` is for one at an address."""

from __future__ import annotations

import numpy as np

from fluctua import tcmt
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.model import Model
from fluctua.insitu.networks import network_model
from fluctua.insitu.port_networks import port_network_model

KERR_BOUND = 0.05
"""Largest χ: there the Kerr effect detunes by a few couplings where the light is."""


def make_model(
    bench: VirtualBench,
    *,
    kerr: bool = False,
    omega_max: float = 2.0,
    kappa_max: float = 1.5,
) -> Model:
    """The model of a virtual bench by its data sheet.

    Args:
        bench: the open driver, whose samples, noise and modulation the model has too.
        kerr: whether χ has knobs.
        omega_max: bound of |ω|.
        kappa_max: bound of κ.

    Returns: the model of a rectangular lattice, which is read whole or at its ports.
    """
    for name, value in (("omega_max", omega_max), ("kappa_max", kappa_max)):
        if not 0 < value < np.inf:
            raise ValueError(f"`{name}` must be positive and finite; got {value!r}.")
    sheet = bench.description
    bounds = {"omega": (-omega_max, omega_max), "kappa": (0.0, kappa_max)}
    if kerr:
        bounds["chi"] = (-KERR_BOUND, KERR_BOUND)
    sigma_w = float(np.hypot(sheet.sigma_w, bench.generators["NOIS"]))
    network = tcmt.rectangular(sheet.rows, sheet.columns, sigma_w=sigma_w)
    if not sheet.reads_all:
        _refuse_hidden(bench, network, kerr)
        return port_network_model(
            network,
            interval=sheet.interval,
            points=bench.points,
            bounds=bounds,
            readout=sheet.readout,
        )
    return network_model(
        network,
        interval=sheet.interval,
        points=bench.points,
        bounds=bounds,
        sigma_kappa=bench.generators["MOD"],
    )


def _refuse_hidden(bench: VirtualBench, network: tcmt.Network, kerr: bool) -> None:
    """Refuse what records at the ports do not allow."""
    sites = bench.description.sites
    if sites != tuple(network.lead_sites):
        raise ValueError(
            f"the bench reads the resonators {', '.join(map(str, sites))}; there is a model for "
            f"one that reads all, or input and output, {', '.join(map(str, network.lead_sites))}."
        )
    if kerr or bench.generators["MOD"]:
        raise ValueError(
            "a bench that is read at its ports is trained without Kerr effect and modulation: "
            "leave out kerr and sigma_kappa, or start it with --set read=all."
        )
