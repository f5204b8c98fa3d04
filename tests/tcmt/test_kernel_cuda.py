"""The CUDA kernel against the CPU kernel, on a GPU where there is one and emulated everywhere."""

import re
import shutil
import subprocess

import numpy as np
import pytest

import fake_cupy
from cuda_device import has_gpu
from fluctua.tcmt.kernel import cuda, cuda_binned
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.layout import make_plan, read_sources
from fluctua.tcmt.kernel.options import Binned, KernelJob, KernelOptions
from fluctua.tcmt.kernel.twin import run_twin
from in_turn import in_turn
from kernel_reference import rectangle, simulate

pytestmark = pytest.mark.long

SEED = 0x1234_5678_9ABC_DEF0


def deviation(actual, expected):
    scale = np.abs(expected).max() if np.size(expected) else 1.0
    return np.abs(actual - expected).max() / scale if np.size(expected) else 0.0


def both(spec, count, **options):
    cpu = kernel.run(spec, SEED, count, **options)
    return cpu, kernel.run(spec, SEED, count, backend="cuda", **options)


CASES = {
    "plain": ({}, {}),
    "lab frame": ({"lab": True}, {}),
    "odd steps": ({"steps": 61}, {}),
    "modulated": ({"sigma_kappa": 0.2, "steps": 50}, {}),
    "antithetic": ({"sigma_kappa": 0.2, "steps": 40}, {"antithetic": True}),
    "rates": ({"lab": True}, {"rates": True}),
    "chain": ({"rows": 1, "columns": 5}, {"baseline": True}),
    "one resonator": ({"rows": 1, "columns": 1}, {}),
    "no scores": ({}, {"scores": False}),
    "no noise": ({}, {"noise": False}),
    "Heun": ({"integrator": "heun", "steps": 41, "lab": True}, {"rates": True, "baseline": True}),
    "Heun, modulated": (
        {"integrator": "heun", "sigma_kappa": 0.2, "steps": 40},
        {"antithetic": True},
    ),
    "Heun, longer pieces": (
        {"integrator": "heun", "sigma_kappa": 0.2, "steps": 45, "dt": 1e-3},
        {},
    ),
    "Heun, no noise": ({"integrator": "heun", "steps": 20}, {"noise": False}),
}


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, ["float32", "float64"]))
def test_cuda_and_cpu_take_the_same_steps(device, case, dtype):
    network, options = CASES[case]
    spec = rectangle(**network)
    if options.get("baseline"):
        options = {**options, "baseline": np.linspace(0.02, 0, spec.steps + 1)}
    cpu, gpu = both(spec, 6, dtype=dtype, record_every=1, samples=True, **options)
    tolerance = 2e-5 if dtype == "float32" else 1e-11
    assert deviation(gpu.trajectories, cpu.trajectories) < tolerance
    assert deviation(gpu.returns, cpu.returns) < tolerance
    assert deviation(gpu.mean_return_to_go, cpu.mean_return_to_go) < tolerance
    for name, expected in (cpu.samples._asdict() if cpu.samples else {}).items():
        if expected is None:
            continue
        assert deviation(getattr(gpu.samples, name), expected) < tolerance, name
        for field in ("gradient", "stderr", "second_moment"):
            a, b = getattr(getattr(gpu, field), name), getattr(getattr(cpu, field), name)
            assert deviation(a, b) < 5 * tolerance, (field, name)


def test_any_degree(device):
    spec = rectangle(1, 12)
    bonds = np.stack([np.full(11, 3), np.delete(np.arange(12), 3)], 1)  # a star: degree 11
    cpu, gpu = both(
        spec.replace(bonds=bonds, kappa=np.linspace(0.5, 1.5, 11)), 4, dtype="float64", samples=True
    )
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


def test_the_order_in_which_bonds_are_given_is_of_the_noise(device):
    """What is kept of a graph between runs is not that of the same graph in another order."""
    spec = rectangle(2, 3, sigma_kappa=0.2, steps=20)
    turned = spec.replace(bonds=spec.bonds[::-1], kappa=spec.kappa[::-1])
    for network in (spec, turned, spec):
        cpu, gpu = both(network, 4, dtype="float64", samples=True)
        assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


def test_drives_ports_and_rates_of_one_graph_are_told_apart(device):
    spec = rectangle(2, 3, steps=20)
    driven, seen = (spec.drive_sites + 1) % 6, (spec.port_sites + 2) % 6
    louder = spec.replace(drive=1.5 * spec.drive, port_gain=0.5 * spec.port_gain)
    for network in (
        spec,
        spec.replace(drive_sites=driven),
        spec.replace(port_sites=seen),
        louder,
        spec,
    ):
        for rates in (False, True):
            cpu, gpu = both(network, 4, dtype="float64", samples=True, rates=rates)
            for name, expected in cpu.samples._asdict().items():
                if expected is not None:
                    assert deviation(getattr(gpu.samples, name), expected) < 1e-11, name


@pytest.mark.parametrize("baseline", ["none", "table", "binned", "twin"])
def test_a_second_run_of_the_same_shape_has_its_own_numbers(device, baseline):
    spec = rectangle(2, 3, lab=baseline == "table", sigma_kappa=0.1, steps=14)
    other = spec.replace(
        omega=spec.omega + 0.3,
        kappa=1.2 * spec.kappa,
        damping=1.1 * spec.damping,
        drive=1.5 * spec.drive,
        sigma_kappa=0.2,
    )
    table = np.linspace(0.02, 0, 15)
    run, options = {
        "none": (kernel.run, {}),
        "table": (kernel.run, {"baseline": table}),
        "binned": (kernel.run, {"baseline": Binned(3, 5)}),
        "twin": (run_twin, {"table": table}),
    }[baseline]
    run(spec, 5, 12, backend="cuda", dtype="float64", samples=True, **options)
    if baseline in ("table", "twin"):
        options = dict.fromkeys(options, 0.5 * table)
    gpu, cpu = (
        run(other, SEED, 12, backend=b, dtype="float64", samples=True, **options)
        for b in ("cuda", "cpu")
    )
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)) < 1e-10, name
    assert deviation(gpu.returns, cpu.returns) < 1e-11
    assert deviation(gpu.mean_return_to_go, cpu.mean_return_to_go) < 1e-11


def test_several_sites_a_thread(device):
    spec = rectangle(33, 33, steps=6)
    cpu, gpu = both(spec, 3, samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 2e-5


def test_several_sites_a_thread_with_heuns_step(device):
    spec = rectangle(33, 33, steps=5, integrator="heun")
    cpu, gpu = both(spec, 3, samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 2e-5
    assert deviation(gpu.samples.chi, cpu.samples.chi) < 2e-5


def make_scattered(rows, columns, **network):
    """As many bonds as a lattice, between any two sites, and one site with bonds to sites of
    every block.
    """
    spec = rectangle(rows, columns, **network)
    n, rng = rows * columns, np.random.default_rng(3)
    pairs = np.stack(np.triu_indices(n, 1), 1)
    pairs = pairs[(pairs[:, 0] == 40) | (pairs[:, 1] == 40) | (rng.random(len(pairs)) < 0.03)]
    pairs = pairs[rng.permutation(len(pairs))[: len(spec.bonds)]]
    return spec.replace(bonds=pairs, kappa=0.3 * rng.standard_normal(len(pairs)))


def chain(rows, columns, **network):
    """Blocks that are coupled to two others at most, so that the first could be far ahead of
    the last.
    """
    return rectangle(1, 2 * rows * columns, **network)


CLUSTERS = {  # network, options, and (blocks, sites a thread) of 80 sites or more
    "all in time": (
        rectangle,
        {"lab": True, "steps": 37},
        {"rates": True, "baseline": True},
        (3, 1),
    ),
    "modulated": (
        rectangle,
        {"sigma_kappa": 0.2, "steps": 40},
        {"antithetic": True, "rates": True},
        (3, 1),
    ),
    "several sites a thread": (rectangle, {"steps": 35}, {"baseline": True}, (2, 2)),
    "any graph": (make_scattered, {"sigma_kappa": 0.2, "steps": 20}, {}, (3, 1)),
    "chain": (chain, {"steps": 30}, {}, (5, 1)),
    "no scores": (rectangle, {"steps": 20}, {"scores": False}, (3, 1)),
    "Heun": (
        rectangle,
        {"integrator": "heun", "lab": True, "steps": 23},
        {"rates": True, "baseline": True},
        (3, 1),
    ),
    "Heun, modulated": (
        make_scattered,
        {"integrator": "heun", "sigma_kappa": 0.2, "steps": 20},
        {"antithetic": True},
        (2, 2),
    ),
    "Heun, no scores": (chain, {"integrator": "heun", "steps": 20}, {"scores": False}, (5, 1)),
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in CLUSTERS), ("modulated", "float32")]
)
def test_a_cluster_of_blocks_takes_the_steps_of_one(device, case, dtype, monkeypatch):
    make, network, options, spread = CLUSTERS[case]
    monkeypatch.setattr(cuda, "spread", lambda *_: spread)
    spec = make(8, 10, **network)
    ports = np.array(
        [79, 0] if options.get("rates") else [0, 0]
    )  # in both outer blocks, or two in one of them
    spec = spec.replace(port_sites=ports)
    if options.get("baseline"):
        options = {**options, "baseline": np.linspace(0.02, 0, spec.steps + 1)}
    cpu, gpu = both(spec, 6, dtype=dtype, record_every=1, samples=True, **options)
    tolerance = 2e-5 if dtype == "float32" else 1e-11
    for name in ("trajectories", "returns", "mean_return_to_go"):
        assert deviation(getattr(gpu, name), getattr(cpu, name)) < tolerance, name
    for name, expected in (cpu.samples._asdict() if cpu.samples else {}).items():
        if expected is not None:
            assert deviation(getattr(gpu.samples, name), expected) < tolerance, name


def test_a_block_has_no_more_sites_than_registers_hold():
    for item, most, block in [(4, 16, 1280), (4, 8, 1280), (8, 16, 512)]:
        for sites in (1, 1024, 1025, 1281, 2304, 4096, 6400, 8000, most * block):
            cluster, per = cuda.spread(sites, item, most)
            assert cluster <= most
            assert sites <= cluster * per * 1024
            assert cluster == 1 or sites <= cluster * block
            assert sites > 1024 or (cluster, per) == (1, 1)
        assert cuda.spread(10_000, item, 1) == (1, 10)  # a GPU without clusters
        assert cuda.spread(40_000, item, most)[0] == most


def test_a_gpu_without_room_for_the_cluster_takes_a_smaller_one(device, monkeypatch):
    if device == "gpu":
        pytest.skip("needs a device with few multiprocessors")
    sizes = []
    monkeypatch.setattr(cuda, "spread", lambda sites, item, most: (max(1, min(3, most // 4)), 1))
    monkeypatch.setattr(
        cuda, "resident_clusters", lambda kernel, layout, shared: sizes.append(layout.cluster) or 0
    )
    cpu, gpu = both(rectangle(8, 10, steps=4), 2, dtype="float64", samples=True)
    assert sizes == [3, 2]
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


@pytest.mark.parametrize("diverges", [0, 79])
def test_overflow_in_any_block_is_explained(device, diverges, monkeypatch):
    monkeypatch.setattr(cuda, "spread", lambda *_: (3, 1))
    spec = rectangle(8, 10, steps=400)
    spec = spec.replace(
        damping=spec.damping - 60.0 * (np.arange(80) == diverges), kappa=0 * spec.kappa
    )
    with pytest.raises(FloatingPointError, match=r"trajectory 8 .* after step \d+ "):
        kernel.run(spec, 0, 2, first_trajectory=8, backend="cuda", scores=False)


def test_trajectories_in_several_launches_and_several_waves(device, monkeypatch):
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 2000)
    spec = rectangle(steps=10)
    cpu, gpu = both(spec, 26, samples=True)
    assert deviation(gpu.samples.omega, cpu.samples.omega) < 2e-5
    assert deviation(gpu.gradient.kappa, cpu.gradient.kappa) < 2e-5


def test_modulation_in_global_memory_when_it_is_too_large_to_share(device, monkeypatch):
    attributes = {**cuda.require_cupy().cuda.Device().attributes}
    monkeypatch.setattr(
        fake_cupy._Device, "attributes", {**attributes, "MaxSharedMemoryPerMultiprocessor": 20_000}
    )
    if device == "gpu":
        pytest.skip("needs a device with little shared memory")
    spec = rectangle(sigma_kappa=0.2, steps=40)
    cpu, gpu = both(spec, 4, dtype="float64", samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


def test_overflow_is_explained(device):
    spec = rectangle(steps=400)
    with pytest.raises(FloatingPointError, match=r"trajectory 8 .* after step \d+ "):
        kernel.run(
            spec.replace(damping=spec.damping - 60.0), 0, 4, first_trajectory=8, backend="cuda"
        )


def test_the_reference_itself(device):
    spec = rectangle(sigma_kappa=0.1, steps=30)
    path = simulate(spec, SEED, 3)
    run = kernel.run(spec, SEED, 3, backend="cuda", dtype="float64", samples=True)
    assert deviation(run.samples.kappa, path.gradient()["kappa"]) < 1e-11


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_the_sources_compile_for_a_gpu_without_headers(tmp_path):
    spec = rectangle(11, 13, sigma_kappa=0.2)
    ensemble = KernelJob(spec, 0, 1000, KernelOptions(scores=False))
    layout = cuda.lay_out(make_plan(ensemble))
    binned = {
        "COLUMN_THREADS": 512,
        "EACH": 2,
        "KEEP": 1,
        "WEIGHTS_SHARED": 1,
        "Key": "u32",
        "KEY_MAX": "0xFFFFFFFFu",
        "MEMBERS": 2,
        "STEPS": 4,
        "ROW": 1024,
        "BIN_THREADS": 640,
        "BIN_BLOCKS": 2,
        "TOGETHER": 4,
        "REGION": "2592u",
        "REPLAY_BLOCKS": 2,
        "KEYS": 32,
        "SORT_THREADS": 32,
        "ALL_BONDS": len(spec.bonds),
        "ITEMS": spec.sites,
    }
    macros = [
        f"-D{k}={v}"
        for k, v in (*cuda.make_definitions(ensemble, layout, 8, True), *binned.items())
    ]
    text = read_sources(*cuda.SOURCES, *cuda_binned.SOURCES)
    assert "#include" not in text  # compiled at run time, where no header is found
    (tmp_path / "all.cu").write_text(text)
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-cubin",
        *macros,
        "-o",
        str(tmp_path / "all.cubin"),
        str(tmp_path / "all.cu"),
    ]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_registers_hold_the_sites_of_a_block(tmp_path):
    ensemble = KernelJob(rectangle(64, 64), 0, 1000, KernelOptions(), table=np.zeros(65))
    layout = cuda.lay_out(make_plan(ensemble), *cuda.spread(4096, 4, 16))
    macros = [f"-D{k}={v}" for k, v in cuda.make_definitions(ensemble, layout, 1, True)]
    (tmp_path / "all.cu").write_text(read_sources(*cuda.SOURCES))
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-cubin",
        "-Xptxas",
        "-v",
        *macros,
        "-o",
        str(tmp_path / "all.cubin"),
    ]
    output = subprocess.run(
        [*command, str(tmp_path / "all.cu")], check=True, capture_output=True, text=True
    ).stderr
    stack = re.search(r"one_pass.*?(\d+) bytes stack frame", output, re.S)
    assert int(stack.group(1)) <= 64  # of about 100 bytes of sums a thread


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_what_to_do():
    with pytest.raises((ImportError, RuntimeError), match="backend='cpu'"):
        kernel.run(rectangle(), 0, 2, backend="cuda")


BINNED = [
    (50, Binned(5, 1), {}),
    (50, Binned(5, 7), {"sigma_kappa": 0.2}),
    (40, Binned(30, 4), {}),  # many bins with a single member
    (2, Binned(), {}),
    (70, Binned(2, 5), {}),  # two members a lane
]


@pytest.mark.parametrize(("case", "dtype"), in_turn(BINNED, ["float64", "float32"]))
def test_binned_baseline_is_the_cpu_kernels(device, case, dtype):
    count, baseline, network = case
    spec = rectangle(2, 3, steps=15, **network)
    cpu, gpu = both(spec, count, baseline=baseline, dtype=dtype, samples=True)
    tolerance = 2e-4 if dtype == "float32" else 1e-10
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)) < tolerance, name
        assert deviation(getattr(gpu.stderr, name), getattr(cpu.stderr, name)) < 10 * tolerance, (
            name
        )


@pytest.mark.parametrize(
    ("network", "spread", "dtype"),
    [
        ({}, (3, 1), "float64"),
        ({"sigma_kappa": 0.2}, (2, 2), "float64"),
        ({"sigma_kappa": 0.2}, (5, 1), "float32"),
    ],
)
def test_binned_baseline_of_a_cluster_of_blocks(device, network, spread, dtype, monkeypatch):
    monkeypatch.setattr(cuda_binned, "spread_replay", lambda *_: spread)
    spec = rectangle(8, 10, steps=9, **network).replace(port_sites=np.array([79, 0]))
    cpu, gpu = both(spec, 21, baseline=Binned(3, 4), dtype=dtype, samples=True)
    tolerance = 2e-4 if dtype == "float32" else 1e-10
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)) < tolerance, name
    assert deviation(gpu.returns, cpu.returns) < tolerance


def test_binned_baseline_of_any_degree(device):
    """A star: one site has eight upper bonds, settled two by two."""
    bonds = np.stack([np.full(11, 3), np.delete(np.arange(12), 3)], 1)
    spec = rectangle(1, 12, steps=9).replace(bonds=bonds, kappa=np.linspace(0.5, 1.5, 11))
    cpu, gpu = both(spec, 30, baseline=Binned(3, 4), dtype="float64", samples=True)
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)) < 1e-10, name


@pytest.mark.parametrize("count", [33, 70, 150])
def test_bins_are_sorted_in_registers_and_through_shared_memory(device, count, monkeypatch):
    """With few keys per thread the sorting needs several warps."""
    monkeypatch.setattr(cuda_binned, "MAX_KEYS", 2)
    cpu, gpu = both(
        rectangle(1, 3, steps=6), count, baseline=Binned(4, 2), dtype="float64", samples=True
    )
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-10


@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no CuPy")
@pytest.mark.parametrize("baseline", [None, Binned()])
def test_a_run_repeats_itself_to_the_last_bit(baseline):
    spec = rectangle(3, 4, steps=300, sigma_kappa=0.1)
    a, b = (kernel.run(spec, SEED, 3000, backend="cuda", baseline=baseline) for _ in range(2))
    np.testing.assert_array_equal(a.mean_return_to_go, b.mean_return_to_go)
    np.testing.assert_array_equal(a.returns, b.returns)
    for name in ("omega", "kappa", "chi"):
        np.testing.assert_array_equal(getattr(a.gradient, name), getattr(b.gradient, name))
        np.testing.assert_array_equal(getattr(a.stderr, name), getattr(b.stderr, name))


@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no CuPy; too slow to emulate")
@pytest.mark.parametrize(
    "count", [400, 600, 5000]
)  # 600 in two bins: too many for the registers of a warp
def test_binned_baseline_of_large_ensembles(count):
    spec = rectangle(2, 3, steps=120)
    cpu, gpu = both(spec, count, baseline=Binned(2 if count < 1000 else 20, 50), samples=True)
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)) < 2e-4, name


def test_binned_baseline_with_weights_in_global_memory(device, monkeypatch):
    monkeypatch.setattr(cuda_binned, "SHARED_WEIGHTS", 0)
    monkeypatch.setattr(cuda_binned, "MAX_SLOTS", 3)
    cpu, gpu = both(
        rectangle(2, 2, steps=11), 30, baseline=Binned(4, 5), dtype="float64", samples=True
    )
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-10


@pytest.mark.parametrize(
    ("steps", "every", "slots"), [(100, 50, 16), (7, 1, 1), (33, 10, 4), (20, 7, 2), (5, 5, 1)]
)
def test_the_schedule_covers_every_step_and_stops_at_every_sorting(steps, every, slots):
    runs = cuda_binned.schedule_runs(steps, Binned(20, every), slots)
    assert [n for begin, end in runs for n in range(begin, end)] == list(range(steps))
    assert all(0 < end - begin <= slots for begin, end in runs)
    assert {begin for begin, _ in runs} >= set(range(0, steps, every))
