"""In situ: recordings and instruments in place of a simulator, their calibration, and training on
the device.
"""

from fluctua.insitu.advice import FileAdvice, advise_file
from fluctua.insitu.bench.driver import VirtualBench
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
    table_of,
)
from fluctua.insitu.continuing import SplitRecord, estimate_continuing, split_record
from fluctua.insitu.estimating import estimate
from fluctua.insitu.hidden import Visibility, visibility
from fluctua.insitu.instrument.array import DeviceArray, DeviceHealth, array
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import (
    Batch,
    CommandRejected,
    Health,
    Instrument,
    InstrumentError,
    InvalidReply,
)
from fluctua.insitu.instrument.substrate import (
    Archive,
    Incident,
    Measured,
    Retry,
    instrument_substrate,
)
from fluctua.insitu.instrument.transport import (
    Transport,
    connect,
    query_number,
    query_numbers,
    query_whole,
)
from fluctua.insitu.model import DeviceFit, Model, Unknown, corrected
from fluctua.insitu.networks import network_model
from fluctua.insitu.pooling import EstimateOptions, Pooled, estimate_files
from fluctua.insitu.recording.conversion import Converted, convert
from fluctua.insitu.recording.description import Description, EventKinds
from fluctua.insitu.recording.inspection import Finding, Inspection, inspect
from fluctua.insitu.recording.model import RecordingModel, model_of
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.insitu.recording.simulate import describe, record
from fluctua.insitu.recording.writer import Writer, append_to, create, put_table, repair, save
from fluctua.insitu.training import Plan, read_plan, resume, run

__all__ = [
    "Archive",
    "Batch",
    "CalibratedModel",
    "Calibration",
    "CommandRejected",
    "Converted",
    "Description",
    "DeviceArray",
    "DeviceFit",
    "DeviceHealth",
    "DriftFit",
    "EstimateOptions",
    "EventKinds",
    "FileAdvice",
    "Finding",
    "Gains",
    "Health",
    "Incident",
    "Inspection",
    "Instrument",
    "InstrumentError",
    "InvalidReply",
    "Measured",
    "Model",
    "NoiseFit",
    "NoiseTable",
    "Plan",
    "Pooled",
    "RecordingFile",
    "RecordingModel",
    "ResidualGuard",
    "ResidualReport",
    "Retry",
    "SplitRecord",
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
    "instrument_substrate",
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
    "run",
    "save",
    "split_record",
    "table_of",
    "visibility",
]
