"""A cached property that a fork cannot block."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:
    class cached_property(functools.cached_property):
        """As :class:`functools.cached_property`, without its lock.

        Before Python 3.12, one lock for all instances is held while a value is computed. A child that was forked
        meanwhile would wait for it for ever. Here two threads may compute a value at once; both get the first one.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values.setdefault(self.attrname, self.func(instance))
            return values[self.attrname]


__all__ = ["cached_property"]
