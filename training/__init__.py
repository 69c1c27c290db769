"""Trains the small models that ship with mpool. ``python -m training --help``; ``training/README.md`` describes them.

Python puts the clone first on ``sys.path``. Its sources would then hide the installed mpool, and they have no compiled
core. The clone therefore moves to the end, unless the core was built in place (``pip install -e .``).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not list((ROOT / "mpool").glob("_core.*.so")):
    sys.path[:] = [*(path for path in sys.path if Path(path or ".").resolve() != ROOT), str(ROOT)]

#: Folder that the models ship from.
MODELS = ROOT / "mpool" / "demo_models"
