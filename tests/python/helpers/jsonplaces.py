"""Places of the values in a JSON document, for tests that change a document."""

from collections.abc import Iterator
from itertools import islice
from typing import Any


def places(value: Any, most: int | None = None, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value below ``value``: keys and indices; of long objects and lists, only ``most``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in islice(items, most):
        yield (*path, key)
        yield from places(inner, most, (*path, key))
