"""The examples in docstrings run unchanged on the default models."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

import mpool
from mpool.api import functions
from defaultmodels import use_default_models

MODULES = ("mpool", "mpool.api.functions", "mpool.aio", "mpool.config", "mpool.tasks.text_embedding",
           "mpool.tasks.jobs", "mpool.model",
           "mpool.pool", "mpool.completions", "mpool.debug.show", "mpool.search.similarities", "mpool.tasks.streams")
#: Functions whose documentation is that of the pool's methods. Their examples run as part of the methods.
FORWARDED = {f"mpool.api.functions.{name}" for name in functions.FORWARDED}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in mpool.__all__:  # functions are built on first use
        getattr(mpool, name)
    return [test for module in MODULES
            for test in finder.find(importlib.import_module(module), module, extraglobs={"mpool": mpool})
            if test.examples and test.name not in FORWARDED]


@pytest.mark.builds
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    use_default_models()
    said: list[str] = []
    result: Any = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert result.attempted and not result.failed, "".join(said)


def test_every_function_has_an_example() -> None:
    documented = {example.name.rpartition(".")[2] for example in examples()}
    assert {"chat", "count_tokens", "detokenize", "embed", "embed_iter", "generate", "get", "load", "ps", "register",
            "similarity", "submit", "tokenize", "Pool", "PoolConfig", "Model", "Stream"} <= documented
