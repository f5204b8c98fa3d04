"""The CUDA kernels on a real GPU: their tests, and how long they take, beside those of another
tree.

python benchmarks/gpu_check.py [--package DIR] [--old TREE] [--out DIR]

--package: where this tree is installed; without it, it is built into a folder of its own, with the
tools that are there (pip install --no-build-isolation --no-deps). --old: a tree to compare with,
whose Python files are used as they lie. Writes tests.txt, times.json and README.md with one table.
Whole calls, the best of some, old and new in turn; a hash of returns and gradients says whether the
two agree to the bit. Needs a GPU, CuPy and JAX; takes five minutes."""

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/tcmt/test_kernel_cuda.py", "tests/tcmt/test_twin_cuda.py"]
STEPS = 20_000
ROUNDS = 2


def module(*names):
    """The first of these modules that the package has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("fluctua"):
                raise
    raise ModuleNotFoundError(f"none of {names}")


def only_kernels(package: Path) -> None:
    """Import the kernels without the rest of the library, whose dependencies may not be here."""
    for name in ("fluctua", "fluctua.tcmt"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(package / name.replace(".", "/"))]


def paper_lattice(spec_type, sigma_kappa):
    rows, columns, dt = 11, 13, 1e-3
    n = rows * columns
    index = np.arange(n).reshape(rows, columns)
    across = np.stack([index[:, :-1].ravel(), index[:, 1:].ravel()], 1)
    down = np.stack([index[:-1].ravel(), index[1:].ravel()], 1)
    rate = np.full(n, 0.02)
    rate[[0, -1]] += 1.0
    bonds = np.concatenate([across, down])
    return spec_type(
        omega=np.zeros(n),
        kappa=np.ones(len(bonds)),
        chi=1e-4 * np.random.default_rng(0).standard_normal(n),
        bonds=bonds,
        damping=rate,
        noise=0.5 * np.sqrt(2 * rate),
        dt=dt,
        steps=STEPS,
        drive_sites=np.array([0]),
        drive=np.array([10 * np.sqrt(2.0) + 0j]),
        port_sites=np.array([n - 1]),
        port_gain=np.array([np.sqrt(2.0)]),
        port_weight=np.array([1 / (100 * STEPS * dt)]),
        incoming=np.zeros(1, complex),
        sigma_kappa=sigma_kappa,
    )


def fingerprint(result) -> str:
    digest = hashlib.sha256()
    for array in (result.returns, *result.gradient[:3], *result.stderr[:3]):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def measure(package: Path) -> dict[str, list]:
    """Case -> [milliseconds, hash] of the package in this folder."""
    only_kernels(package)
    kernel = module("fluctua.tcmt.kernel.run", "fluctua.tcmt.kernel")
    run_twin = module("fluctua.tcmt.kernel.twin", "fluctua.tcmt.twin_kernel").run_twin
    options = module("fluctua.tcmt.kernel.options", "fluctua.tcmt.spec")
    binned = getattr(kernel, "Binned", None) or options.Binned
    rows, table = {}, np.linspace(0.2, 0.0, STEPS + 1)
    for sigma in (0.0, 0.2):
        spec = paper_lattice(options.KernelSpec, sigma)
        calls = {
            "time-only": lambda n, s=spec: kernel.run(s, 0, n, baseline=table, backend="cuda"),
            "binned": lambda n, s=spec: kernel.run(
                s, 0, n, baseline=binned(20, 100), backend="cuda"
            ),
            "twin": lambda n, s=spec: run_twin(s, 0, n, table=0 * table, backend="cuda"),
        }
        if sigma == 0:
            calls["twin, rank 16"] = lambda n, s=spec: run_twin(
                s, 0, n, rank=16, table=0 * table, backend="cuda"
            )
        for name, call in calls.items():
            for count in (1000, 20_000):
                if count > 1000 and (sigma or "rank" in name):
                    continue
                hash_, best = fingerprint(call(count)), np.inf  # compiles
                for _ in range(5 if count == 1000 else 2):
                    begin = time.perf_counter()
                    call(count)
                    best = min(best, time.perf_counter() - begin)
                rows[f"{name} | {sigma:g} | {count:,}"] = [1e3 * best, hash_]
                print(
                    f"{name:16} σ_κ = {sigma:g} {count:6} {1e3 * best:9.1f} ms  {hash_}",
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def measured_in_turn(packages: dict[str, Path]) -> dict[str, dict[str, list]]:
    """The same in a process of its own for each package, some times over; the best of all."""
    times: dict[str, dict[str, list]] = {name: {} for name in packages}
    for _ in range(ROUNDS):
        for name, package in packages.items():
            command = [sys.executable, __file__, "--measure", str(package)]
            env = {**os.environ, "PYTHONPATH": str(package)}
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"the {name} tree could not be measured", flush=True)
                continue
            for case, (ms, hash_) in json.loads(done.stdout).items():
                best = min(ms, times[name].get(case, [np.inf])[0])
                times[name][case] = [best, hash_]
    return times


def run_tests(package: Path, out: Path) -> str:
    """The last line of the tests' output."""
    if importlib.util.find_spec("pytest") is None:
        command = [sys.executable, "benchmarks/kernel_cuda_check.py", "--checks"]
    else:
        chosen = "gpu or repeats or large or papers or compile"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            chosen,
            *TESTS,
        ]
    env = {**os.environ, "PYTHONPATH": str(package)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode() + "\nstopped after 240 s"
    (out / "tests.txt").write_text(text)
    print(text[-3000:], flush=True)
    return text.strip().splitlines()[-1]


def table(times: dict[str, dict[str, list]], tests: str) -> str:
    new, old = times["new"], times.get("old", {})
    lines = [
        f"The paper's lattice, {STEPS:,} steps, whole calls, the best of {ROUNDS} × 5 (2 for "
        "20,000 trajectories).",
        "`python benchmarks/gpu_check.py` makes this table.",
        "",
        "| baseline | σ_κ | trajectories | before | after | same bits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, (ms, hash_) in new.items():
        before = f"{old[case][0]:.1f} ms" if case in old else "–"
        same = ("yes" if old[case][1] == hash_ else "no") if case in old else "–"
        lines.append(f"| {case} | {before} | {ms:.1f} ms | {same} |")
    return "\n".join([*lines, "", f"Tests on the GPU: {tests.strip('= ')}", ""])


def is_installed(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--target",
    ]
    subprocess.run([*command, str(folder), str(ROOT)], check=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path)
    parser.add_argument("--old", type=Path, metavar="TREE")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        sys.exit()
    given.out.mkdir(parents=True, exist_ok=True)
    package = given.package or is_installed(Path(tempfile.mkdtemp(prefix="fluctua-")))
    packages = {"new": package.resolve()}
    if given.old:
        packages["old"] = (given.old / "src").resolve()
    found = measured_in_turn(packages)
    (given.out / "times.json").write_text(json.dumps(found, indent=1))
    (given.out / "README.md").write_text(table(found, "not run yet"))
    tests = run_tests(package.resolve(), given.out)
    text = table(found, tests)
    (given.out / "README.md").write_text(text)
    print(text)
