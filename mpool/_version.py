"""Version of the package. Imports nothing, so that every module can import it."""

__version__ = "0.1.0"
