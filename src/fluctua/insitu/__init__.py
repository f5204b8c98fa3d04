"""In situ: recordings and instruments in place of a simulator, and training on the device.

`run` trains an instrument by its `Model` and a `Plan`, `check_instrument` compares the two before;
`estimate` is the gradient of a recording.
Namespaces hold the rest: `files` for recordings, `instrument` for drivers.
"""

from fluctua.insitu import calibrate, files, instrument
from fluctua.insitu.advice import FileAdvice, advise_file
from fluctua.insitu.continuing import estimate_continuing
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.run_and_resume import read_plan, resume, run
from fluctua.insitu.estimating import estimate
from fluctua.insitu.hidden import Visibility, visibility
from fluctua.insitu.instrument.substrate import instrument_substrate
from fluctua.insitu.instrument_check.check import check_instrument
from fluctua.insitu.model import Knob, Methods, Model
from fluctua.insitu.networks import network_model
from fluctua.insitu.pooling import EstimateOptions, Pooled, estimate_files
from fluctua.insitu.port_networks import port_network_model
from fluctua.insitu.unknowns import DeviceFit, Unknown

__all__ = [
    "DeviceFit",
    "EstimateOptions",
    "FileAdvice",
    "Knob",
    "Methods",
    "Model",
    "Plan",
    "Pooled",
    "Unknown",
    "Visibility",
    "advise_file",
    "calibrate",
    "check_instrument",
    "estimate",
    "estimate_continuing",
    "estimate_files",
    "files",
    "instrument",
    "instrument_substrate",
    "network_model",
    "port_network_model",
    "read_plan",
    "resume",
    "run",
    "visibility",
]
