"""Fingerprints of the numbers that must stay the same to the bit: kernels on the CPU and emulated
CUDA, and JAX.

python benchmarks/bits.py [--tree PATH] [--json FILE]      a hash per case of the installed package
python benchmarks/bits.py --gpu float32 [--json FILE]      of the kernels on a GPU
python benchmarks/bits.py --compare BEFORE AFTER --csv FILE   two such files side by side

On a GPU there are 3,000 trajectories of two networks.

A hash is of returns, gradient, error and second moment. Rounding depends on the processor (which
instructions it has, and how XLA compiles for it), so two columns are comparable only if both were
made on one machine. --tree: where the tests' helpers are, the emulated device among them; the tree
of the package that is installed."""

import argparse
import csv
import hashlib
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SEED = 0x1234_5678_9ABC_DEF0


def module(*names):
    """The first of these modules that the installed package has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise ModuleNotFoundError(f"none of {names}")


def fingerprint(tree) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:12]


def hash_kernel(result) -> str:
    parts = [
        result.returns,
        result.gradient,
        result.stderr,
        result.second_moment,
        result.mean_return_to_go,
    ]
    parts += [
        getattr(result, name, None) for name in ("direct", "correction", "mean_lambda", "samples")
    ]
    return fingerprint([tuple(p) if isinstance(p, tuple) else p for p in parts if p is not None])


def networks(rectangle):
    return {
        "plain": rectangle(steps=61),
        "modulated": rectangle(sigma_kappa=0.2, steps=50),
        "lab frame": rectangle(lab=True, steps=40),
        "a star": star(rectangle(1, 12)),
    }


def star(spec):
    """One site with eleven neighbours."""
    replace = getattr(spec, "replace", None) or spec._replace
    bonds = np.stack([np.full(11, 3), np.delete(np.arange(12), 3)], 1)
    return replace(bonds=bonds, kappa=np.linspace(0.5, 1.5, 11))


def wrong(spec):
    replace = getattr(spec, "replace", None) or spec._replace
    return replace(
        omega=1.05 * spec.omega + 0.01,
        kappa=0.95 * spec.kappa,
        chi=1.2 * spec.chi,
        drive=1.03 * spec.drive,
    )


def kernel_cases(spec, binned):
    """Name -> (whether it is the twin correction, options)."""
    table = np.linspace(0.02, 0, spec.steps + 1)
    modulated = spec.sigma_kappa > 0
    cases = {
        "none": (False, {}),
        "time, rates": (False, {"baseline": table, "rates": True}),
        "time, antithetic": (False, {"baseline": table, "antithetic": True}),
        "binned(5, 7)": (False, {"baseline": binned(5, 7)}),
        "binned(30, 1)": (False, {"baseline": binned(30, 1)}),
        "twin": (True, {}),
        "wrong twin, rates": (True, {"twin": wrong(spec), "table": table, "rates": True}),
        "twin in segments": (True, {"segment": 10, "antithetic": True}),
        "twin of rank 5": (True, {"rank": 5, "segment": 7, "knows_modulation": False}),
    }
    if modulated:
        cases["twin without modulation"] = (True, {"knows_modulation": False})
    return cases


def hash_kernels(rows, tree, device):
    """device: "cpu", "emulated", or the precision on a GPU."""
    kernel = module("fluctua.tcmt.kernel.run", "fluctua.tcmt.kernel")
    run_twin = module("fluctua.tcmt.kernel.twin", "fluctua.tcmt.twin_kernel").run_twin
    native = module("fluctua.tcmt.native._native", "fluctua._native")
    sys.path[:0] = [str(tree / "tests" / "support"), str(tree / "tests")]
    rectangle = importlib.import_module("kernel_reference").rectangle
    cupy = importlib.import_module("fake_cupy")
    binned = getattr(kernel, "Binned", None) or module("fluctua.tcmt.kernel.options").Binned
    networks_, precisions = networks(rectangle), ("float32", "float64")
    if device == "emulated":
        places = [("CUDA, emulated", {"backend": "cuda"}, 10)]
        sys.modules["cupy"] = cupy
    elif device in precisions:
        places, precisions = [("CUDA", {"backend": "cuda"}, 3000)], (device,)
        networks_ = {
            name: networks_[name] for name in ("plain", "modulated")
        }  # each case compiles for a second or two
    else:
        places = [(engine, {"engine": engine}, 38) for engine in native.engines()]
    for place, where, count in places:
        for dtype in precisions:
            for network, spec in networks_.items():
                for name, (is_twin, options) in kernel_cases(spec, binned).items():
                    if (
                        place.startswith("CUDA")
                        and network == "a star"
                        and "binned" not in name
                        and name != "twin"
                    ):
                        continue
                    run = run_twin if is_twin else kernel.run
                    result = run(spec, SEED, count, dtype=dtype, samples=True, **where, **options)
                    rows[f"{place} | {dtype} | {network}, {name}"] = hash_kernel(result)
    sys.modules.pop("cupy", None)


def hash_jax(rows):
    import fluctua as fl

    process = fl.Process(
        lambda theta, x: -theta["k"] * x - theta["c"] * x**3,
        lambda theta, x: theta["s"] * jnp.ones_like(x),
    )
    objective = fl.Objective(
        running=lambda theta, x: -jnp.sum(x**2), terminal=lambda theta, x: x[0]
    )
    theta = {"k": jnp.array([1.0, 0.7]), "c": jnp.array(0.1), "s": jnp.array([0.5, 0.6])}
    simulate = fl.simulator(process, jnp.array([0.3, -0.2]), np.linspace(0.0, 1.0, 41))

    def condition(theta, x):
        return {"k": x**2, "c": jnp.sum(x**2), "s": x**2}

    baselines = {
        "none": fl.baselines.none(),
        "mean": fl.baselines.mean(),
        "optimal": fl.baselines.optimal(),
        "time": fl.baselines.time_only(),
        "binned": fl.baselines.binned(condition, bins=5),
        "twin": fl.Twin(),
        "wrong twin": fl.Twin(theta=lambda th: {**th, "k": 0.8 * th["k"]}),
        "twin of order 2": fl.Twin(order=2),
    }
    paths = simulate(jax.random.key(1), theta, 64)
    for name, baseline in baselines.items():
        estimate = fl.ppgt(simulate, objective, baseline=baseline)(jax.random.key(2), theta, 64)
        rows[f"JAX, ppgt | {theta['k'].dtype} | {name}"] = fingerprint(
            [estimate.gradient, estimate.stderr, estimate.second_moment, estimate.value]
        )
        if name == "time":
            baseline = fl.baselines.time_only(jnp.linspace(-0.3, 0.3, 41))
        estimate = fl.gradient(process, objective, theta, paths, baseline=baseline)
        rows[f"JAX, gradient | {theta['k'].dtype} | {name}"] = fingerprint(
            [estimate.gradient, estimate.stderr, estimate.second_moment, estimate.value]
        )


def hash_tasks(rows):
    from fluctua import tcmt

    binned = module("fluctua.tcmt.kernel.options", "fluctua.tcmt.kernel").Binned
    for sigma in (0.0, 0.2):
        task = tcmt.isolation(tcmt.rectangular(2, 3), horizon=0.3, dt=5e-3, sigma_kappa=sigma)
        theta = tcmt.initial_parameters(
            jax.random.key(1), task.network, train=tcmt.network.FAMILIES
        )
        for backend in ("jax", "cpu"):
            for baseline in ("none", "time", "binned", "twin"):
                chosen, plan = theta, baseline
                if baseline == "binned" and backend == "cpu":
                    chosen, plan = (
                        {name: theta[name] for name in ("omega", "kappa", "chi")},
                        binned(20, 100),
                    )
                estimate = task.estimator(backend, baseline=plan)(jax.random.key(3), chosen, 48)
                rows[f"task, {backend} | {theta['kappa'].dtype} | σ_κ = {sigma:g}, {baseline}"] = (
                    fingerprint(
                        [estimate.gradient, estimate.stderr, estimate.second_moment, estimate.value]
                    )
                )


class Rows(dict):
    """Rows that are shown, and kept in a file, as they come: the emulation takes minutes."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def __setitem__(self, case, hash_):
        super().__setitem__(case, hash_)
        print(f"{hash_}  {case}", flush=True)
        if self.file:
            self.file.write_text(json.dumps(self, indent=0))


def measure(tree: Path, file: Path | None) -> None:
    rows = Rows(file)
    hash_kernels(rows, tree, "cpu")
    for double in (False, True):
        with jax.enable_x64(double):
            hash_jax(rows)
            hash_tasks(rows)
    hash_kernels(rows, tree, "emulated")


def compare(before: dict[str, str], after: dict[str, str], file: Path | None) -> str:
    """A sentence on how many cases agree; both columns go into a CSV file."""
    cases = sorted({*before, *after})
    if file:
        with file.open("w", newline="") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(["where", "precision", "case", "before", "after"])
            for case in cases:
                table.writerow([*case.split(" | "), before.get(case, ""), after.get(case, "")])
    differing = [case for case in cases if before.get(case) != after.get(case)]
    verdict = f"{len(cases) - len(differing)} of {len(cases)} cases are the same to the bit."
    return "\n".join([verdict, *(f"differs: {case}" for case in differing)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpu", choices=["float32", "float64"])
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--csv", type=Path, help="where --compare writes both columns")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.compare)
        print(compare(before, after, options.csv))
    elif options.gpu:
        hash_kernels(Rows(options.json), options.tree, options.gpu)
    else:
        measure(options.tree, options.json)
