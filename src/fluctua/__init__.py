"""Fluctua: train stochastic physical systems from their own fluctuations."""

from fluctua.averaged import Averaged, Certificate
from fluctua.baseline import Baseline, Kick, binned, mean, none, optimal, time_only
from fluctua.compare import Comparison, compare
from fluctua.gradient import gradient, mean_return_to_go, ppgt
from fluctua.local_linear import local_linear_score
from fluctua.optimise import rms_ascent
from fluctua.returns import returns_to_go
from fluctua.samples import Samples, reduce_samples
from fluctua.score import drift_score, full_score, residual
from fluctua.simulate import simulator
from fluctua.start import Density, Reparameterised
from fluctua.train import Record, box, train
from fluctua.twin import Twin, TwinSamples
from fluctua.types import (
    Estimate,
    Estimator,
    NoiseProduct,
    Objective,
    Process,
    Score,
    Step,
    Substrate,
    Trajectories,
)
from fluctua.wiener import Wiener
from fluctua.yardsticks import finite_differences, pathwise, spsa
