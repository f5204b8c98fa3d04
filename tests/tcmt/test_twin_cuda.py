"""The twin correction on CUDA against the CPU kernel, on a GPU where there is one and emulated
everywhere.
"""

import shutil
import subprocess

import numpy as np
import pytest

from cuda_device import has_gpu
from fluctua.tcmt.kernel import cuda, cuda_twin
from fluctua.tcmt.kernel.layout import make_plan, read_sources
from fluctua.tcmt.kernel.options import KernelJob, KernelOptions
from fluctua.tcmt.kernel.twin import run_twin
from heun_reference import corrected_heun
from in_turn import in_turn
from kernel_reference import rectangle
from twin_cases import CASES, FAMILIES, SEED, deviation, problem, wrong
from twin_reference import correct

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, ["float32", "float64"]))
def test_every_part_of_every_family_is_the_references(device, case, dtype):
    spec, options, count, reference = problem(case)
    families = FAMILIES
    if case == "one resonator":  # two ports on one site: no rates on the GPU
        options, families = {**options, "rates": False}, ("omega", "chi")
    run = run_twin(spec, SEED, count, dtype=dtype, backend="cuda", **options)
    tolerance = 3e-5 if dtype == "float32" else 1e-11
    plain = reference.path.gradient() | {"gain": reference.direct["gain"]}
    assert deviation(run.returns, reference.returns) < tolerance
    assert (
        deviation(run.mean_lambda[1:], reference.lam.mean(0)[1:], reference.returns.max())
        < tolerance
    )
    assert deviation(run.mean_return_to_go[0], reference.returns.mean()) < tolerance
    for name in families:
        scale = np.abs(plain[name]).max(initial=0.0)
        direct, correction = (
            getattr(run.direct_samples, name),
            getattr(run.correction_samples, name),
        )
        assert deviation(direct, reference.direct[name]) < tolerance, name
        assert deviation(correction, reference.correction[name], scale) < tolerance, name
        total = reference.direct[name] + reference.correction[name]
        assert deviation(getattr(run.gradient, name), total.mean(0), scale) < tolerance, name
        assert (
            deviation(getattr(run.correction, name), reference.correction[name].mean(0), scale)
            < tolerance
        ), name


def both(spec, count, **options):
    """The CPU kernel's result and the GPU's."""
    return tuple(
        run_twin(spec, SEED, count, backend=b, samples=True, **options) for b in ("cpu", "cuda")
    )


def assert_same(gpu, cpu, tolerance):
    for name in ("omega", "kappa", "chi"):
        for part in ("direct_samples", "correction_samples", "stderr", "second_moment"):
            actual, expected = (getattr(getattr(run, part), name) for run in (gpu, cpu))
            assert deviation(actual, expected) < tolerance, (part, name)


def test_the_default_table_and_several_sites_a_thread(device):
    cpu, gpu = both(rectangle(33, 33, steps=6), 2, dtype="float64", rank=2, segment=4)
    assert_same(gpu, cpu, 1e-9)
    np.testing.assert_allclose(gpu.table, cpu.table, rtol=1e-9)


LARGE = {  # network, options, and (blocks, sites per thread) of 80 sites
    "shared by all": ({"lab": True, "steps": 23}, {"rates": True}, (3, 1)),
    "several sites per thread": ({"steps": 22}, {}, (2, 2)),
    "own modulation": (
        {"sigma_kappa": 0.2, "steps": 21},
        {"antithetic": True, "rates": True},
        (3, 1),
    ),
    "quadratic": ({"steps": 19}, {"rank": 5, "segment": 7}, (5, 1)),
    "two steps": ({"steps": 2}, {}, (3, 1)),
    "Heun": ({"integrator": "heun", "lab": True, "steps": 15}, {"rates": True}, (3, 1)),
    "Heun, own modulation": (
        {"integrator": "heun", "sigma_kappa": 0.2, "steps": 14},
        {"antithetic": True},
        (2, 2),
    ),
    "Heun, quadratic": ({"integrator": "heun", "steps": 13}, {"rank": 3, "segment": 5}, (3, 1)),
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in LARGE), ("Heun", "float32")]
)
def test_a_cluster_of_blocks_sums_what_the_cpu_does(device, case, dtype, monkeypatch):
    network, options, spread = LARGE[case]
    monkeypatch.setattr(cuda_twin, "spread_with_twin", lambda *_: spread)
    spec = rectangle(8, 10, **network)
    spec = spec.replace(port_sites=np.array([79, 0]))  # in both outer blocks
    table = np.linspace(3e-3, 0, spec.steps + 1)
    cpu, gpu = both(spec, 6, dtype=dtype, twin=wrong(spec), table=table, **options)
    tolerance = 1e-9 if dtype == "float64" else 1e-3
    assert_same(gpu, cpu, tolerance)
    assert deviation(gpu.returns, cpu.returns) < tolerance
    assert deviation(gpu.mean_return_to_go, cpu.mean_return_to_go) < tolerance
    assert deviation(gpu.mean_lambda, cpu.mean_lambda, np.abs(cpu.returns).max()) < tolerance
    if options.get("rates"):
        for name in ("damping", "log_diffusion", "drive", "gain"):
            expected = getattr(cpu.gradient, name)
            assert deviation(getattr(gpu.gradient, name), expected) < tolerance, name


@pytest.mark.parametrize("integrator", ["euler", "heun"])
def test_a_block_far_from_the_port_is_not_ahead_of_it(device, integrator, monkeypatch):
    """A chain of five blocks, the last with the port: the first could be four steps ahead."""
    monkeypatch.setattr(cuda_twin, "spread_with_twin", lambda *_: (5, 1))
    spec = rectangle(1, 160, steps=24, integrator=integrator)
    spec = spec.replace(port_sites=np.array([159, 159]))
    cpu, gpu = both(spec, 4, dtype="float64", table=np.linspace(3e-3, 0, spec.steps + 1))
    assert_same(gpu, cpu, 1e-9)


def test_blocks_of_the_twin_have_no_more_sites_than_threads():
    for item, block in [(4, 512), (8, 256)]:
        for sites in (1, 143, block, block + 1, 4096, 10_000, 16 * block):
            cluster, per = cuda_twin.spread_with_twin(sites, item, 16)
            assert sites <= cluster * per * 1024
            assert (cluster == 1) == (sites <= block)
        assert cuda_twin.spread_with_twin(10_000, item, 1) == (1, 10)  # a GPU without clusters


HEUN = {
    "a drive that changes in time": ({"lab": True}, {}),
    "in segments": ({"steps": 37}, {"segment": 7}),
    "modulated": ({"sigma_kappa": 0.2, "steps": 41, "lab": True}, {"segment": 8}),
    "modulated, longer pieces, antithetic": (
        {"sigma_kappa": 0.2, "dt": 2e-3},
        {"antithetic": True},
    ),
    "knows no modulation": ({"sigma_kappa": 0.2}, {"knows_modulation": False}),
}


@pytest.mark.parametrize(("case", "dtype"), in_turn(HEUN, ["float32", "float64"]))
def test_heuns_step_is_that_of_the_reference(device, case, dtype):
    network, options = HEUN[case]
    spec = rectangle(**{"steps": 40, "dt": 0.02, **network}, integrator="heun")
    spec = spec.replace(
        chi=20 * spec.chi
    )  # 2χ|ψ|² turns a state by a fraction of a radian per step
    twin = spec.replace(omega=1.05 * spec.omega + 0.01, kappa=0.95 * spec.kappa, chi=1.2 * spec.chi)
    table = np.linspace(0.3, 0.1, spec.steps + 1)
    reference = corrected_heun(
        spec,
        SEED,
        18,
        table,
        twin=twin,
        antithetic=options.get("antithetic", False),
        knows=options.get("knows_modulation", True),
    )
    run = run_twin(
        spec,
        SEED,
        18,
        twin=twin,
        table=table,
        rates=True,
        samples=True,
        dtype=dtype,
        backend="cuda",
        **options,
    )
    tolerance = 3e-5 if dtype == "float32" else 1e-9
    returns = reference.path.rewards.sum(1)
    assert deviation(run.returns, returns) < tolerance
    assert deviation(run.mean_lambda, reference.lam.mean(0), np.abs(returns).max()) < tolerance
    plain = reference.path.gradient() | {"gain": reference.direct["gain"]}
    for name, expected in reference.direct.items():
        scale = np.abs(plain[name]).max()
        direct = getattr(run.direct_samples, name)
        correction = getattr(run.correction_samples, name)
        assert deviation(direct, expected, np.abs(expected).max() or 1.0) < tolerance, name
        assert deviation(correction, reference.correction[name], scale) < tolerance, name


def test_any_degree(device):
    bonds = np.stack([np.full(11, 3), np.delete(np.arange(12), 3)], 1)  # a star: degree 11
    spec = rectangle(1, 12).replace(bonds=bonds, kappa=np.linspace(0.5, 1.5, 11))
    assert_same(*reversed(both(spec, 4, dtype="float64")), 1e-9)


@pytest.mark.parametrize("network", [{}, {"sigma_kappa": 0.2}])
def test_trajectories_in_several_launches_and_several_waves(device, network, monkeypatch):
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(cuda_twin, "MAX_PATH_BYTES", 150_000)  # a few blocks at a time
    cpu, gpu = both(rectangle(steps=21, **network), 26, dtype="float64", rank=0 if network else 4)
    assert_same(gpu, cpu, 1e-9)
    np.testing.assert_allclose(gpu.mean_lambda[1:], cpu.mean_lambda[1:], atol=1e-12)


def test_overflow_of_the_network_and_of_the_twin_are_told_apart(device):
    spec = rectangle(2, 2, steps=300, dt=0.02)
    gain, table = spec.replace(damping=spec.damping - 800.0), np.zeros(301)
    with pytest.raises(FloatingPointError, match=r"trajectory 8 .* after step \d+ "):
        run_twin(gain, 0, 4, twin=spec, first_trajectory=8, backend="cuda", table=table)
    for sigma in (0.0, 0.1):
        with pytest.raises(FloatingPointError, match="the twin's noise-free path"):
            run_twin(spec.replace(sigma_kappa=sigma), 0, 2, twin=gain, backend="cuda", table=table)


def test_what_only_the_cpu_can_do_names_it(device):
    spec = rectangle(steps=8)
    with pytest.raises(ValueError, match=r"`drive` varies in time.*backend='cpu'"):
        run_twin(spec, 0, 2, twin=spec.replace(drive=np.tile(spec.drive, (8, 1))), backend="cuda")
    twice = spec.replace(port_sites=np.array([0, 0]))
    with pytest.raises(ValueError, match=r"distinct sites. Use backend='cpu'"):
        run_twin(twice, 0, 2, rates=True, backend="cuda")
    cpu, gpu = both(twice, 3, dtype="float64")  # without rates it is no matter
    assert_same(gpu, cpu, 1e-9)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize(("sigma", "rank", "dtype"), [(0.2, 0, "float64"), (0.0, 16, "float32")])
def test_the_source_compiles_for_a_gpu_without_headers(sigma, rank, dtype, tmp_path):
    spec = rectangle(11, 13, sigma_kappa=sigma)
    ensemble = KernelJob(
        spec, 0, 1000, KernelOptions(dtype=dtype, rates=sigma > 0), table=np.zeros(65)
    )
    layout = cuda.lay_out(make_plan(ensemble))
    twin = {
        "RANK": rank,
        "OWN": int(sigma > 0),
        "TWIN_HARMONICS": spec.waves,
        "TWIN_AT": "9984u",
        "TWIN_BLOCKS": 3,
    }
    macros = [
        f"-D{k}={v}" for k, v in (*cuda.make_definitions(ensemble, layout, 8, True), *twin.items())
    ]
    text = read_sources(*cuda.SOURCES, *cuda_twin.SOURCES)
    assert "#include" not in text
    (tmp_path / "all.cu").write_text(text)
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-cubin",
        *macros,
        "-o",
        str(tmp_path / "all.cubin"),
    ]
    subprocess.run([*command, str(tmp_path / "all.cu")], check=True, capture_output=True)


@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no CuPy")
@pytest.mark.parametrize(
    ("network", "options"), [({}, {}), ({"sigma_kappa": 0.1}, {}), ({}, {"rank": 6})]
)
def test_a_run_repeats_itself_to_the_last_bit(network, options):
    spec = rectangle(3, 4, steps=300, **network)
    a, b = (
        run_twin(spec, SEED, 3000, twin=wrong(spec), backend="cuda", **options) for _ in range(2)
    )
    np.testing.assert_array_equal(a.mean_lambda, b.mean_lambda)
    np.testing.assert_array_equal(a.returns, b.returns)
    for name in ("omega", "kappa", "chi"):
        np.testing.assert_array_equal(getattr(a.gradient, name), getattr(b.gradient, name))
        np.testing.assert_array_equal(
            getattr(a.correction_stderr, name), getattr(b.correction_stderr, name)
        )


@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no CuPy; too slow to emulate")
@pytest.mark.parametrize(
    ("network", "options"), [({}, {}), ({"sigma_kappa": 0.2}, {}), ({}, {"rank": 16})]
)
def test_the_papers_lattice(network, options):
    spec = rectangle(11, 13, steps=2000, dt=1e-3, **network)
    cpu, gpu = both(spec, 64, **options)
    plain = correct(spec, SEED, 2, np.zeros(2001)).path.gradient()
    for name in ("omega", "kappa", "chi"):
        scale = np.abs(plain[name]).max()
        assert (
            deviation(getattr(gpu.direct_samples, name), getattr(cpu.direct_samples, name)) < 1e-4
        ), name
        actual, expected = (getattr(run.correction_samples, name) for run in (gpu, cpu))
        assert deviation(actual, expected, scale) < 1e-4, name
