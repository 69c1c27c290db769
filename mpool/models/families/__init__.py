"""Families of models: each has a module with the rows of its architectures."""
