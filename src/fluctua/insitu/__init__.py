"""In situ: recordings and instruments in place of a simulator, and training on the device.

`run` trains an instrument by its `Model` and a `Plan`; `estimate` is the gradient of a recording.
Namespaces hold the rest: `files` for recordings, `instrument` for drivers.
"""

from fluctua.insitu import files, instrument
from fluctua.insitu.advice import FileAdvice, advise_file
from fluctua.insitu.calibration.actuators import Gains, actuator_gains
from fluctua.insitu.calibration.drift import DriftFit, fit_drift
from fluctua.insitu.calibration.fit import Calibration, calibrate
from fluctua.insitu.calibration.noise import NoiseFit, fit_noise
from fluctua.insitu.calibration.residuals import ResidualReport, examine_residuals
from fluctua.insitu.calibration.table import (
    CalibratedModel,
    NoiseTable,
    apply_calibration,
    read_noise,
    tabulate_calibration,
)
from fluctua.insitu.continuing import estimate_continuing
from fluctua.insitu.estimating import estimate
from fluctua.insitu.hidden import Visibility, visibility
from fluctua.insitu.instrument.substrate import instrument_substrate
from fluctua.insitu.model import DeviceFit, Model, Unknown
from fluctua.insitu.networks import network_model
from fluctua.insitu.pooling import EstimateOptions, Pooled, estimate_files
from fluctua.insitu.training import Plan, read_plan, resume, run

__all__ = [
    "CalibratedModel",
    "Calibration",
    "DeviceFit",
    "DriftFit",
    "EstimateOptions",
    "FileAdvice",
    "Gains",
    "Model",
    "NoiseFit",
    "NoiseTable",
    "Plan",
    "Pooled",
    "ResidualReport",
    "Unknown",
    "Visibility",
    "actuator_gains",
    "advise_file",
    "apply_calibration",
    "calibrate",
    "estimate",
    "estimate_continuing",
    "estimate_files",
    "examine_residuals",
    "files",
    "fit_drift",
    "fit_noise",
    "instrument",
    "instrument_substrate",
    "network_model",
    "read_noise",
    "read_plan",
    "resume",
    "run",
    "tabulate_calibration",
    "visibility",
]
