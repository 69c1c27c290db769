"""Adapters of mpool for other libraries. Each adapter is a module of its own and, unless stated otherwise, needs the
extra of the same name, with a hyphen for an underscore.

- ``sklearn``: :class:`mpool.integrations.sklearn.EmbeddingTransformer`.
- ``langchain``: :class:`mpool.integrations.langchain.ChatMpool` and
  :class:`mpool.integrations.langchain.MpoolEmbeddings`.
- ``llama_index``: :class:`mpool.integrations.llama_index.MpoolEmbedding` and
  :class:`mpool.integrations.llama_index.MpoolRerank`.
- ``haystack``: :class:`mpool.integrations.haystack.MpoolTextEmbedder`,
  :class:`mpool.integrations.haystack.MpoolDocumentEmbedder` and :class:`mpool.integrations.haystack.MpoolRanker`.
- ``chroma``: :class:`mpool.integrations.chroma.MpoolEmbeddingFunction`.
- ``lancedb``: :class:`mpool.integrations.lancedb.MpoolEmbeddings` and
  :class:`mpool.integrations.lancedb.MpoolReranker`.
- ``sentence_transformers``: :class:`mpool.integrations.sentence_transformers.SentenceTransformer` and
  :class:`mpool.integrations.sentence_transformers.CrossEncoder`, which need torch
  only for results that are tensors.
- ``llama_cpp``: :class:`mpool.integrations.llama_cpp.Llama`; needs no extra.
- ``llm``: a plugin of the command ``llm``, which finds it by its entry point.
- ``ray``: replicated pools behind one address (``mpool ray serve``), embeddings for Parquet files (``mpool ray
  embed``).

The adapters except ``sentence_transformers``, ``llama_cpp`` and ``ray`` only convert arguments and results: options,
ranges and errors are those of mpool. They use the process-wide pool unless their model is a :class:`mpool.Model` of
another pool.
"""
