"""Layout of a network on the device: sites of each block, mirrors of other sites, shared memory.

A trajectory of up to 1,024 sites is a block with one site per thread. More sites are spread over
the blocks of a cluster, each on a multiprocessor with its registers (compute capability 9.0 and
later). Without clusters, and for the twin, the binned baseline and Heun's step, a thread has
several sites, and sums go to memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel.layout import KernelPlan, cache_per_graph

CLUSTERS = (1, 2, 3, 4, 5, 8, 16)
"""Sizes of clusters: blocks of a trajectory.

Of the 132 multiprocessors of an H200 these leave 0, 0, 15, 12, 22, 12
and 20 idle, and other numbers up to 62: a cluster lies within one of eight groups of
multiprocessors."""


BARRIERS = 8
"""Barriers of a cluster's block, as in `native/cuda/step.cuh`."""


class SiteLayout(NamedTuple):
    """Division of the sites among the blocks of a trajectory, in order, `local` per block.

    A block keeps mirrors of the sites of other blocks that its own are coupled to, after its own
    sites. A site has its mirror at the same place in every block that has one.

    threads: of a block.
    per: sites per thread.
    cluster: blocks of a trajectory.
    degree: largest number of bonds of a site.
    bond: bond of each slot (degree, rows) in the kernels' order; −1 for none.
    half: places of each bond's halves (B, 2): slot·N + site.
    mirrors: number of mirrors of a block.
    mirror: (2, rows) place of the mirror, 1 bit for a port, 16 bits for the blocks that have it;
        then without ports, and only blocks with bonds to the site.
    mail: states of mirrors that a block receives per step (2, cluster), of either.
    neighbour: places in the buffer of the site's block (degree, rows).
    bonds: bonds of each block (cluster, ·) in the kernels' order; padded with the first.
    wave: index of each slot's bond among those of its block (degree, rows).
    """

    threads: int
    per: int
    cluster: int
    degree: int
    bond: np.ndarray
    half: np.ndarray
    mirrors: int
    mirror: np.ndarray
    mail: np.ndarray
    neighbour: np.ndarray
    bonds: np.ndarray
    wave: np.ndarray

    @property
    def local(self) -> int:
        """Sites and idle rows of a block."""
        return self.threads * self.per

    @property
    def rows(self) -> int:
        """Sites and idle rows of all blocks."""
        return self.cluster * self.local


@cache_per_graph
def lay_out(plan: KernelPlan, cluster: int = 1, per: int = 0) -> SiteLayout:
    """Return the layout of a network.

    Slots of a site are its lower neighbours, then the upper ones, padded to the largest degree.

    Args:
        plan: the network.
        cluster: largest number of blocks of a trajectory.
        per: sites per thread; 0 for as few as possible.
    """
    sites = plan.sites
    lower = plan.lower_start
    upper = plan.upper_start
    per = per or -(-sites // (1024 * cluster))
    threads = 32 * -(-sites // (32 * per * cluster))
    local = threads * per
    cluster = -(-sites // local)
    below = np.diff(lower)
    above = np.diff(upper)
    degree = max(1, int((below + above).max()))
    upper_of = np.repeat(np.arange(sites), below)
    lower_of = np.repeat(np.arange(sites), above)
    slot_below = np.arange(plan.bonds) - lower[upper_of]
    slot_above = below[lower_of] + np.arange(plan.bonds) - upper[lower_of]
    near = np.tile(np.arange(cluster * local, dtype=np.int32), (degree, 1))
    bond = np.full(near.shape, -1, np.int32)
    near[slot_below, upper_of] = plan.lower_site
    bond[slot_below, upper_of] = plan.lower_bond
    near[slot_above, lower_of] = plan.upper_site
    bond[slot_above, lower_of] = np.arange(plan.bonds)
    half = np.zeros((plan.bonds, 2), np.int64)
    half[plan.lower_bond, 1] = slot_below * sites + upper_of
    half[:, 0] = slot_above * sites + lower_of
    return SiteLayout(
        threads,
        per,
        cluster,
        degree,
        bond,
        half,
        **_between_blocks(plan, cluster, local, near, bond),
    )


def _between_blocks(
    plan: KernelPlan, cluster: int, local: int, near: np.ndarray, bond: np.ndarray
) -> dict[str, Any]:
    """Return the fields of `SiteLayout` from `mirrors` on. near: neighbour of each slot."""
    if cluster == 1:
        every = np.arange(plan.bonds, dtype=np.int32)[None]
        none = {
            "mirrors": 0,
            "mirror": np.zeros((2, 0), np.uint32),
            "mail": np.zeros((2, 0), np.int32),
        }
        return {**none, "neighbour": near, "bonds": every, "wave": bond}
    block = np.arange(cluster * local) // local
    held = np.zeros((len(block), cluster), bool)
    apart = (bond >= 0) & (block[near] != block)
    held[near[apart], np.broadcast_to(block, near.shape)[apart]] = True
    bonded = held.copy()
    # a block with a port has a mirror of some site of every block, to know how far that block is
    for owner in np.unique(block[plan.port_site]):
        for other in range(cluster):
            held[other * local, owner] |= other != owner and not held[block == other, owner].any()
    place = np.zeros(len(block), np.uint32)
    taken = np.full(cluster, local)
    for site in np.flatnonzero(held.any(axis=1)):
        place[site] = taken[held[site]].max()
        taken[held[site]] = place[site] + 1
    own = np.arange(len(block)) % local
    bits = np.stack([held, bonded]) @ (1 << np.arange(cluster)) << 16
    bits[0, plan.port_site] |= 1 << 15
    lists = [np.unique(mine[mine >= 0]) for mine in np.split(bond, cluster, axis=1)]
    bonds = np.zeros((cluster, max(len(mine) for mine in lists)), np.int32)
    wave = np.full_like(bond, -1)
    for rank, mine in enumerate(lists):
        bonds[rank, : len(mine)] = mine
        rows = slice(rank * local, (rank + 1) * local)
        wave[:, rows] = np.where(bond[:, rows] < 0, -1, np.searchsorted(mine, bond[:, rows]))
    return {
        "mirrors": int(taken.max()) - local,
        "mirror": place | bits.astype(np.uint32),
        "mail": np.stack([held, bonded]).sum(axis=1).astype(np.int32),
        "neighbour": np.where(apart, place[near], own[near]).astype(np.int32),
        "bonds": bonds,
        "wave": wave,
    }


class SharedMemory(NamedTuple):
    """Shared memory of a block.

    shared: bytes, for states, rewards and modulation.
    waves_shared: whether the waves of the modulation are there too.
    """

    shared: int
    waves_shared: bool


def measure_shared_memory(
    plan: KernelPlan, layout: SiteLayout, item: int, attributes: dict[str, int]
) -> SharedMemory:
    """Return the shared memory of a block; waves are in it if eight blocks fit a multiprocessor."""
    bonds = layout.bonds.shape[1]
    waves = item * 2 * plan.harmonics * bonds
    state = measure_state(plan, layout, item) + (3 * item * bonds if plan.harmonics else 0)
    fits = state + waves <= attributes["MaxSharedMemoryPerMultiprocessor"] // 8 - 1024
    return SharedMemory(state + (waves if fits else 0), fits)


def measure_state(plan: KernelPlan, layout: SiteLayout, item: int) -> int:
    """Return the bytes of a trajectory's states and rewards in the shared memory of a block."""
    buffers = 4 if plan.heun else 2  # Heun's: ψ̃ and ζ too
    state = item * (2 * buffers * (layout.local + layout.mirrors) + 32)
    if layout.cluster > 1:
        state += 8 * BARRIERS + 4 * plan.ports * 2 * item  # and the ports of four steps
    return state


def spread_replay(sites: int, item: int, max_blocks: int) -> tuple[int, int]:
    """Return the same as `spread` for a replay, of whose trajectories a block runs two or four."""
    block = 2048 // item
    if sites <= block:
        return 1, 1
    cluster = next((c for c in CLUSTERS if c <= max_blocks and sites <= c * block), max_blocks)
    return cluster, max(2, -(-sites // (cluster * 512)))


def spread_with_twin(sites: int, item: int, max_blocks: int) -> tuple[int, int]:
    """Return the same as `spread` for the twin, which keeps more numbers per site in registers."""
    block = 2048 // item
    if sites <= block or max_blocks == 1:
        return 1, -(-sites // 1024)
    cluster = next((c for c in CLUSTERS if c <= max_blocks and sites <= c * block), max_blocks)
    return cluster, -(-sites // (cluster * 1024))


def spread(sites: int, item: int, max_blocks: int) -> tuple[int, int]:
    """Return the blocks of a trajectory, at most `max_blocks`, and the sites per thread.

    As many sites per multiprocessor as its registers hold: the work of a step hides the wait for
    other blocks. Two sites per thread share common numbers. item: bytes of a number.
    """
    if sites <= 1024 or max_blocks == 1:
        return 1, -(-sites // 1024)
    single = item == 4
    block, threads = (1280, 640) if single else (512, 1024)
    cluster = next((c for c in CLUSTERS if c <= max_blocks and sites <= c * block), max_blocks)
    return cluster, max(2 if single else 1, -(-sites // (cluster * threads)))


def cluster_limits(cp: Any) -> list[int]:
    """Return the sizes of clusters that the GPU may have, largest first.

    8 are possible on every GPU with clusters; 16 must be requested.
    """
    major = int(cp.cuda.Device().compute_capability[:-1])
    return [*([16] if major in (9, 10) else []), *([8] if major >= 9 else []), 1]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def resident_clusters(kernel: Any, layout: SiteLayout, shared: int, together: int = 1) -> int:
    """Return the number of clusters of a kernel that the GPU runs at once; 0 if it cannot run one.

    Allows the kernel more than 8 blocks per cluster. together: trajectories per block.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # CuPy may find the driver elsewhere; run without clusters
        return 0
    handle = ctypes.c_void_p(kernel.kernel.ptr)
    count = ctypes.c_int(0)
    non_portable = 14  # NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    if layout.cluster > 8 and driver.cuFuncSetAttribute(handle, non_portable, 1):
        return 0
    size = _Attribute(4, 0, (layout.cluster, 1, 1))  # CLUSTER_DIMENSION
    launch = _Launch(
        (layout.cluster, 1, 1),
        (layout.threads * together, 1, 1),
        shared,
        None,
        ctypes.pointer(size),
        1,
    )
    failed = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), handle, ctypes.byref(launch))
    return 0 if failed else count.value


def check_shared_memory(shared: int, what: str, attributes: dict[str, int]) -> None:
    """Raise if a block needs more shared memory than the GPU gives it."""
    limit = attributes["MaxSharedMemoryPerBlockOptin"]
    if shared > limit:
        raise ValueError(
            f"{what} need {shared} bytes of shared memory, more than the {limit} of this GPU. Use "
            "backend='cpu'."
        )
