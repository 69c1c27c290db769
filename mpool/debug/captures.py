"""The former home of :mod:`mpool.tasks.captures`: pickles of earlier releases name this module."""

from ..tasks.capture_files import CaptureRecord
from ..tasks.captures import Capture, CaptureJob, capture

__all__ = ["Capture", "CaptureJob", "CaptureRecord", "capture"]
