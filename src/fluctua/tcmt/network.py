"""Networks of coupled resonators: graph, leads, losses and parameters.

Letters: N resonators (sites), B bonds, L leads. Sites of a lattice are numbered row by row. Bonds
are pairs (i, j) with i < j in lexicographic order, (0, 1), (0, 13), (1, 2), …: the order of `kappa`
everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array

FAMILIES = ("omega", "kappa", "chi", "gamma_e", "gamma")
"""What θ may hold: detunings (N,), couplings (B,), Kerr (N,), lead couplings (L,), losses (N,)."""


@dataclass(frozen=True)
class Lead:
    """A scattering channel on one resonator or several: D_nm = weight_n √(2γ_e).

    site: an index, or {index: weight}.
    gamma_e: coupling γ_e of the channel.
    sigma_e: noise amplitude of the channel; None for the network's.

    >>> one = tcmt.Lead(0)
    >>> shared = tcmt.Lead({0: 0.8, 1: 0.6}, gamma_e=0.5)  # one channel on two resonators
    >>> network = tcmt.chain(4, leads=[one, shared])
    """

    site: int | Mapping[int, float]
    gamma_e: float = 1.0
    sigma_e: float | None = None

    @property
    def weights(self) -> dict[int, float]:
        """{site: weight}."""
        return dict(self.site) if isinstance(self.site, Mapping) else {self.site: 1.0}


@dataclass(frozen=True, eq=False)
class Network:
    """N resonators, B bonds and L leads, with the values of every parameter that is not trained.

    Made by `rectangular`, `honeycomb`, `ring`, `chain`, `layered`, `from_edges` or `paper`. Arrays
    are read-only; two networks are equal when all their numbers are, so that equal processes share
    one compilation.

    bonds: (B, 2), i < j, lexicographic.
    lead_weights: (N, L), zero where a lead does not touch.
    gamma_e: lead couplings γ_e (L,).
    sigma_e: noise amplitudes of the leads (L,).
    gamma: losses γ (N,).
    sigma_r: noise amplitudes of the losses (N,).
    omega: detunings ω from the drive (N,).
    kappa: couplings κ (B,).
    chi: Kerr coefficients χ (N,).
    positions: (N, 2), for figures.

    >>> ring = tcmt.ring(6)
    >>> ring.bonds.shape, ring.gamma.shape
    ((6, 2), (6,))
    >>> quiet = ring.replace(sigma_e=0.1, sigma_r=0.1)  # the same with less noise
    """

    bonds: np.ndarray
    lead_weights: np.ndarray
    gamma_e: np.ndarray
    sigma_e: np.ndarray
    gamma: np.ndarray
    sigma_r: np.ndarray
    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    positions: np.ndarray

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            array: Any = np.array(
                getattr(self, field.name), np.int32 if field.name == "bonds" else np.float64
            )
            if field.name in ("gamma_e", "gamma", "sigma_e", "sigma_r") and np.any(array < 0):
                raise ValueError(f"`{field.name}` must not be negative; got {array.min():g}.")
            array.setflags(write=False)
            object.__setattr__(self, field.name, array)
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        object.__setattr__(self, "_key", tuple((a.shape, a.tobytes()) for a in fields))
        object.__setattr__(self, "_hash", hash(self._key))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Network) and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"Network({self.sites} resonators, {len(self.bonds)} bonds, {self.leads} leads)"

    @property
    def sites(self) -> int:
        """N."""
        return len(self.omega)

    @property
    def leads(self) -> int:
        """L."""
        return len(self.gamma_e)

    @cached_property
    def local(self) -> bool:
        """Whether every lead sits on one resonator only: the diffusion is then diagonal."""
        return bool(np.all(np.count_nonzero(self.lead_weights, axis=0) == 1))

    @cached_property
    def lead_sites(self) -> np.ndarray:
        """The resonator of each lead (L,); raises if a lead has several."""
        if not self.local:
            raise ValueError(
                "a lead of this network sits on several resonators; see `lead_weights` (N, L)."
            )
        return np.argmax(self.lead_weights != 0, axis=0)

    @cached_property
    def degree(self) -> int:
        """Largest number of bonds of a resonator."""
        return int(np.bincount(self.bonds.ravel(), minlength=1).max())

    def shape(self, family: str) -> tuple[int]:
        """Return the shape of one family of parameters."""
        return getattr(self, family).shape

    def replace(self, **values: Array | float) -> Network:
        """Return a copy with other numbers; a single number is used for all entries.

        >>> network.replace(sigma_e=0.1, sigma_r=0.1, kappa=1.2)
        """
        for name, value in values.items():
            if name not in (*FAMILIES, "sigma_e", "sigma_r", "positions"):
                raise ValueError(
                    f"a network has no field {name!r} to replace; build another network to change "
                    "its graph."
                )
            values[name] = _fill(name, value, getattr(self, name).shape)
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]

    def scale_noise(self, factor: np.ndarray) -> Network:
        """Return a copy with the noise amplitude of every resonator times a factor. (N,)"""
        return self.replace(
            sigma_r=self.sigma_r * factor, sigma_e=self.sigma_e * factor[self.lead_sites]
        )


def parameters(network: Network, theta: Mapping[str, Array]) -> dict[str, Array]:
    """Return all five families of parameters, from θ if it has them, else from the network.

    Args:
        network: for the families that are not trained.
        theta: {family: values}.

    Returns: {family: values}.

    >>> sorted(tcmt.parameters(network, {"kappa": 0.8 * jnp.ones(7)}))
    ['chi', 'gamma', 'gamma_e', 'kappa', 'omega']
    """
    unknown = sorted(set(theta) - set(FAMILIES))
    if unknown:
        raise ValueError(
            f"θ of a resonator network may hold {', '.join(FAMILIES)}; got "
            f"{', '.join(map(repr, unknown))}."
        )
    for name, value in theta.items():
        if np.shape(value) != network.shape(name):
            raise ValueError(
                f"`theta[{name!r}]` must have shape {network.shape(name)} for this network "
                f"({network.sites} resonators, {len(network.bonds)} bonds, {network.leads} leads); "
                f"got {np.shape(value)}."
            )
    return {name: theta[name] if name in theta else getattr(network, name) for name in FAMILIES}


def initial_parameters(
    key: Array,
    network: Network,
    *,
    chi_std: float = 1e-4,
    train: Sequence[str] = ("omega", "kappa", "chi"),
) -> dict[str, jax.Array]:
    """Return θ to start from: the network's own values, χ_n ~ N(χ_n, chi_std²).

    As in the paper's Optimization Details.

    Args:
        key: for the draw of χ.
        network: its values.
        chi_std: standard deviation of χ.
        train: families of θ.

    Returns: {family: values}.

    >>> theta = tcmt.initial_parameters(key, network)
    >>> {name: values.shape for name, values in theta.items()}
    {'omega': (6,), 'kappa': (7,), 'chi': (6,)}
    >>> theta = tcmt.initial_parameters(key, network, train=["kappa"])  # the couplings alone
    """
    unknown = sorted(set(train) - set(FAMILIES))
    if unknown or not train:
        raise ValueError(f"`train` must name some of {', '.join(FAMILIES)}; got {tuple(train)}.")
    theta = {name: jnp.asarray(getattr(network, name), jnp.result_type(float)) for name in train}
    if "chi" in theta:
        theta["chi"] += chi_std * jax.random.normal(key, theta["chi"].shape)
    return theta


# ----------------------------------------------------------------------------------------- builders


def from_edges(
    edges: Iterable[Sequence[int]],
    *,
    sites: int | None = None,
    leads: Sequence[Lead | int] | None = None,
    gamma: Array | float = 0.02,
    sigma_w: float = 0.5,
    sigma_r: Array | float | None = None,
    omega: Array | float = 0.0,
    kappa: Array | float = 1.0,
    chi: Array | float = 0.0,
    positions: Array | None = None,
) -> Network:
    """Return a network on any undirected graph.

    Args:
        edges: pairs of sites, each bond once.
        sites: N, if the last ones have no bonds.
        leads: channels, each a `Lead` or a site; the first and the last site if not given.
        gamma: losses, one or (N,).
        sigma_w: noise amplitude of every channel that has none of its own (`Lead.sigma_e`,
            `sigma_r`).
        sigma_r: noise amplitude of the losses, one or (N,).
        omega: frequencies, one or (N,).
        kappa: couplings, one or in the order of `edges`.
        chi: Kerr coefficients, one or (N,).
        positions: (N, 2), for figures.

    Returns: the network.

    >>> triangle = tcmt.from_edges([(0, 1), (1, 2), (0, 2)], leads=[0, tcmt.Lead(2, gamma_e=0.5)])
    >>> triangle.gamma_e
    array([1. , 0.5])
    """
    pairs = np.array([tuple(edge) for edge in edges], dtype=int).reshape(-1, 2)
    count = int(pairs.max(initial=-1)) + 1 if sites is None else int(sites)
    if count < 1:
        raise ValueError("a network needs at least one resonator; give `edges` or `sites`.")
    bonds, order = _sort_bonds(pairs, count)
    channels = [Lead(0), Lead(count - 1)] if leads is None else [_as_lead(lead) for lead in leads]
    return Network(
        bonds=bonds,
        lead_weights=_lead_weights(channels, count),
        gamma_e=np.array([lead.gamma_e for lead in channels]),
        sigma_e=np.array([sigma_w if lead.sigma_e is None else lead.sigma_e for lead in channels]),
        gamma=_fill("gamma", gamma, (count,)),
        sigma_r=_fill("sigma_r", sigma_w if sigma_r is None else sigma_r, (count,)),
        omega=_fill("omega", omega, (count,)),
        kappa=_fill("kappa", kappa, (len(bonds),))[order],
        chi=_fill("chi", chi, (count,)),
        positions=_place_on_circle(count)
        if positions is None
        else _fill("positions", positions, (count, 2)),
    )


def rectangular(rows: int, columns: int, **options: object) -> Network:
    """Return a lattice with nearest-neighbour bonds; site = row·columns + column.

    Args:
        rows: number of rows.
        columns: sites in a row.
        **options: those of `from_edges`.

    Returns: the network.

    >>> network = tcmt.rectangular(3, 4, leads=[0, 11], gamma=0.02)
    >>> network.bonds.shape  # 9 in rows, 8 in columns
    (17, 2)
    """
    _check_minimum(rows=(rows, 1), columns=(columns, 1))
    site = np.arange(rows * columns).reshape(rows, columns)
    edges = _pair_sites(site[:, :-1], site[:, 1:]) + _pair_sites(site[:-1], site[1:])
    row, column = np.divmod(site.ravel(), columns)
    return _build(edges, site.size, np.stack([column, -row], axis=1), options)


def honeycomb(rows: int, columns: int, **options: object) -> Network:
    """Return zigzag chains, one per row; every second site has a bond to the next row.

    Args:
        rows: number of chains.
        columns: sites in a chain.
        **options: those of `from_edges`.

    Returns: the network.

    >>> tcmt.honeycomb(2, 4).bonds.shape
    (8, 2)
    """
    _check_minimum(rows=(rows, 1), columns=(columns, 1))
    site = np.arange(rows * columns).reshape(rows, columns)
    row, column = np.divmod(site, columns)
    even = (row + column) % 2 == 0
    down = even[:-1]
    edges = _pair_sites(site[:, :-1], site[:, 1:]) + _pair_sites(site[:-1][down], site[1:][down])
    height = -1.5 * row - np.where(even, 0.25, -0.25)
    return _build(
        edges,
        site.size,
        np.stack([column * np.sqrt(3) / 2, height], axis=-1).reshape(-1, 2),
        options,
    )


def ring(sites: int, **options: object) -> Network:
    """Return a closed chain, with leads on sites 0 and ⌊N/2⌋ if not given.

    Args:
        sites: number of resonators.
        **options: those of `from_edges`.

    Returns: the network.

    >>> network = tcmt.ring(8, kappa=0.5)
    >>> network.bonds.shape
    (8, 2)
    """
    _check_minimum(sites=(sites, 3))
    site = np.arange(sites)
    return _build(
        _pair_sites(site, np.roll(site, -1)),
        sites,
        _place_on_circle(sites),
        {"leads": (0, sites // 2), **options},
    )


def chain(sites: int, **options: object) -> Network:
    """Return an open chain, with leads on its ends if not given.

    Args:
        sites: number of resonators.
        **options: those of `from_edges`.

    Returns: the network.

    >>> network = tcmt.chain(5, leads=[0, 4])
    >>> network.bonds.tolist()
    [[0, 1], [1, 2], [2, 3], [3, 4]]
    """
    _check_minimum(sites=(sites, 1))
    site = np.arange(sites)
    return _build(
        _pair_sites(site[:-1], site[1:]), sites, np.stack([site, 0 * site], axis=1), options
    )


def layered(sizes: Sequence[int], **options: object) -> Network:
    """Return layers of resonators; every site has a bond to each site of the next layer.

    Sites are numbered layer by layer. The couplings from a layer of m sites to the next one of n
    are consecutive in `kappa`, an m × n matrix row by row.

    Args:
        sizes: sites in each layer, at least two layers.
        **options: those of `from_edges`. Leads are on all sites of the first and the last layer if
            not given.

    Returns: the network.

    >>> network = tcmt.layered([4, 6, 3])
    >>> network.bonds.shape, network.gamma_e.shape  # 4·6 + 6·3 bonds, 4 + 3 leads
    ((42, 2), (7,))
    """
    if len(sizes) < 2:
        raise ValueError(f"a layered network needs at least two layers; got {list(sizes)}.")
    for number, size in enumerate(sizes):
        _check_minimum(**{f"sizes[{number}]": (size, 1)})
    ends = np.cumsum([0, *sizes])
    layers = [np.arange(low, high) for low, high in pairwise(ends.tolist())]
    edges = []
    for here, following in pairwise(layers):
        edges += _pair_sites(*np.meshgrid(here, following, indexing="ij"))
    places = [
        np.stack([np.full(len(layer), 6.0 * depth), np.linspace(-3.0, 3.0, len(layer) + 2)[1:-1]])
        for depth, layer in enumerate(layers)
    ]
    leads = [int(site) for site in (*layers[0], *layers[-1])]
    positions = np.concatenate(places, axis=1).T
    return _build(edges, int(ends[-1]), positions, {"leads": leads, **options})


def paper() -> Network:
    """Return the paper's lattice: 11 × 13, 143 sites, 262 bonds, leads on opposite corners.

    γ_e = 1, γ = 0.02, σ_W = 0.5.

    Returns: the network.

    >>> network = tcmt.paper()
    >>> network.gamma.shape, network.bonds.shape
    ((143,), (262, 2))
    """
    return rectangular(11, 13)


def repeat_network(network: Network, count: int) -> Network:
    """Return `count` unconnected copies of a network as one network.

    Copy c has sites cN…(c+1)N−1 and leads cL…(c+1)L−1. For several experiments on one device.
    """
    n = network.sites
    width = np.ptp(network.positions[:, 0]) + 2
    repeated = {
        f.name: np.concatenate([getattr(network, f.name)] * count)
        for f in dataclasses.fields(network)
    }
    repeated["bonds"] = np.concatenate([network.bonds + c * n for c in range(count)])
    repeated["lead_weights"] = np.kron(np.eye(count), network.lead_weights)
    repeated["positions"] = np.concatenate(
        [network.positions + np.array([c * width, 0]) for c in range(count)]
    )
    return Network(**repeated)


# ------------------------------------------------------------------------------------- the boundary


def _build(
    edges: list[tuple[int, int]], sites: int, positions: np.ndarray, options: dict[str, object]
) -> Network:
    placed: dict[str, Any] = {"positions": positions, **options}
    return from_edges(edges, sites=sites, **placed)


def _pair_sites(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(first.ravel().tolist(), second.ravel().tolist(), strict=True))


def _place_on_circle(sites: int) -> np.ndarray:
    angle = 2 * np.pi * np.arange(sites) / sites
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * sites / (2 * np.pi)


def _check_minimum(**sizes: tuple[int, int]) -> None:
    for name, (value, minimum) in sizes.items():
        if int(value) != value or value < minimum:
            raise ValueError(f"`{name}` must be a whole number, at least {minimum}; got {value!r}.")


def _fill(name: str, value: Array | float, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim and array.shape != shape:
        raise ValueError(
            f"`{name}` must be one number or an array of shape {shape}; got shape {array.shape}."
        )
    if not np.all(np.isfinite(array)):
        raise ValueError(f"`{name}` is not finite: {array!r}.")
    return np.broadcast_to(array, shape)


def _sort_bonds(pairs: np.ndarray, sites: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bonds (B, 2) with i < j in lexicographic order, and their places in `pairs`."""
    outside = pairs[((pairs < 0) | (pairs >= sites)).any(axis=1)]
    if len(outside):
        raise ValueError(
            f"bond {tuple(outside[0].tolist())} has a site outside 0…{sites - 1}; `sites` is "
            f"{sites}."
        )
    bonds = np.sort(pairs, axis=1)
    loops = np.flatnonzero(bonds[:, 0] == bonds[:, 1])
    if loops.size:
        raise ValueError(
            f"bond {tuple(pairs[loops[0]].tolist())} joins a site to itself; use `omega` for "
            "detunings."
        )
    order = np.lexsort((bonds[:, 1], bonds[:, 0]))
    bonds = bonds[order]
    twice = np.flatnonzero((np.diff(bonds, axis=0) == 0).all(axis=1))
    if twice.size:
        raise ValueError(
            f"bond {tuple(bonds[twice[0]].tolist())} is given twice; give each undirected bond "
            "once."
        )
    return bonds, order


def _as_lead(lead: Lead | int) -> Lead:
    if isinstance(lead, Lead):
        return lead
    if isinstance(lead, int | np.integer) and not isinstance(lead, bool):
        return Lead(int(lead))
    raise TypeError(
        f"a lead is a site index or a Lead(site, gamma_e); got {type(lead).__name__}: {lead!r}."
    )


def _lead_weights(leads: Sequence[Lead], sites: int) -> np.ndarray:
    weights = np.zeros((sites, len(leads)))
    for m, lead in enumerate(leads):
        if not lead.weights:
            raise ValueError(f"lead {m} touches no resonator; give a site, or {{site: weight}}.")
        for site, weight in lead.weights.items():
            if not 0 <= site < sites:
                raise ValueError(f"lead {m} sits on site {site}, outside 0…{sites - 1}.")
            if weight == 0 or not np.isfinite(weight):
                raise ValueError(
                    f"lead {m} has weight {weight} on site {site}; give a nonzero number, or omit "
                    "the site."
                )
            weights[site, m] = weight
    return weights
