"""Packages that only jobs of the nightly run have: clients of servers, and the libraries of the integrations."""

import importlib
import os
from typing import Any

import pytest

# These libraries report their use to their makers unless told not to.
os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
os.environ.setdefault("ANONYMIZED_TELEMETRY", "False")


def package(name: str, extra: str = "clients") -> Any:
    """Import a package of an extra. Skip the test if it is missing, except in the nightly job of the extra."""
    return importlib.import_module(name) if os.environ.get("MPOOL_CLIENT_TESTS") else pytest.importorskip(
        name, reason=f"needs {name.partition('.')[0]}: pip install '.[{extra}]' in an environment of its own")
