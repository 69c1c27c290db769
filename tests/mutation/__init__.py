"""Mutation testing of the C core and of the Python package; ``tests/mutate.py`` is the command."""
