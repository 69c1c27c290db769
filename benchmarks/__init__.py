"""Benchmarks: mpool beside its peers, and kernels beside what the machine can do. ``python -m benchmarks --help``."""
