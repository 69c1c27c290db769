"""Requests: one module per capability, from the options of a request to its result."""
