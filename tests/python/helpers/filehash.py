"""SHA-256 of files, by which the goldens of tests/parity recognise them. Needs nothing but numpy: scripts that record
goldens run in environments of their own."""

import hashlib
from pathlib import Path

import numpy as np


def file_hash(path: Path) -> np.ndarray:
    """Return the SHA-256 of a file, uint8 (32,)."""
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)
