"""Recordings in files: open, create, append to, convert, inspect, repair and simulate them.

>>> with insitu.files.open("run.nc") as recording:
...     insitu.files.inspect(recording)
"""

from fluctua.insitu.recording.conversion import convert
from fluctua.insitu.recording.description import Description, EventKinds
from fluctua.insitu.recording.inspection import inspect
from fluctua.insitu.recording.model import RecordingModel, load_model
from fluctua.insitu.recording.reader import open_recording as open
from fluctua.insitu.recording.simulate import describe, record
from fluctua.insitu.recording.writer import append_to, create, put_table, repair, save
from fluctua.insitu.splitting import split_record

__all__ = [
    "Description",
    "EventKinds",
    "RecordingModel",
    "append_to",
    "convert",
    "create",
    "describe",
    "inspect",
    "load_model",
    "open",
    "put_table",
    "record",
    "repair",
    "save",
    "split_record",
]
