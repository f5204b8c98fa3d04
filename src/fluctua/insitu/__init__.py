"""In situ: recordings instead of a simulator, their calibration, and what can be learnt from them."""

from fluctua.insitu.advice import FileAdvice, advise_file
from fluctua.insitu.calibration.actuators import Gains, actuator_gains
from fluctua.insitu.calibration.drift import DriftFit, fit_drift
from fluctua.insitu.calibration.fit import Calibration, calibrate
from fluctua.insitu.calibration.hidden import Visibility, visibility
from fluctua.insitu.calibration.noise import NoiseFit, fit_noise
from fluctua.insitu.calibration.readout import corrected_gradient
from fluctua.insitu.calibration.residuals import ResidualReport, examine_residuals
from fluctua.insitu.calibration.table import Applied, NoiseTable, apply_calibration, read_noise, table_of
from fluctua.insitu.estimating import estimate
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.inspection import Finding, Inspection, inspect
from fluctua.insitu.recording.model import RecordingModel, model_of
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.insitu.recording.simulate import describe, record
from fluctua.insitu.recording.writer import Writer, append_to, create, put_table, repair, save

__all__ = [
    "Applied",
    "Calibration",
    "Description",
    "DriftFit",
    "FileAdvice",
    "Finding",
    "Gains",
    "Inspection",
    "NoiseFit",
    "NoiseTable",
    "RecordingFile",
    "RecordingModel",
    "ResidualReport",
    "Visibility",
    "Writer",
    "actuator_gains",
    "advise_file",
    "append_to",
    "apply_calibration",
    "calibrate",
    "corrected_gradient",
    "create",
    "describe",
    "estimate",
    "examine_residuals",
    "fit_drift",
    "fit_noise",
    "inspect",
    "model_of",
    "open_recording",
    "put_table",
    "read_noise",
    "record",
    "repair",
    "save",
    "table_of",
    "visibility",
]
