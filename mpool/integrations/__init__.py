"""mpool inside other libraries: each a module of its own, which is imported by its name and needs its extra.

- ``sklearn``: :class:`mpool.integrations.sklearn.EmbeddingTransformer`.
- ``langchain``: :class:`mpool.integrations.langchain.ChatMpool` and
  :class:`mpool.integrations.langchain.MpoolEmbeddings`.
- ``llm``: a plugin of the command ``llm``, which finds it by itself.
- ``ray``: replicas of pools behind one address (``mpool ray serve``), vectors for Parquet files (``mpool ray embed``).

The first three translate and nothing else: options, ranges and errors are those of the library. They use the
process-wide pool, unless they are given a :class:`mpool.Model` of another one.
"""
