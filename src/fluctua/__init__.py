"""Fluctua: train stochastic physical systems from their own fluctuations."""

from importlib.metadata import version as _version

from fluctua.compiled.backend import simulator
from fluctua.core.baselines import Baseline, Kick, Twin, binned, carried, mean, none, optimal, time_only
from fluctua.core.draws import Density, Reparameterised, Wiener
from fluctua.core.estimate import Samples, of_means, reduce_samples
from fluctua.core.ppgt import gradient, mean_return_to_go, ppgt, samples_of
from fluctua.core.scores import drift_score, full_score, local_linear_score, residual
from fluctua.core.steps import Exponential, trapezoidal
from fluctua.core.sweep import returns_to_go
from fluctua.core.twin import TwinSamples
from fluctua.core.types import (
    Estimate,
    Estimator,
    Groups,
    NoiseProduct,
    Objective,
    OfMeans,
    Process,
    Score,
    Step,
    Substrate,
    Trajectories,
    Variances,
)
from fluctua.learn.belief import Calibration
from fluctua.learn.calibrated import Calibrated
from fluctua.learn.environment import feedback_environment, settings_environment
from fluctua.learn.evaluate import Evaluation, evaluate
from fluctua.learn.natural import Fisher, Natural, fisher, kl_ascent, natural
from fluctua.learn.optimise import rms_ascent
from fluctua.learn.reuse import Clip, Reweighted, reweighted
from fluctua.learn.train import Record, box, train
from fluctua.learn.weighted import Certificate, Weighted
from fluctua.learn.yardsticks import Comparison, compare, finite_differences, pathwise, spsa
from fluctua.processes.augmented import (
    Coloured,
    Filter,
    Filtered,
    coloured,
    filtered,
    linear_filter,
    lock_in,
    low_pass,
    moving_average,
)
from fluctua.processes.jumps import Events, Jumps, Sized, events_on
from fluctua.processes.observed import Normal, Observed
from fluctua.processes.stationary import Stationary, stationary
from fluctua.scale.distributed import Distributed, distributed
from fluctua.store.training import resume, run

__version__ = _version("fluctua")

__all__ = [
    "Baseline",
    "Calibrated",
    "Calibration",
    "Certificate",
    "Clip",
    "Coloured",
    "Comparison",
    "Density",
    "Distributed",
    "Estimate",
    "Estimator",
    "Evaluation",
    "Events",
    "Exponential",
    "Filter",
    "Filtered",
    "Fisher",
    "Groups",
    "Jumps",
    "Kick",
    "Natural",
    "NoiseProduct",
    "Normal",
    "Objective",
    "Observed",
    "OfMeans",
    "Process",
    "Record",
    "Reparameterised",
    "Reweighted",
    "Samples",
    "Score",
    "Sized",
    "Stationary",
    "Step",
    "Substrate",
    "Trajectories",
    "Twin",
    "TwinSamples",
    "Variances",
    "Weighted",
    "Wiener",
    "binned",
    "box",
    "carried",
    "coloured",
    "compare",
    "distributed",
    "drift_score",
    "evaluate",
    "events_on",
    "feedback_environment",
    "filtered",
    "finite_differences",
    "fisher",
    "full_score",
    "gradient",
    "kl_ascent",
    "linear_filter",
    "local_linear_score",
    "lock_in",
    "low_pass",
    "mean",
    "mean_return_to_go",
    "moving_average",
    "natural",
    "none",
    "of_means",
    "optimal",
    "pathwise",
    "ppgt",
    "reduce_samples",
    "residual",
    "resume",
    "returns_to_go",
    "reweighted",
    "rms_ascent",
    "run",
    "samples_of",
    "settings_environment",
    "simulator",
    "spsa",
    "stationary",
    "time_only",
    "train",
    "trapezoidal",
]


def __dir__() -> list[str]:
    """The public names and the sub-packages that are loaded."""
    rooms = [name for name, value in globals().items() if getattr(value, "__package__", None) == f"fluctua.{name}"]
    return sorted({*__all__, *rooms, "__all__", "__doc__", "__version__"})
