"""In situ: recordings instead of a simulator, their calibration, and what can be learnt from them."""

from fluctua.insitu.description import Description
from fluctua.insitu.reader import RecordingFile, open_recording
from fluctua.insitu.writer import Writer, append_to, create, repair

__all__ = ["Description", "RecordingFile", "Writer", "append_to", "create", "open_recording", "repair"]
