"""Readers of model files: a folder of transformers, sentence-transformers or diffusers, or a GGUF file, to a
:class:`~mpool.models.spec.ModelDescription`."""
