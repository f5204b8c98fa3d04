"""The one-pass kernel on NVIDIA GPUs: layout of the network, compilation at run time, launches.

A trajectory is a block with one site per thread, or a cluster of blocks for more than 1,024 sites:
see `native/cuda/lattice.cu`. Compilation takes a second and is cached per shape of network: other
parameter values, seeds and drives of the same network do not compile again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from fluctua.compiled.toolchain import require_cupy
from fluctua.tcmt.kernel import gpus
from fluctua.tcmt.kernel.cpu import EnsembleSums
from fluctua.tcmt.kernel.cuda_layout import (
    SiteLayout,
    check_shared_memory,
    cluster_limits,
    lay_out,
    measure_shared_memory,
    resident_clusters,
    spread,
)
from fluctua.tcmt.kernel.cuda_memory import Bundle, Spread, find_constant, load_indices
from fluctua.tcmt.kernel.layout import KernelPlan, make_plan, read_blocks, read_sources
from fluctua.tcmt.kernel.options import KernelJob

LN2 = 0.6931471805599453
SITES = ("omega", "chi", "damping", "kick", "variance", "start")
"""Fields of `Inputs` with one row of sites each; the last, of pairs, has two."""
NUMBERS = ("kappa", "drive", "incoming", "bar", "modulation")
"""Other real fields of `Inputs`."""
SOURCES = (
    "device.cuh",
    "inline.hpp",
    "philox.hpp",
    "noise.cuh",
    "blocks.cuh",
    "step.cuh",
    "drift.cuh",
    "heun.cuh",
    "lattice.cu",
)
CHUNK_BYTES = 2**30
"""Largest memory for outputs of trajectories per launch; more trajectories take more launches."""


def run(e: KernelJob) -> EnsembleSums:
    """Run a job in one pass on all visible GPUs."""
    cp = require_cupy()
    check_distinct_sites(e)
    plan = make_plan(e)
    out = EnsembleSums.empty(e)

    def launch(device, begin, end):
        return device.add_moments(device.launch(e.first + begin, end - begin, e.records))

    for begin, end, _, part in gpus.iterate_pieces(
        cp, e.count, lambda: borrow_network(cp, e, plan), launch
    ):
        sums = part.sums.get()
        out.returns[begin:end] = sums["returns"]
        out.reward_sum += sums["reward_sum"]
        bad = np.flatnonzero(sums["overflow"].any(axis=1))
        if bad.size:
            out.overflow[0] = e.first + begin + int(bad[0])
            return out
        out.moments += sums["moments"]
        if out.samples is not None:
            out.samples[begin:end] = part.samples.get()
        if out.record is not None:
            out.record[begin:end] = part.record.get()
    return out


class LaunchOutput(NamedTuple):
    """Outputs of one launch on the device.

    trajectories: count.
    raw: raw columns (count, kinds·N).
    sums: returns (count,), overflow (count, cluster), reward_sum (T,), moments (3, P).
    record: states, on request.
    samples: gradients (count, P), on request.
    """

    trajectories: int
    raw: Any
    sums: Bundle
    record: Any = None
    samples: Any = None


_free: dict[Any, list[LoadedNetwork]] = {}
KEPT_BYTES = 2**24
"""Networks that no run uses at present, by shape, and the largest memory that one may keep."""


def borrow_network(
    cp: Any,
    e: KernelJob,
    plan: KernelPlan,
    sources: tuple[str, ...] = (),
    macros: dict[str, Any] | None = None,
    layout: SiteLayout | None = None,
    parts: int = 1,
) -> LoadedNetwork:
    """Return a `LoadedNetwork` for one run: new, or one of an earlier run with the same shape."""
    arrays = (plan.upper_start, plan.upper_site, plan.bond_given, plan.drive_site, plan.port_site)
    shape = (
        plan.sites,
        plan.steps,
        plan.dt,
        plan.heun,
        plan.harmonics,
        plan.modulation_steps,
        plan.bar is None,
    )
    tables = (plan.drive_rows, plan.incoming_rows, e.count, e.options)
    limits = (cp, cp.cuda.Device().id, CHUNK_BYTES, gpus.PIECE)
    key = (
        *limits,
        shape,
        tables,
        *(a.tobytes() for a in arrays),
        sources,
        tuple((macros or {}).items()),
        parts,
        layout and (layout.threads, layout.per, layout.cluster),
    )
    try:
        device = _free[key].pop()
    except (KeyError, IndexError):
        return LoadedNetwork(cp, e, plan, sources, macros, layout, parts, key)
    device.reload(e, plan)
    return device


class LoadedNetwork:
    """A network on the device, ready to launch.

    Args:
        cp: CuPy.
        ensemble, plan: what is run.
        sources, macros: of further kernels in the same module.
        layout: of the sites; kernels without clusters give one of a single block.
        parts: of a gradient, each with raw columns of its own.
        key: its shape, for `borrow_network`.

    """

    def __init__(
        self,
        cp: Any,
        ensemble: KernelJob,
        plan: KernelPlan,
        sources: tuple[str, ...] = (),
        macros: dict[str, Any] | None = None,
        layout: SiteLayout | None = None,
        parts: int = 1,
        key: Any = None,
    ) -> None:
        self.cp = cp
        self.ensemble = ensemble
        self.plan = plan
        self.parts = parts
        self.key = key
        self.real = ensemble.options.real
        self._sent: dict[str, Bundle] = {}
        limits = [1] if layout else cluster_limits(cp)
        for max_blocks in limits:
            self.layout = layout or lay_out(
                plan, *spread(plan.sites, self.real.itemsize, max_blocks)
            )
            self.kinds = (
                (2 + self.layout.degree + (4 if ensemble.rates else 0)) if ensemble.scores else 0
            )
            per_trajectory = self.real.itemsize * plan.sites * max(1, self.kinds)
            self.chunk = gpus.choose_piece(ensemble.count, CHUNK_BYTES // per_trajectory)
            if self._compile(SOURCES + sources, macros or {}):
                break
        where = Spread(self.layout.threads, self.layout.per, self.layout.cluster, self.layout)
        self.indices = load_indices(plan, cp, cp.cuda.Device().id, where, ensemble.rates, parts)
        self._upload()

    def reload(self, ensemble: KernelJob, plan: KernelPlan) -> None:
        """Load other numbers into a network of the same shape."""
        self.ensemble = ensemble
        self.plan = plan
        self._upload()

    def release(self) -> None:
        """Keep the network for another run of the same shape, unless it has too much memory."""
        held = sum(bundle.memory.nbytes for bundle in self._sent.values())
        if self.waves is not None:
            held += self.waves.nbytes
        if held <= KEPT_BYTES:
            if len(_free) > 64:
                _free.clear()
            _free.setdefault(self.key, []).append(self)

    def _compile(self, sources: tuple[str, ...], macros: dict[str, Any]) -> bool:
        """Compile the kernel. Returns False if the GPU cannot run a cluster of this size."""
        attributes = self.cp.cuda.Device().attributes
        item = self.real.itemsize
        self.shared, waves_shared = measure_shared_memory(self.plan, self.layout, item, attributes)
        check_shared_memory(self.shared, f"{self.plan.sites} resonators", attributes)
        count = self.chunk * self.layout.cluster
        width = item * self.layout.per
        if self.plan.heun:  # between its stages a thread keeps more
            width = width * 4 // 3
        self.blocks = blocks_per_multiprocessor(
            attributes, self.layout.threads, width, self.shared, count
        )
        defines = make_definitions(self.ensemble, self.layout, self.blocks, waves_shared)
        defines += tuple((k, str(v)) for k, v in macros.items())
        self.module = compile_module(self.cp.cuda.Device().id, defines, *sources)
        self.kernel = self.module.get_function("one_pass")
        if self.shared > 48 * 1024:
            self.kernel.max_dynamic_shared_size_bytes = self.shared
        resident = self.blocks * attributes["MultiProcessorCount"]
        if self.layout.cluster > 1:
            resident = resident_clusters(self.kernel, self.layout, self.shared)
        self.grid = min(self.chunk, resident)
        waves = self.layout.cluster * 2 * self.plan.harmonics * self.layout.bonds.shape[1]
        self.waves = None if waves_shared else self.cp.empty(self.grid * waves, self.real)
        return resident > 0

    def _upload(self) -> None:
        plan = self.plan
        self.upload(
            plan,
            plan.bar,
            "c_in",
            c_keys=key_schedule(plan.seed),
            c_port=(plan.port_site * 2 * self.real.itemsize).astype(np.uint32),
            c_drive=plan.drive_site,
            **self.select_constants("c_", plan),
        )

    def select_constants(self, prefix: str, plan: KernelPlan) -> dict[str, np.ndarray]:
        """Return gains, weights, and constant drives and incoming waves: constants by name."""
        constants = {"gain": plan.gain, "weight": plan.weight}
        if plan.incoming_rows == 1:
            constants["incoming"] = plan.incoming
        if plan.drive_rows == 1:
            constants["force"] = plan.drive
        return {prefix + name: value for name, value in constants.items()}

    def upload(
        self, plan: KernelPlan, bar: np.ndarray | None, inputs: str, **constants: np.ndarray
    ) -> None:
        """Copy a network's numbers and constants to the device at once.

        inputs: name of the constant of type `Inputs`, which has the addresses of the arrays.
        """
        sent = self._sent.get(inputs)
        if sent is None:
            sent = self._sent[inputs] = self._allocate(plan, bar is not None, inputs, constants)
        self._fill(sent.host, plan, bar)
        for name, value in constants.items():
            sent.host[name][...] = value
        sent.send()
        self._write(sent, {**constants, inputs: sent.host[inputs]})

    def _allocate(
        self, plan: KernelPlan, bars: bool, inputs: str, constants: dict[str, np.ndarray]
    ) -> Bundle:
        """Allocate the device's memory for `upload`."""
        rows = self.layout.rows
        real = self.real
        block = read_blocks()["Inputs"]
        shapes: dict[str, Any] = {"sites": (len(SITES) + 1, rows), "kappa": self.layout.bond.shape}
        if plan.drive_rows > 1:
            shapes["drive"] = (plan.drive_rows, rows, 2)
        if plan.incoming_rows > 1:
            shapes["incoming"] = plan.incoming.shape
        if bars:
            shapes["bar"] = (-(-plan.steps // 2) * 2,)
        if plan.harmonics:
            shapes["modulation"] = (len(plan.modulation), 2 * plan.harmonics, 4)
        arrays = {name: (shape, real) for name, shape in shapes.items()}
        bundle = Bundle(
            self.cp,
            **arrays,
            **{name: (value.shape, value.dtype) for name, value in constants.items()},
            **{inputs: ((len(block.fields),), np.uint64)},
        )
        of_sites = {
            name: bundle.address("sites") + i * rows * real.itemsize for i, name in enumerate(SITES)
        }
        others = {name: bundle.address(name) if name in arrays else 0 for name in NUMBERS}
        bundle.host[inputs][...] = block.pack(**of_sites, **others, **self.indices.of_inputs)
        return bundle

    def _fill(self, host: dict[str, np.ndarray], plan: KernelPlan, bar: np.ndarray | None) -> None:
        """Fill the host copies of the arrays with the numbers of a network."""
        n = plan.sites
        sites = host["sites"]
        variance = 2 * LN2 * plan.scale.astype(float) ** 2
        for row, values in enumerate((plan.omega, plan.chi, plan.damping, plan.kick, variance)):
            sites[row, :n] = values
        sites[-2:].reshape(-1, 2)[:n] = plan.start
        with_zero = np.append(plan.kappa, self.real.type(0))  # at −1, for slots without a bond
        host["kappa"][...] = with_zero[self.layout.bond]
        if plan.drive_rows > 1:
            host["drive"][...] = 0
            for d, site in enumerate(plan.drive_site):
                host["drive"][:, site] += plan.drive[:, d]
        if plan.incoming_rows > 1:
            host["incoming"][...] = plan.incoming
        if bar is not None:
            host["bar"][: plan.steps] = plan.reference - bar
        if plan.harmonics:
            host["modulation"][..., :3] = plan.modulation.transpose(0, 2, 1)

    def set_constants(self, **values: np.ndarray) -> None:
        """Write arrays into the module's constant memory."""
        changed = {
            name: value
            for name, value in values.items()
            if find_constant(self.module, name).differs(value)
        }
        if changed:
            self._write(Bundle.from_host(self.cp, changed), changed)

    def _write(self, sent: Bundle, values: dict[str, np.ndarray]) -> None:
        """Copy constants from a bundle to the module, those that have changed."""
        for name, value in values.items():
            target = find_constant(self.module, name)
            if target.differs(value):
                sent.copy(name, target.pointer)
                target.value = value.tobytes()

    def launch(self, first: int, count: int, records: int) -> LaunchOutput:
        """Run `count` trajectories from `first`; asynchronous."""
        cp = self.cp
        n = self.plan.sites
        grid = min(self.grid, count)
        times = self.ensemble.spec.times
        of_blocks = cp.zeros((grid, times))
        sums = Bundle(
            cp,
            returns=((count,), np.float64),
            reward_sum=((times,), np.float64),
            moments=((3, self.ensemble.width), np.float64),
            overflow=((count, self.layout.cluster), np.int32),
        )
        raw = cp.empty((count, self.kinds * n), self.real)
        part = LaunchOutput(
            count, raw, sums, cp.empty((count, records, n, 2), self.real) if records else None
        )
        self.set_constants(c_out=self.pack_outputs(part, of_blocks, address(part.record)))
        blocks_ = (grid * self.layout.cluster,)
        self.kernel(
            blocks_,
            (self.layout.threads,),
            self.make_arguments(first, count),
            shared_mem=self.shared,
        )
        of_blocks.sum(axis=0, out=sums["reward_sum"])
        return part

    def pack_outputs(self, part: LaunchOutput, reward_sum: Any, record: int) -> np.ndarray:
        """Return the block `Outputs`: addresses to which a launch writes."""
        return read_blocks()["Outputs"].pack(
            raw=address(part.raw),
            returns=part.sums.address("returns"),
            reward_sum=address(reward_sum),
            record=record,
            overflow=part.sums.address("overflow"),
            waves=address(self.waves),
        )

    @property
    def piece(self) -> np.int32:
        """Steps in one piece of the modulation, or of the sum of rewards."""
        return np.int32(self.plan.modulation_steps if self.plan.harmonics else 32)

    def make_arguments(self, first: int, count: int) -> tuple[Any, ...]:
        """Return the arguments of `one_pass`, in their C types."""
        return (
            np.uint32(first),
            np.int32(count),
            np.int32(self.plan.steps),
            self.piece,
            self.real.type(self.plan.modulation_scale),
            np.float64(self.plan.reference),
            np.int32(self.ensemble.options.record_every),
        )

    def add_moments(self, part: LaunchOutput) -> LaunchOutput:
        """Add Σv, Σv², Σ(pair)² (3, P) of the gradients, and samples on request; asynchronous."""
        if not self.ensemble.scores:
            return part
        cp = self.cp
        columns = self.parts * self.ensemble.width
        parts = min(max(part.trajectories // 16, 1), 64)
        of_parts = cp.empty((parts, 3, columns))
        samples = (
            cp.empty((part.trajectories, columns), self.real) if self.ensemble.samples else None
        )
        self.module.get_function("moments")(
            (-(-columns // 128), parts),
            (128,),
            (
                part.raw,
                np.int64(part.raw.shape[1]),
                np.uint64(self.indices.first),
                np.uint64(self.indices.second),
                np.int32(columns),
                np.int32(part.trajectories),
                of_parts,
                np.uint64(0) if samples is None else samples,
            ),
        )
        of_parts.sum(axis=0, out=part.sums["moments"])
        return part._replace(samples=samples)


def address(array: Any) -> int:
    """Return the address of an array on the device; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def blocks_per_multiprocessor(
    attributes: dict[str, int], threads: int, width: int, shared: int, count: int
) -> int:
    """Return the blocks to keep resident: all trajectories, if registers and memory allow.

    width: bytes of a number, times sites per thread.
    """
    registers = 12 * width  # of the inner loop for four neighbours, with almost no spilling
    limits = [
        -(-count // attributes["MultiProcessorCount"]),
        attributes["MaxThreadsPerMultiProcessor"] // threads,
        attributes["MaxRegistersPerMultiprocessor"] // (registers * threads),
        attributes["MaxSharedMemoryPerMultiprocessor"] // (shared + 1024),
        32,
    ]
    return max(1, min(limits))


def make_definitions(
    e: KernelJob, layout: SiteLayout, blocks_: int, waves_shared: bool
) -> tuple[tuple[str, str], ...]:
    """Return the macros that specialise the source for a network."""
    spec = e.spec
    o = e.options
    flags = {
        "SCORES": e.scores,
        "RATES": e.rates,
        "NOISE": o.noise,
        "ANTITHETIC": o.antithetic,
        "BASELINE": e.table is not None,
        "DRIVE_TABLE": len(spec.drive) > 1,
        "INCOMING_TABLE": len(spec.incoming) > 1,
        "RECORD": o.record_every > 0,
        "HEUN": spec.integrator == "heun",
        "WAVES_SHARED": waves_shared,
    }
    numbers = {
        "N": spec.sites,
        "THREADS": layout.threads,
        "PER": layout.per,
        "CLUSTER": layout.cluster,
        "MIRRORS": layout.mirrors,
        "DEGREE": layout.degree,
        "BONDS": layout.bonds.shape[1],
        "PORTS": spec.port_sites.size,
        "DRIVES": spec.drive_sites.size,
        "HARMONICS": spec.waves,
        "BLOCKS": blocks_,
        "INVERSE_DT": 1 / spec.dt,
        **{k: int(v) for k, v in flags.items()},
        **{f"{block.name.upper()}_BYTES": block.size for block in read_blocks().values()},
    }
    types = (
        {"Real": "float", "Pair": "float2"}
        if o.dtype == "float32"
        else {"Real": "double", "Pair": "double2"}
    )
    return tuple((k, str(v)) for k, v in {**types, **numbers}.items())


@functools.lru_cache(maxsize=64)
def compile_module(gpu: int, defines: tuple[tuple[str, str], ...], *names: str) -> Any:
    """Compile the sources with some macros. Cached per GPU, whose module has its own constants."""
    import cupy as cp

    options = ("-std=c++17", *(f"-D{k}={v}" for k, v in defines))
    return cp.RawModule(code=read_sources(*names), options=options)


def key_schedule(seed: int) -> np.ndarray:
    """Return k0 and k1 of Philox's ten rounds. (20,)"""
    low = seed & 0xFFFFFFFF
    high = seed >> 32
    rounds = [
        (low + i * 0x9E3779B9 & 0xFFFFFFFF, high + i * 0xBB67AE85 & 0xFFFFFFFF) for i in range(10)
    ]
    return np.array(rounds, np.uint32).ravel()


def check_distinct_sites(e: KernelJob) -> None:
    """Raise for rates with several drives or ports on a site, which only the CPU has."""
    for name, sites in (("drives", e.spec.drive_sites), ("ports", e.spec.port_sites)):
        if e.rates and len(np.unique(sites)) != len(sites):
            raise ValueError(
                f"rates=True on the GPU needs the {name} on distinct sites. Use backend='cpu'."
            )
