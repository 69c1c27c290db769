"""Conversion of models to GGUF files: ``mpool quantize``."""
