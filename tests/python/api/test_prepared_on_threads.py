"""Requests that mpool.aio prepares on a thread, because it would block an event loop (mpool/tasks/requests.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.host.native_calls import LONG_ON_LOOP
from mpool.tasks import requests
from mpool.tasks.options import PLAIN

IMAGE = np.zeros((2, 2, 3), np.uint8)
SHORT, LONG = "x" * (LONG_ON_LOOP - 1), "x" * LONG_ON_LOOP
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
NONE, SLOW, CHAT, SLOW_CHAT, IMAGES = (False,) * 3, (True, False, False), (False, True, False), (True, True, False), \
    (False, True, True)


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content, **more}]


#: Verb and arguments -> preparation is slow, renders a chat template, reads images.
ROWS: list[tuple[str, dict[str, Any], tuple[bool, ...]]] = [
    ("embed", {"inputs": LONG}, NONE), ("embed_iter", {"texts": [LONG]}, NONE),
    ("embed_sparse", {"inputs": LONG}, NONE), ("embed_tokens", {"inputs": LONG}, NONE),
    ("embed_all", {"inputs": LONG}, NONE), ("embed_image", {"images": IMAGE}, (False, False, True)),
    ("rerank", {"query": "x", "documents": [LONG], "model": "m"}, NONE),
    ("classify", {"texts": LONG, "model": "m"}, NONE), ("classify_tokens", {"texts": LONG, "model": "m"}, NONE),
    ("classify", {"texts": "x", "model": "m", "labels": ["a"], "template": "{}" + SHORT[1:]}, NONE),
    ("classify", {"texts": "x", "model": "m", "labels": ["a"], "template": "{}" + SHORT}, SLOW),
    ("classify", {"texts": "x", "model": "m", "labels": ["a", "b"],
                  "template": "{}" + SHORT[LONG_ON_LOOP // 2:]}, SLOW),
    ("generate", {"prompt": SHORT}, NONE), ("generate", {"prompt": LONG}, SLOW),
    ("generate", {"prompt": [1] * 1023}, NONE), ("generate", {"prompt": [1] * 1024}, SLOW),
    ("generate", {"prompt": "x", "response_format": {"type": "json_object"}}, SLOW),
    ("generate", {"prompt": "x", "response_format": None}, NONE),
    ("chat", {"messages": user(SHORT)}, CHAT), ("chat", {"messages": user(LONG)}, CHAT),
    ("chat", {"messages": user(SHORT) + user("x")}, CHAT),
    ("chat", {"messages": user([{"type": "text", "text": SHORT}])}, CHAT),
    ("chat", {"messages": user(["x", SHORT])}, CHAT),
    ("chat", {"messages": user([{"type": "text", "text": "x"}, {"type": "text", "text": SHORT}])}, CHAT),
    ("chat", {"messages": user("x"), "tools": [CLOCK]}, SLOW_CHAT),
    ("chat", {"messages": user("x"), "tools": None}, CHAT),
    ("chat", {"messages": user("x", images=[IMAGE])}, IMAGES), ("chat", {"messages": user("x", images=None)}, CHAT),
    ("chat", {"messages": user([{"type": "image", "image": IMAGE}])}, IMAGES),
    ("chat", {"messages": "x"}, CHAT), ("chat", {"messages": [LONG]}, CHAT), ("chat", {"messages": user(None)}, CHAT),
    ("vision", {"images": IMAGE, "prompt": "x"}, IMAGES), ("generate_image", {"prompt": "x"}, SLOW)]


@pytest.mark.parametrize(("verb", "given", "flags"), ROWS, ids=[f"{row[0]}-{at}" for at, row in enumerate(ROWS)])
def test_preparation(verb: str, given: dict[str, Any], flags: tuple[bool, ...]) -> None:
    """Long texts, grammars, chat templates and images take milliseconds; texts of vectors are tokenized in slices."""
    pool: Any = SimpleNamespace(config=mpool.PoolConfig())
    found = getattr(requests, verb)(pool, dict(given), PLAIN)
    assert (found.long, found.chat, found.images) == flags


@pytest.mark.parametrize("own, compute, chosen", [
    ("auto", "auto", "auto"), ("int8", "auto", "int8"), ("int8", "float32", "float32"), ("auto", "float32", "float32"),
    ("int8", None, None)])
def test_compute_type(own: str, compute: Any, chosen: Any) -> None:
    """``"auto"`` of a request means that of the model."""
    assert requests._chosen(SimpleNamespace(_compute=own), compute) == chosen
    assert requests._chosen("name", compute) == compute
