"""Fluctua: train stochastic physical systems from their own fluctuations.

`simulator`, `ppgt` and `gradient` estimate; `Training` describes a training,
`train`, `run` and `evaluate` do it. Baselines, scores,
filters, integrators, optimisers and reference estimators are in the namespaces of these names.
"""

import ast as _ast
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported when first used, by `__getattr__`: the command line starts without JAX
    from fluctua.compiled.backend import simulator
    from fluctua.core import baselines, integrators, scores
    from fluctua.core.baselines import Twin
    from fluctua.core.draws import Density, Reparameterised
    from fluctua.core.estimate import Estimate, Samples, function_of_means, reduce_samples
    from fluctua.core.estimation.recorded_returns import returns
    from fluctua.core.estimator import gradient, gradient_samples, mean_return_to_go, ppgt
    from fluctua.core.likelihood.guard import DoubtError
    from fluctua.core.objective import Objective
    from fluctua.core.process import NoiseProduct, Process
    from fluctua.core.theorem import returns_to_go
    from fluctua.core.trajectories import Trajectories
    from fluctua.learn import optimisers, reference
    from fluctua.learn.evaluate import evaluate, evaluate_many
    from fluctua.learn.fisher_information import fisher
    from fluctua.learn.natural import natural
    from fluctua.learn.reuse import reweighted
    from fluctua.learn.self_calibrating import SelfCalibrating
    from fluctua.learn.shrunk_correction import ShrunkCorrection
    from fluctua.learn.training import Training, train
    from fluctua.processes import filters, response
    from fluctua.processes.chain import Chain
    from fluctua.processes.jumps import Jumps, RandomJump, bin_events
    from fluctua.processes.observed import Normal, Observed
    from fluctua.processes.stationary import stationary
    from fluctua.scale.distributed import distributed
    from fluctua.store.runner import run

__version__ = _version("fluctua")

__all__ = [
    "Chain",
    "Density",
    "DoubtError",
    "Estimate",
    "Jumps",
    "NoiseProduct",
    "Normal",
    "Objective",
    "Observed",
    "Process",
    "RandomJump",
    "Reparameterised",
    "Samples",
    "SelfCalibrating",
    "ShrunkCorrection",
    "Training",
    "Trajectories",
    "Twin",
    "baselines",
    "bin_events",
    "distributed",
    "evaluate",
    "evaluate_many",
    "filters",
    "fisher",
    "function_of_means",
    "gradient",
    "gradient_samples",
    "integrators",
    "mean_return_to_go",
    "natural",
    "optimisers",
    "ppgt",
    "reduce_samples",
    "reference",
    "response",
    "returns",
    "returns_to_go",
    "reweighted",
    "run",
    "scores",
    "simulator",
    "stationary",
    "train",
]


def __dir__() -> list[str]:
    """The public names and the sub-packages that are loaded."""
    rooms = [
        name
        for name, value in globals().items()
        if getattr(value, "__package__", None) == f"fluctua.{name}"
    ]
    return sorted({*__all__, *rooms, "__all__", "__doc__", "__version__"})


def _find_homes() -> dict[str, str]:
    """Module of each public name, from the import statements above."""
    tree = _ast.parse(_Path(__file__).read_text(encoding="utf-8"))
    nodes = [node for node in _ast.walk(tree) if isinstance(node, _ast.ImportFrom)]
    return {name.name: str(node.module) for node in nodes for name in node.names}


_HOMES = _find_homes()


def __getattr__(name: str) -> Any:
    """Import a public name or a sub-package when it is first used."""
    home = _HOMES.get(name, "") if name in __all__ else ""
    if home:
        module = _import_module(home)
        value = getattr(module, name, None)
        if value is None:
            value = _import_module(f"{home}.{name}")
    elif not name.startswith("_") and _find_spec(f"fluctua.{name}") is not None:
        value = _import_module(f"fluctua.{name}")
    else:
        raise AttributeError(f"module 'fluctua' has no attribute {name!r}")
    globals()[name] = value
    return value
