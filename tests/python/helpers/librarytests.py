"""A plugin of pytest that runs the tests of sentence-transformers against the classes of mpool.

`pytest -p librarytests` inside a checkout of that library replaces its ``SentenceTransformer`` and ``CrossEncoder``
before the test modules import them. MPOOL_LIBRARY_MODELS names a JSON file with the folder of each model name, and
MPOOL_LIBRARY_OUTCOMES the JSON file to write: the outcome of each test that used one of the classes.
"""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import sentence_transformers.cross_encoder

from mpool.integrations import sentence_transformers as ours

MODELS: dict[str, str] = json.loads(Path(os.environ["MPOOL_LIBRARY_MODELS"]).read_text())
outcomes: dict[str, str] = {}
used = False


class _Local:
    """Base of both classes: takes local folders for names of models, and notes each use of an object."""

    def __init__(self, model_name_or_path: Any = None, *args: Any, **options: Any) -> None:
        global used
        used = True
        name = model_name_or_path if model_name_or_path is None else str(model_name_or_path)
        super().__init__(MODELS.get(name, name), *args, **options)  # type: ignore[arg-type]

    def __getattribute__(self, name: str) -> Any:
        global used
        used = True
        return super().__getattribute__(name)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a copy whose attributes can be replaced; it shares the model, which tests do not change."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy


class SentenceTransformer(_Local, ours.SentenceTransformer):
    pass


class CrossEncoder(_Local, ours.CrossEncoder):
    pass


sys.modules["sentence_transformers.SentenceTransformer"].SentenceTransformer = SentenceTransformer  # type: ignore
sys.modules["sentence_transformers.cross_encoder.CrossEncoder"].CrossEncoder = CrossEncoder  # type: ignore
sentence_transformers.SentenceTransformer = SentenceTransformer  # type: ignore
sentence_transformers.CrossEncoder = sentence_transformers.cross_encoder.CrossEncoder = CrossEncoder  # type: ignore


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global used
    used = False
    result = yield
    if not used:
        outcomes.pop(item.nodeid, None)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = outcomes.get(report.nodeid, "passed")
    outcomes[report.nodeid] = before if report.outcome == "passed" else report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["MPOOL_LIBRARY_OUTCOMES"]).write_text(json.dumps(outcomes))
