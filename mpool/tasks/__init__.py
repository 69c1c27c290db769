"""One module per capability: options, validation, request, result."""
