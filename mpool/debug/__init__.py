"""Tools for debugging: captures of what the layers compute, their comparison, and tables of models and options."""

from ..tasks.capture_files import CaptureRecord, read_capture
from ..tasks.captures import Capture, CaptureJob, capture
from .comparing import GRADES as GRADES
from .comparing import CaptureComparison, CaptureDifference, compare_captures
from .comparing import Grade as Grade
from .show import ModelRow, ModelTable, show_config
from .show import megabytes as megabytes
from .show import table as table

__all__ = ["Capture", "CaptureComparison", "CaptureDifference", "CaptureJob", "CaptureRecord", "ModelRow",
           "ModelTable", "capture", "compare_captures", "read_capture", "show_config"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
