"""The one-pass kernel on an NVIDIA GPU: lays out the network, compiles for it at run time, launches.

A trajectory is a block and a site a thread; see `native/lattice.cu`. Compilation takes a second and is kept
for every shape of network: new parameter values, seeds and drives of the same network do not compile again.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel.spec import KernelSpec

if TYPE_CHECKING:
    from fluctua.tcmt.kernel.run import KernelResult, Options

LN2 = 0.6931471805599453
SOURCES = ("device.cuh", "noise.cuh", "lattice.cu")
CHUNK_BYTES = 2**30
"""Sums of single trajectories held at a time; more trajectories go in several launches."""


class Layout(NamedTuple):
    """How the sites are spread over a block. rows: per·threads, sites and idle ones."""

    threads: int
    per: int
    degree: int
    neighbour: np.ndarray  # (degree, rows)
    bond: np.ndarray  # (degree, rows) in the kernels' order, −1 where there is none
    half: np.ndarray  # (B, 2) where each bond's halves are: slot·N + site

    @property
    def rows(self) -> int:
        """Sites and idle rows of a block."""
        return self.threads * self.per


def lay_out(sites: int, flat: dict[str, Any]) -> Layout:
    """Slots of every site: its neighbours below, then those above, padded to the largest degree."""
    per = -(-sites // 1024)
    threads = 32 * -(-sites // (32 * per))
    lower, upper = flat["lower_start"], flat["upper_start"]
    degree = max(1, int((np.diff(lower) + np.diff(upper)).max()))
    rows = threads * per
    neighbour = np.tile(np.arange(rows, dtype=np.int32), (degree, 1))
    bond = np.full((degree, rows), -1, np.int32)
    half = np.zeros((flat["bonds"], 2), np.int64)
    for n in range(sites):
        below = range(lower[n], lower[n + 1])
        above = range(upper[n], upper[n + 1])
        near = [(flat["lower_site"][e], flat["lower_bond"][e], 1) for e in below]
        near += [(flat["upper_site"][b], b, 0) for b in above]
        for slot, (site, b, side) in enumerate(near):
            neighbour[slot, n], bond[slot, n] = site, b
            half[b, side] = slot * sites + n
    return Layout(threads, per, degree, neighbour, bond, half)


def run_cuda(spec: KernelSpec, o: Options) -> KernelResult:
    """`kernel.run` on the current CuPy device."""
    from fluctua.tcmt.kernel import run as kernel

    cp = require_cupy()
    refuse(spec, o)
    if o.binned is not None:
        from fluctua.tcmt.kernel.cuda_binned import run_binned

        return run_binned(cp, spec, o)
    flat = kernel.flat(spec, o)
    device = Device(cp, spec, o, flat)
    p, real = kernel.width(spec, o), np.dtype(o.dtype)
    records = spec.steps // o.record_every + 1 if o.record_every else 0
    out: dict[str, Any] = {
        "returns": np.empty(o.trajectories),
        "moments": np.zeros((3, p)),
        "samples": np.empty((o.trajectories, p), real) if o.samples else None,
        "record": np.empty((o.trajectories, records, spec.omega.size, 2), real) if records else None,
        "overflow": np.full(2, -1, np.int64),
    }
    reward_sum = cp.zeros(spec.steps)
    for begin in range(0, o.trajectories, device.chunk):
        end = min(begin + device.chunk, o.trajectories)
        part = device.launch(o.first + begin, end - begin, reward_sum, records)
        out["returns"][begin:end] = part.returns.get()
        bad = np.flatnonzero(part.overflow.get())
        if bad.size:
            kernel.explain_overflow(spec, o, o.first + begin + int(bad[0]))
        if p:
            moments, samples = device.moments(part, o.samples)
            out["moments"] += moments
            if o.samples:
                out["samples"][begin:end] = samples.get()
        if records:
            out["record"][begin:end] = part.record.get()
    out["reward_sum"] = reward_sum.get()
    return kernel.result(spec, o, out)


class Part(NamedTuple):
    """What one launch leaves on the device."""

    trajectories: int
    raw: Any  # (count, kinds·N)
    returns: Any
    overflow: Any
    record: Any


class Device:
    """A network on the device, ready to be launched."""

    def __init__(
        self,
        cp: Any,
        spec: KernelSpec,
        o: Options,
        flat: dict[str, Any],
        more_sources: tuple[str, ...] = (),
        more_definitions: dict[str, Any] | None = None,
    ) -> None:
        self.cp, self.spec, self.o, self.flat = cp, spec, o, flat
        self.sources = SOURCES + more_sources
        self.more_definitions = more_definitions or {}
        self.real = np.dtype(o.dtype)
        self.layout = lay_out(spec.omega.size, flat)
        self.kinds = (2 + self.layout.degree + (4 if o.rates else 0)) if o.scores else 0
        per_trajectory = self.real.itemsize * spec.omega.size * max(1, self.kinds)
        self.chunk = int(max(2, min(o.trajectories, CHUNK_BYTES // per_trajectory) // 2 * 2))
        self._keep: list[Any] = []
        self._compile()
        self._upload()

    def _compile(self) -> None:
        spec, o, layout = self.spec, self.o, self.layout
        attributes = self.cp.cuda.Device().attributes
        item, waves = self.real.itemsize, 2 * spec.harmonics * len(spec.bonds)
        state = item * (4 * layout.rows + 32 + (3 * len(spec.bonds) if spec.harmonics else 0))
        # In shared memory if eight blocks still fit a multiprocessor: then occupancy does not suffer.
        waves_shared = state + item * waves <= attributes["MaxSharedMemoryPerMultiprocessor"] // 8 - 1024
        self.shared = state + (item * waves if waves_shared else 0)
        if self.shared > attributes["MaxSharedMemoryPerBlockOptin"]:
            raise ValueError(
                f"{spec.omega.size} resonators need {self.shared} bytes of shared memory, more than the "
                f"{attributes['MaxSharedMemoryPerBlockOptin']} of this GPU. Use backend='cpu'."
            )
        self.blocks = blocks_per_multiprocessor(attributes, layout.threads, item, self.shared, self.chunk)
        defines = definitions(spec, o, layout, self.blocks, waves_shared)
        defines += tuple((k, str(v)) for k, v in self.more_definitions.items())
        self.module = compiled(defines, *self.sources)
        self.kernel = self.module.get_function("one_pass")
        if self.shared > 48 * 1024:
            self.kernel.max_dynamic_shared_size_bytes = self.shared
        self.grid = min(self.chunk, self.blocks * attributes["MultiProcessorCount"])
        self.waves = None if waves_shared else self.cp.empty(self.grid * waves, self.real)

    def _upload(self) -> None:
        spec, o, flat = self.spec, self.o, self.flat
        self.bar = None
        if o.table is not None:
            self.bar = np.zeros(-(-spec.steps // 2) * 2)
            self.bar[: spec.steps] = flat["reference"] - o.table[1:]
        self.set_constant("c_in", self.inputs(spec, flat, self.bar))
        self.set_constant("c_keys", key_schedule(o.seed))
        for name, value in (("c_gain", flat["gain"]), ("c_weight", flat["weight"])):
            self.set_constant(name, value)
        self.set_constant("c_port", (spec.port_sites * 2 * self.real.itemsize).astype(np.uint32))
        if not flat["incoming_stride"]:
            self.set_constant("c_incoming", flat["incoming"])
        if not flat["drive_stride"]:
            self.set_constant("c_force", flat["drive"])
            self.set_constant("c_drive", spec.drive_sites)

    def inputs(self, spec: KernelSpec, flat: dict[str, Any], bar: np.ndarray | None) -> np.ndarray:
        """The addresses of a network's arrays on the device: `Inputs` of lattice.cu."""
        rows, n = self.layout.rows, spec.omega.size
        pad = lambda v: np.concatenate([v, np.zeros((rows - n, *v.shape[1:]), v.dtype)])
        there = self.layout.bond >= 0
        kappa = np.zeros(there.shape, self.real)
        kappa[there] = flat["kappa"][self.layout.bond[there]]
        modulation = flat["modulation"].transpose(0, 2, 1)
        modulation = np.concatenate([modulation, np.zeros_like(modulation[..., :1])], axis=-1)
        drive = incoming = None
        if flat["drive_stride"]:
            drive = np.zeros((spec.steps, rows, 2), self.real)
            for d, site in enumerate(spec.drive_sites):
                drive[:, site] += flat["drive"][:, d]
        if flat["incoming_stride"]:
            incoming = flat["incoming"]
        variance = 2 * LN2 * flat["scale"].astype(float) ** 2
        pointers = [
            self.upload(v)
            for v in (
                *(pad(flat[k]) for k in ("omega", "chi", "damping", "kick")),
                pad(variance.astype(self.real)),
                pad(flat["start"]),
                self.layout.neighbour,
                kappa,
                self.layout.bond,
                flat["bond_given"],
                drive,
                incoming,
                None if bar is None else bar.astype(self.real),
                modulation,
            )
        ]
        return np.array(pointers, np.uint64)

    def upload(self, value: np.ndarray | None) -> int:
        """The address of a copy on the device, which lives as long as this object; 0 for nothing."""
        if value is None or value.size == 0:
            return 0
        self._keep.append(self.cp.asarray(np.ascontiguousarray(value)))
        return int(self._keep[-1].data.ptr)

    def set_constant(self, name: str, value: np.ndarray) -> None:
        """Write an array into the module's constant memory."""
        data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        if data.size:
            self.cp.ndarray(data.shape, np.uint8, self.module.get_global(name)).set(data)

    def launch(self, first: int, count: int, reward_sum: Any, records: int) -> Part:
        """Run `count` trajectories from `first` and add their rewards to `reward_sum` (T,); asynchronous."""
        cp, n, blocks = self.cp, self.spec.omega.size, min(self.grid, count)
        of_blocks = cp.zeros((blocks, self.spec.steps))
        part = Part(
            count,
            cp.empty((count, self.kinds * n), self.real),
            cp.empty(count),
            cp.empty(count, np.int32),
            cp.empty((count, records, n, 2), self.real),
        )
        waves = 0 if self.waves is None else self.waves.data.ptr
        addresses = [
            part.raw.data.ptr,
            part.returns.data.ptr,
            of_blocks.data.ptr,
            part.record.data.ptr,
            part.overflow.data.ptr,
            waves,
        ]
        self.set_constant("c_out", np.array(addresses, np.uint64))
        self.kernel(
            (blocks,),
            (self.layout.threads,),
            self.arguments(first, count),
            shared_mem=self.shared,
        )
        reward_sum += of_blocks.sum(axis=0)
        return part

    def arguments(self, first: int, count: int) -> tuple[Any, ...]:
        """Of `one_pass`, in their C types."""
        flat = self.flat
        return (
            np.uint32(first),
            np.int32(count),
            np.int32(self.spec.steps),
            np.int32(flat["modulation_steps"] if self.spec.harmonics else 32),
            self.real.type(flat["modulation_scale"]),
            np.float64(flat["reference"]),
            np.int32(self.o.record_every),
        )

    def moments(self, part: Part, want_samples: bool) -> tuple[np.ndarray, Any]:
        """Σv, Σv², Σ(pair)² (3, P) in float64, and the samples (count, P)."""
        return self.moments_of(part, *self.columns(), want_samples)

    def moments_of(self, part: Part, a: np.ndarray, b: np.ndarray, want_samples: bool) -> tuple[np.ndarray, Any]:
        """The same of parameters that are the sums of the raw columns a and b (−1: none)."""
        cp = self.cp
        columns, parts = len(a), int(np.clip(part.trajectories // 16, 1, 64))
        sums = cp.empty((parts, 3, columns))
        samples = cp.empty((part.trajectories, columns), self.real) if want_samples else None
        self.module.get_function("moments")(
            (-(-columns // 128), parts),
            (128,),
            (
                part.raw,
                np.int64(part.raw.shape[1]),
                cp.asarray(a),
                cp.asarray(b),
                np.int32(columns),
                np.int32(part.trajectories),
                sums,
                np.uint64(0) if samples is None else samples,
            ),
        )
        return sums.sum(axis=0).get(), samples

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """For every parameter the one or two raw columns that add up to it."""
        n, degree, spec = self.spec.omega.size, self.layout.degree, self.spec
        site = np.arange(n)
        first = [site, n + site, 2 * n + self.layout.half[:, 0]]
        if self.o.rates:
            base = (2 + degree) * n
            first += [
                base + site,
                base + n + site,
                base + 2 * n + spec.drive_sites,
                base + 3 * n + spec.port_sites,
            ]
        a = np.concatenate(first).astype(np.int32)
        b = np.full_like(a, -1)
        b[2 * n : 2 * n + len(spec.bonds)] = 2 * n + self.layout.half[:, 1]
        return a, b


def blocks_per_multiprocessor(attributes: dict[str, int], threads: int, item: int, shared: int, count: int) -> int:
    """Blocks to keep resident: enough for all trajectories at once if registers and shared memory allow."""
    registers = 48 if item == 4 else 96  # what the inner loop needs with next to no spilling, for four neighbours
    limits = [
        -(-count // attributes["MultiProcessorCount"]),
        attributes["MaxThreadsPerMultiProcessor"] // threads,
        attributes["MaxRegistersPerMultiprocessor"] // (registers * threads),
        attributes["MaxSharedMemoryPerMultiprocessor"] // (shared + 1024),
        32,
    ]
    return max(1, min(limits))


def definitions(
    spec: KernelSpec, o: Options, layout: Layout, blocks: int, waves_shared: bool
) -> tuple[tuple[str, str], ...]:
    """The macros that specialise the source for this network."""
    flags = {
        "SCORES": o.scores,
        "RATES": o.rates,
        "NOISE": o.noise,
        "ANTITHETIC": o.antithetic,
        "BASELINE": o.table is not None,
        "DRIVE_TABLE": len(spec.drive) > 1,
        "INCOMING_TABLE": len(spec.incoming) > 1,
        "RECORD": o.record_every > 0,
        "WAVES_SHARED": waves_shared,
    }
    numbers = {
        "N": spec.omega.size,
        "THREADS": layout.threads,
        "PER": layout.per,
        "DEGREE": layout.degree,
        "BONDS": len(spec.bonds),
        "PORTS": spec.port_sites.size,
        "DRIVES": spec.drive_sites.size,
        "HARMONICS": spec.harmonics,
        "BLOCKS": blocks,
        "INVERSE_DT": 1 / spec.dt,
        **{k: int(v) for k, v in flags.items()},
    }
    types = {"Real": "float", "Pair": "float2"} if o.dtype == "float32" else {"Real": "double", "Pair": "double2"}
    return tuple((k, str(v)) for k, v in {**types, **numbers}.items())


def source(*names: str) -> str:
    """The text of native source files, one after the other."""
    folder = Path(__file__).parent.parent / "native"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@functools.lru_cache(maxsize=64)
def compiled(defines: tuple[tuple[str, str], ...], *names: str) -> Any:
    """The module for these macros; compiled once."""
    import cupy as cp

    options = ("-std=c++17", *(f"-D{k}={v}" for k, v in defines))
    return cp.RawModule(code=source(*names), options=options)


def key_schedule(seed: int) -> np.ndarray:
    """k0 and k1 of Philox's ten rounds, (20,)."""
    step = np.arange(10, dtype=np.uint64)
    low = (np.uint64(seed & 0xFFFFFFFF) + step * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
    high = (np.uint64(seed >> 32) + step * np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF)
    return np.stack([low, high], axis=1).astype(np.uint32).ravel()


def require_cupy() -> Any:
    """CuPy with a working device, or an error that says what is missing."""
    try:
        import cupy as cp
    except ImportError:
        raise ImportError(
            "backend='cuda' needs CuPy: pip install 'fluctua[cuda]'. backend='cpu' runs everywhere."
        ) from None
    try:
        if cp.cuda.runtime.getDeviceCount() > 0:
            return cp
    except cp.cuda.runtime.CUDARuntimeError:
        pass
    raise RuntimeError("backend='cuda' found no NVIDIA GPU here. backend='cpu' runs everywhere.")


def refuse(spec: KernelSpec, o: Options) -> None:
    """What the kernels on the GPU cannot do and those on the CPU can."""
    for name, sites in (("drives", spec.drive_sites), ("ports", spec.port_sites)):
        if o.rates and len(np.unique(sites)) != len(sites):
            raise ValueError(f"rates=True on the GPU needs the {name} on distinct sites. Use backend='cpu'.")
