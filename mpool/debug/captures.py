"""Former module of :mod:`mpool.tasks.captures`, kept because pickles of earlier releases refer to it."""

from ..tasks.capture_files import CaptureRecord
from ..tasks.captures import Capture, CaptureJob, capture

__all__ = ["Capture", "CaptureJob", "CaptureRecord", "capture"]
