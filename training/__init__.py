"""Trains the small models that come with mpool. ``python -m training --help``; what they are: ``training/README.md``.

Python puts the clone that this is run from first: its sources would hide the mpool that is installed and lack its core.
Unless the core was built beside them (``pip install -e .``) the clone comes last.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not list((ROOT / "mpool").glob("_core.*.so")):
    sys.path[:] = [*(path for path in sys.path if Path(path or ".").resolve() != ROOT), str(ROOT)]

#: Where the models are shipped from.
MODELS = ROOT / "mpool" / "demo_models"
