"""Version of the package, below everything that states it."""

__version__ = "0.1.0"
