"""The public functions and methods of the capabilities, and the generator of their stubs."""

from ..host.lazy import import_numpy

import_numpy()  # before a module of a lower tier imports numpy in a way that Ctrl-C can cut short
