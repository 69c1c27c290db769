"""Conversion of models to GGUF files: ``mpool quantize``."""

from .quantize import Report as Report
from .quantize import quantize as quantize
