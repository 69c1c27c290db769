"""Texts of errors in one file, ``texts.json``: tests of refusals assert the parameter and compare the rest with it.

``MPOOL_RECORD_TEXTS=1 pytest FILE`` writes the texts of a file's tests again. Read the difference before a commit.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "texts.json"
RECORDS = os.environ.get("MPOOL_RECORD_TEXTS") == "1"


def check(request: pytest.FixtureRequest, found: Any) -> None:
    """Compare what a test found with the file: strings, numbers, None, and lists of them."""
    texts = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    file, name = Path(str(request.path)).stem, request.node.name
    if RECORDS:
        texts.setdefault(file, {})[name] = found
        PATH.write_text(json.dumps(texts, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
    assert found == texts.get(file, {}).get(name), f"{found}: if it changed on purpose, see {Path(__file__).name}"
