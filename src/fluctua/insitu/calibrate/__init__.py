"""Calibration from recordings: drift, noise, residuals, actuator gains, and the table in a file.

>>> with insitu.files.open("run.nc") as recording:
...     insitu.calibrate.calibrate_recording(recording, insitu.files.load_model(recording))
"""

from fluctua.core.likelihood.drift import fit_drift
from fluctua.core.likelihood.noise import fit_noise
from fluctua.core.likelihood.regression import examine_residuals
from fluctua.insitu.calibrate.actuators import actuator_gains
from fluctua.insitu.calibrate.fit import calibrate_recording, fit_system
from fluctua.insitu.calibrate.table import apply_calibration, read_noise, tabulate_calibration

__all__ = [
    "actuator_gains",
    "apply_calibration",
    "calibrate_recording",
    "examine_residuals",
    "fit_drift",
    "fit_noise",
    "fit_system",
    "read_noise",
    "tabulate_calibration",
]
