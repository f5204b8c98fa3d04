"""In situ: recordings and instruments in place of a simulator, their calibration, and training on the device."""

from fluctua.insitu.advice import FileAdvice, advise_file
from fluctua.insitu.bench.driver import VirtualBench
from fluctua.insitu.calibration.actuators import Gains, actuator_gains
from fluctua.insitu.calibration.drift import DriftFit, fit_drift
from fluctua.insitu.calibration.fit import Calibration, calibrate
from fluctua.insitu.calibration.noise import NoiseFit, fit_noise
from fluctua.insitu.calibration.residuals import ResidualReport, examine_residuals
from fluctua.insitu.calibration.table import Applied, NoiseTable, apply_calibration, read_noise, table_of
from fluctua.insitu.continuing import Stretches, estimate_continuing, stretches
from fluctua.insitu.estimating import estimate
from fluctua.insitu.hidden import Visibility, visibility
from fluctua.insitu.instrument.array import DeviceArray, DeviceHealth, array
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import Batch, Garbled, Health, Instrument, InstrumentError, Refused
from fluctua.insitu.instrument.substrate import Archive, Incident, Measured, Retry, measured
from fluctua.insitu.instrument.transport import Transport, connect, query_number, query_numbers, query_whole
from fluctua.insitu.model import DeviceFit, Model, Unknown, corrected
from fluctua.insitu.networks import network_model
from fluctua.insitu.pooling import Pooled, Reading, estimate_files
from fluctua.insitu.recording.conversion import Converted, convert
from fluctua.insitu.recording.description import Description, EventKinds
from fluctua.insitu.recording.inspection import Finding, Inspection, inspect
from fluctua.insitu.recording.model import RecordingModel, model_of
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.insitu.recording.simulate import describe, record
from fluctua.insitu.recording.writer import Writer, append_to, create, put_table, repair, save
from fluctua.insitu.training import Plan, begin, read_plan, resume

__all__ = [
    "Applied",
    "Archive",
    "Batch",
    "Calibration",
    "Converted",
    "Description",
    "DeviceArray",
    "DeviceFit",
    "DeviceHealth",
    "DriftFit",
    "EventKinds",
    "FileAdvice",
    "Finding",
    "Gains",
    "Garbled",
    "Health",
    "Incident",
    "Inspection",
    "Instrument",
    "InstrumentError",
    "Measured",
    "Model",
    "NoiseFit",
    "NoiseTable",
    "Plan",
    "Pooled",
    "Reading",
    "RecordingFile",
    "RecordingModel",
    "Refused",
    "ResidualGuard",
    "ResidualReport",
    "Retry",
    "Stretches",
    "Transport",
    "Unknown",
    "VirtualBench",
    "Visibility",
    "Writer",
    "actuator_gains",
    "advise_file",
    "append_to",
    "apply_calibration",
    "array",
    "begin",
    "calibrate",
    "connect",
    "convert",
    "corrected",
    "create",
    "describe",
    "estimate",
    "estimate_continuing",
    "estimate_files",
    "examine_residuals",
    "fit_drift",
    "fit_noise",
    "inspect",
    "measured",
    "model_of",
    "network_model",
    "open_recording",
    "put_table",
    "query_number",
    "query_numbers",
    "query_whole",
    "read_noise",
    "read_plan",
    "record",
    "repair",
    "resume",
    "save",
    "stretches",
    "table_of",
    "visibility",
]
