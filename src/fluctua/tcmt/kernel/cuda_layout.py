"""Networks on the device: which sites a block has, what it needs of other blocks, and the memory
that takes.

A trajectory is a block with a site a thread, if its sites are at most 1,024. More are spread over
the blocks of a cluster, each on a multiprocessor with its registers (compute capability 9.0 and
later). Where there are no clusters, and for the twin, the binned baseline and Heun's step, a thread
has as many sites as it takes, and sums go to memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel.layout import KernelPlan, once_for_a_graph

CLUSTERS = (1, 2, 3, 4, 5, 8, 16)
"""Blocks of a trajectory. Of the 132 multiprocessors of an H200 these leave 0, 0, 15, 12, 22, 12
and 20 idle, and other numbers up to 62: a cluster lies within one of eight groups of
multiprocessors."""


class SiteLayout(NamedTuple):
    """How the sites are spread over the blocks of a trajectory, in their order: `local` to each but
    the last.

    A block keeps copies of those sites of others that its own are coupled to: mirrors, which follow
    its own sites. A site has its mirror at the same place in every block that has one.
    """

    threads: int
    per: int
    cluster: int  # blocks of a trajectory
    degree: int
    bond: np.ndarray  # (degree, rows) in the kernels' order, −1 where there is none
    half: np.ndarray  # (B, 2) where each bond's halves are: slot·N + site
    mirrors: int  # of a block
    mirror: np.ndarray  # (rows,) place, 1 bit if a port, 16 bits of the blocks that have it
    mail: np.ndarray  # (cluster,) states that a block is sent in a step, of mirrors and ports
    neighbour: np.ndarray  # (degree, rows) places in the buffer of the site's block
    bonds: np.ndarray  # (cluster, those of a block) in the kernels' order; filled up with the first
    wave: np.ndarray  # (degree, rows) of each bond among those of the block

    @property
    def local(self) -> int:
        """Sites and idle rows of a block."""
        return self.threads * self.per

    @property
    def rows(self) -> int:
        """Sites and idle rows of all blocks."""
        return self.cluster * self.local


@once_for_a_graph
def lay_out(plan: KernelPlan, cluster: int = 1, per: int = 0) -> SiteLayout:
    """Slots of every site: its neighbours below, then those above, padded to the largest degree.

    Args:
        plan: the network.
        cluster: blocks of a trajectory, at most.
        per: sites a thread; 0 for as few as can be.
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
    """The fields of `SiteLayout` from `mirrors` on. near: sites that the slots are coupled to."""
    if cluster == 1:
        every = np.arange(plan.bonds, dtype=np.int32)[None]
        none = {"mirrors": 0, "mirror": np.zeros(0, np.uint32), "mail": np.zeros(0, np.int32)}
        return {**none, "neighbour": near, "bonds": every, "wave": bond}
    block = np.arange(cluster * local) // local
    held = np.zeros((len(block), cluster), bool)
    apart = (bond >= 0) & (block[near] != block)
    held[near[apart], np.broadcast_to(block, near.shape)[apart]] = True
    for owner in np.unique(
        block[plan.port_site]
    ):  # of every block a site, by which it is known how far the block is
        for other in range(cluster):
            held[other * local, owner] |= other != owner and not held[block == other, owner].any()
    place = np.zeros(len(block), np.uint32)
    taken = np.full(cluster, local)
    for site in np.flatnonzero(held.any(axis=1)):
        place[site] = taken[held[site]].max()
        taken[held[site]] = place[site] + 1
    own = np.arange(len(block)) % local
    bits = held @ (1 << np.arange(cluster)) << 16
    bits[plan.port_site] |= 1 << 15
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
        "mail": (held.sum(axis=0) + plan.ports).astype(np.int32),
        "neighbour": np.where(apart, place[near], own[near]).astype(np.int32),
        "bonds": bonds,
        "wave": wave,
    }


class SharedMemory(NamedTuple):
    """Shared memory of a block: bytes of states, rewards and modulation, and whether the
    latter's waves are there.
    """

    shared: int
    waves_shared: bool


def measure_shared_memory(
    plan: KernelPlan, layout: SiteLayout, item: int, attributes: dict[str, int]
) -> SharedMemory:
    """Waves go to shared memory if eight blocks still fit a multiprocessor: then occupancy does
    not suffer.
    """
    bonds = layout.bonds.shape[1]
    waves = item * 2 * plan.harmonics * bonds
    buffers = 4 if plan.heun else 2  # Heun's: ψ̃ and ζ too
    state = item * (
        2 * buffers * (layout.local + layout.mirrors) + 32 + (3 * bonds if plan.harmonics else 0)
    )
    if layout.cluster > 1:
        state += 16 + 4 * plan.ports * 2 * item  # barriers, and the ports of four steps
    fits = state + waves <= attributes["MaxSharedMemoryPerMultiprocessor"] // 8 - 1024
    return SharedMemory(state + (waves if fits else 0), fits)


def spread(sites: int, item: int, most: int) -> tuple[int, int]:
    """Blocks of a trajectory, at most `most`, and sites a thread. item: bytes of a number.

    As many sites to a multiprocessor as its registers hold: a step's work hides the wait for other
    blocks. Two a thread share what is the same for all.
    """
    if sites <= 1024 or most == 1:
        return 1, -(-sites // 1024)
    single = item == 4
    block, threads = (1280, 640) if single else (512, 1024)
    cluster = next((c for c in CLUSTERS if c <= most and sites <= c * block), most)
    return cluster, max(2 if single else 1, -(-sites // (cluster * threads)))


def cluster_limits(cp: Any) -> list[int]:
    """Blocks of a cluster that the GPU may give, most first. 8 are in every GPU that has
    clusters; 16 need asking.
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


def resident_clusters(kernel: Any, layout: SiteLayout, shared: int) -> int:
    """Clusters that the GPU runs at once, of a kernel of CuPy's; 0 if it cannot run one.

    Allows more than 8 blocks.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not where CuPy has it: no clusters then
        return 0
    handle = ctypes.c_void_p(kernel.kernel.ptr)
    count = ctypes.c_int(0)
    if layout.cluster > 8 and driver.cuFuncSetAttribute(
        handle, 14, 1
    ):  # NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        return 0
    size = _Attribute(4, 0, (layout.cluster, 1, 1))  # CLUSTER_DIMENSION
    launch = _Launch(
        (layout.cluster, 1, 1), (layout.threads, 1, 1), shared, None, ctypes.pointer(size), 1
    )
    failed = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), handle, ctypes.byref(launch))
    return 0 if failed else count.value


def refuse_beyond(shared: int, what: str, attributes: dict[str, int]) -> None:
    """Raise if a block needs more shared memory than the GPU gives it."""
    most = attributes["MaxSharedMemoryPerBlockOptin"]
    if shared > most:
        raise ValueError(
            f"{what} need {shared} bytes of shared memory, more than the {most} of this GPU. Use "
            "backend='cpu'."
        )
