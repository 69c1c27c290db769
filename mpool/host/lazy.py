"""Lazy values and imports: a cached property that a fork cannot block, and an import of numpy that survives Ctrl-C."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from .address_space import require_for_numpy

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:
    class cached_property(functools.cached_property):
        """Like :class:`functools.cached_property`, without its lock.

        Before Python 3.12, one lock for all instances is held while a value is computed. A child that was forked
        meanwhile would wait for it forever. Here two threads may compute a value at once; both get the first one.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values.setdefault(self.attrname, self.func(instance))
            return values[self.attrname]


def import_numpy() -> None:
    """Import numpy so that Ctrl-C does not leave it half imported.

    Python raises KeyboardInterrupt in the main thread, after any instruction. numpy's extension modules can be
    initialised once per process: if the exception ends their import, every later import of numpy fails. Therefore
    another thread imports numpy. Ctrl-C ends the wait for this thread, and the import goes on.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if "numpy" not in sys.modules:
                require_for_numpy()
            import numpy  # noqa: F401
        except BaseException as error:
            errors.append(error)

    if "numpy" in sys.modules:
        # Another thread may still import numpy: wait for it. The core imports a submodule of numpy from C. If it began
        # before the end of numpy's own import, each thread could hold a module's lock that the other one waits for;
        # Python then returns a module half initialised, and both imports fail for good.
        run()
    else:
        thread = threading.Thread(target=run, name="mpool-import-numpy")
        try:
            thread.start()
        except (MemoryError, RuntimeError):  # the system starts no further thread
            run()
        else:
            thread.join()
    if errors:
        raise errors[0]


__all__ = ["cached_property", "import_numpy"]
