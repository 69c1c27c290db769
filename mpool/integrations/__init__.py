"""Adapters of mpool for other libraries. Each is a module that needs its extra and is imported by its name.

- ``sklearn``: :class:`mpool.integrations.sklearn.EmbeddingTransformer`.
- ``langchain``: :class:`mpool.integrations.langchain.ChatMpool` and
  :class:`mpool.integrations.langchain.MpoolEmbeddings`.
- ``llm``: a plugin of the command ``llm``, found by its entry point.
- ``ray``: replicas with pools behind one address (``mpool ray serve``), embeddings for Parquet files (``mpool ray
  embed``).

The first three only translate: options, ranges and errors are those of mpool. They use the process-wide pool unless
they get a :class:`mpool.Model` of another pool.
"""
