"""Packages of the extra ``clients``, which the nightly run has, and libraries of other integrations."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

# These libraries report their use to their makers unless told not to.
os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("ANONYMIZED_TELEMETRY", "False")


def package(name: str) -> Any:
    """Import a package of the extra ``clients``. Skip the test if it is missing, except in the nightly run."""
    return importlib.import_module(name) if os.environ.get("MPOOL_CLIENT_TESTS") else pytest.importorskip(
        name, reason=f"needs {name.partition('.')[0]}: pip install '.[clients]' in an environment of its own")
