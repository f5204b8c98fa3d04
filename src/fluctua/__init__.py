"""Fluctua: train stochastic physical systems from their own fluctuations."""

from fluctua.core.averaged import Averaged, Certificate
from fluctua.core.baselines import Baseline, Kick, binned, mean, none, optimal, time_only
from fluctua.core.compare import Comparison, compare
from fluctua.core.estimate import Samples, reduce_samples
from fluctua.core.ppgt import gradient, mean_return_to_go, ppgt
from fluctua.core.scores import drift_score, full_score, local_linear_score, residual
from fluctua.core.simulate import simulator
from fluctua.core.start import Density, Reparameterised
from fluctua.core.sweep import returns_to_go
from fluctua.core.twin import Twin, TwinSamples
from fluctua.core.types import (
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
from fluctua.core.wiener import Wiener
from fluctua.core.yardsticks import finite_differences, pathwise, spsa
from fluctua.learn.evaluate import Evaluation, evaluate
from fluctua.learn.optimise import rms_ascent
from fluctua.learn.train import Record, box, train
from fluctua.store.training import resume, run
