"""Twin correction on NVIDIA GPUs: layout of the twin beside the network, and launches.

The kernel is `native/cuda/twin.cu`, a trajectory being a block or a cluster of blocks. If all
trajectories share the twin's path, one block or cluster tabulates it at every step before the
others start. If each has its own, path and adjoint are kept at the ends of segments of about √T
steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fluctua.tcmt.kernel import cuda, gpus
from fluctua.tcmt.kernel.cpu import TwinSums
from fluctua.tcmt.kernel.cuda import LaunchOutput, address
from fluctua.tcmt.kernel.cuda_layout import SiteLayout, spread_with_twin
from fluctua.tcmt.kernel.cuda_memory import Bundle
from fluctua.tcmt.kernel.layout import (
    fit_modulation,
    make_plan,
    modulation_tolerance,
    read_blocks,
    to_pairs,
)
from fluctua.tcmt.kernel.options import KernelJob, KernelSpec, KernelTwinModel

SOURCES = ("twin_path.cu", "twin.cu")
MAX_PATH_BYTES = 2**32
"""Largest memory of the device for paths and adjoints."""


def match_tables(e: KernelJob, twin: KernelSpec) -> KernelSpec:
    """Return the twin with drive and incoming wave tabulated in time as those of the network.

    Raises for a twin that the GPU cannot run.
    """
    cuda.check_distinct_sites(e)
    tables: dict[str, Any] = {}
    for name in ("drive", "incoming"):
        device_table = getattr(e.spec, name)
        twin_table = getattr(twin, name)
        if len(device_table) < len(twin_table):
            raise ValueError(
                f"the twin's `{name}` varies in time and the network's does not. Use backend='cpu'."
            )
        if twin_table.shape != device_table.shape:
            tables[name] = np.broadcast_to(twin_table, device_table.shape)
    return twin.replace(**tables) if tables else twin


def run(e: KernelJob, twin: KernelTwinModel) -> TwinSums:
    """Run a job with the twin correction on all visible GPUs."""
    cp = cuda.require_cupy()
    out = TwinSums.empty(e)
    p = e.width

    def launch(device, begin, end):
        return device.launch(e.first + begin, end - begin)

    for begin, end, device, part in gpus.iterate_pieces(
        cp, e.count, lambda: TwinDevice(cp, e, twin), launch
    ):
        sums = part.sums.get()
        if not device.is_tabulated(sums["ends"]):
            out.overflow[1] = e.first
            return out
        out.returns[begin:end] = sums["returns"]
        out.gained[begin:end] = sums["gained"]
        out.prefix_sum += sums["prefix_sum"]
        out.reward_sum += sums["reward_sum"]
        flags = sums["overflow"]
        for which, bit in enumerate((1, 2)):
            bad = np.flatnonzero((flags & bit).any(axis=1))
            if bad.size and out.overflow[which] < 0:
                out.overflow[which] = e.first + begin + int(bad[0])
        out.moments += sums["moments"].reshape(3, 3, p).swapaxes(0, 1)
        if out.direct is not None and out.correction is not None:
            samples = part.samples.get().reshape(end - begin, 3, p)
            out.direct[begin:end] = samples[:, 0]
            out.correction[begin:end] = samples[:, 1]
    return out


class TwinDevice:
    """A network and its twin on the device, ready to launch."""

    def __init__(self, cp: Any, e: KernelJob, twin: KernelTwinModel) -> None:
        self.cp = cp
        self.ensemble = e
        self.twin = twin
        self.plan = make_plan(e)
        self.model = make_plan(e.replace(spec=twin.spec, table=None))
        self.own = bool(self.model.harmonics)
        self.real = e.options.real
        self.steps = self.plan.steps
        self.segment = self._choose_segment()
        self.segments = -(-self.steps // self.segment)
        for max_blocks in cuda.cluster_limits(cp):
            how = spread_with_twin(self.plan.sites, self.real.itemsize, max_blocks)
            resident = self._compile(cuda.lay_out(self.plan, *how))
            if resident:
                break
        kept = (2 * (self.segment + 1) if self.own or twin.rank else 0) + (
            2 * (self.segments + 1) if self.own else 0
        )
        row = 2 * self.real.itemsize * self.rows
        self.grid = min(self.chunk, resident)
        if kept:
            self.grid = max(1, min(self.grid, MAX_PATH_BYTES // (kept * row)))
        self._upload(kept)
        self._tabulate()

    def _compile(self, layout: SiteLayout) -> int:
        """Compile the kernels for a layout. Returns the trajectories that the GPU runs at once."""
        e = self.ensemble
        rank = self.twin.rank
        attributes = self.cp.cuda.Device().attributes
        item = self.real.itemsize
        cluster = layout.cluster
        state = cuda.measure_shared_memory(self.plan, layout, item, attributes)
        before = -(-state.shared // 16) * 16
        pairs = (3 if self.plan.heun else 2) * (layout.local + layout.mirrors) + 2 * rank
        sums = 64
        if cluster > 1:  # sums and projections of every block
            sums += 4 * cluster
            pairs += cluster * rank
        self.shared = before + 2 * item * pairs + 8 * sums
        cuda.check_shared_memory(
            self.shared, f"{self.plan.sites} resonators and their twins", attributes
        )
        self.kinds = 2 + layout.degree + (4 if e.rates else 0)
        self.rows = layout.rows
        each = 3 * item * self.plan.sites * self.kinds
        self.chunk = gpus.choose_piece(e.count, cuda.CHUNK_BYTES // each)
        blocks = _count_blocks(attributes, layout, item, self.shared, self.chunk * cluster)
        macros = {
            "RANK": rank,
            "OWN": int(self.own),
            "TWIN_HARMONICS": self.model.harmonics,
            "TWIN_AT": f"{before}u",
            "TWIN_BLOCKS": blocks,
        }
        self.device = cuda.borrow_network(self.cp, e, self.plan, SOURCES, macros, layout, parts=3)
        self.pass_ = self.device.module.get_function("twin_pass")
        self.tabulate = self.device.module.get_function("tabulate")
        for kernel in (self.pass_, self.tabulate):
            if self.shared > 48 * 1024:
                kernel.max_dynamic_shared_size_bytes = self.shared
        if cluster == 1:
            return blocks * attributes["MultiProcessorCount"]
        if not cuda.resident_clusters(self.tabulate, layout, self.shared):
            return 0
        return min(self.device.grid, cuda.resident_clusters(self.pass_, layout, self.shared))

    def release(self) -> None:
        """Release the network after a run."""
        self.device.release()

    def _choose_segment(self) -> int:
        if self.twin.rank:
            return self.twin.segment  # where a path restarts is part of the estimator
        if not self.own:
            return self.steps
        piece = fit_modulation(self.twin.spec, modulation_tolerance(self.ensemble.options))[0]
        return int(piece * max(1, round(np.sqrt(self.steps) / piece)))

    def _upload(self, kept: int) -> None:
        cp = self.cp
        twin = self.twin
        device = self.device
        real = self.real
        device.upload(self.model, None, "c_twin", **device.select_constants("c_twin_", self.model))
        self.path = self.adjoint = self.kept = None
        if not self.own:
            size = (self.steps + 1, self.rows, 2)
            if 2 * np.prod(size, dtype=np.int64) * real.itemsize > MAX_PATH_BYTES:
                raise ValueError(
                    f"{self.steps} steps of the twin's path do not fit the "
                    f"{MAX_PATH_BYTES >> 30} GiB that are reserved for it. Use backend='cpu'."
                )
            self.path = cp.empty(size, real)
            self.adjoint = cp.empty(size, real)
        if kept:
            self.kept = cp.empty((self.grid, kept, self.rows, 2), real)
        self.quadratic = {"basis": 0, "curvature": 0}
        if twin.rank:
            assert twin.basis is not None
            assert twin.curvature is not None
            basis = np.zeros((twin.rank, self.rows), complex)
            basis[:, : len(twin.basis)] = twin.basis.T
            self.tables = Bundle.from_host(
                cp, {"basis": to_pairs(basis, real), "curvature": to_pairs(twin.curvature, real)}
            )
            self.quadratic = {name: self.tables.address(name) for name in self.quadratic}
        self.value = cp.zeros(self.segments + 1)

    def _pack_trail(self, prefix_sum: int = 0, gained: int = 0) -> np.ndarray:
        """Return the block `Trail` of addresses."""
        return read_blocks()["Trail"].pack(
            path=address(self.path),
            adjoint=address(self.adjoint),
            own=address(self.kept),
            prefix_sum=prefix_sum,
            gained=gained,
            value=address(self.value),
            **self.quadratic,
        )

    def is_tabulated(self, ends: np.ndarray) -> bool:
        """Whether the table of path and adjoint is finite. ends: its last state, first adjoint."""
        return self.own or bool(np.isfinite(ends).all())

    def _tabulate(self) -> None:
        """Compute the table of path and adjoint, if the trajectories share one."""
        if self.own:
            return
        self.device.set_constants(c_trail=self._pack_trail())
        layout = self.device.layout
        self.tabulate(
            (layout.cluster,), (layout.threads,), (np.int32(self.steps),), shared_mem=self.shared
        )
        if self.twin.rank:
            assert self.path is not None
            twin = self.twin.spec
            out = np.stack(
                [self.path[: twin.times, site].get().astype(float) for site in twin.port_sites],
                axis=1,
            )
            if not np.isfinite(out).all():
                return  # `is_tabulated` is then False
            s = twin.port_gain * (out[..., 0] + 1j * out[..., 1]) - twin.incoming
            rewards = (np.abs(s) ** 2) @ twin.port_weight * twin.dt
            if self.plan.heun:
                rewards[[0, -1]] *= 0.5  # trapezoid rule
            to_go = np.append(np.cumsum(rewards[::-1])[::-1], 0.0)
            ends = np.minimum(np.arange(self.segments + 1) * self.segment, self.steps)
            self.value.set(to_go[ends])

    def launch(self, first: int, count: int) -> LaunchOutput:
        """Run `count` trajectories from `first`, and reduce; asynchronous."""
        cp = self.cp
        grid = min(self.grid, count)
        cluster = self.device.layout.cluster
        n = self.plan.sites
        sums = Bundle(
            cp,
            returns=((count,), np.float64),
            gained=((count,), np.float64),
            reward_sum=((self.ensemble.spec.times,), np.float64),
            prefix_sum=((self.steps + 1,), np.float64),
            moments=((3, 3 * self.ensemble.width), np.float64),
            ends=((0 if self.own else 2, n, 2), self.real),
            overflow=((count, cluster), np.int32),
        )
        part = LaunchOutput(count, cp.empty((count, 3 * self.kinds * n), self.real), sums)
        rewards = cp.zeros((grid, self.ensemble.spec.times))
        prefixes = cp.zeros((grid, self.steps + 1))
        self.device.set_constants(
            c_out=self.device.pack_outputs(part, rewards, record=0),
            c_trail=self._pack_trail(address(prefixes), sums.address("gained")),
        )
        self.pass_(
            (grid * cluster,),
            (self.device.layout.threads,),
            (
                np.uint32(first),
                np.int32(count),
                np.int32(self.steps),
                np.int32(self.segment),
                self.device.piece,
                self.real.type(self.plan.modulation_scale),
                np.float64(self.plan.reference),
            ),
            shared_mem=self.shared,
        )
        rewards.sum(axis=0, out=sums["reward_sum"])
        prefixes.sum(axis=0, out=sums["prefix_sum"])
        if self.path is not None and self.adjoint is not None:
            ends = sums["ends"]
            ends[0] = self.path[-1, :n]
            ends[1] = self.adjoint[0, :n]
        return self.device.add_moments(part)


def _count_blocks(
    attributes: dict[str, int], layout: SiteLayout, item: int, shared: int, count: int
) -> int:
    """Return the blocks to keep resident on a multiprocessor.

    A third sum and a kept score need half as many registers again as `one_pass`, and two kept
    scores more.
    """
    threads = layout.threads
    limit = cuda.blocks_per_multiprocessor(attributes, threads, item, shared, count)
    registers = 80 if item == 4 and layout.cluster == 1 else 128
    return max(1, min(limit, attributes["MaxRegistersPerMultiprocessor"] // (registers * threads)))
