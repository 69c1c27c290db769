"""Readers of model files. Each turns a transformers, sentence-transformers or diffusers folder, or a GGUF file, into a
:class:`~mpool.models.spec.ModelDescription`."""
