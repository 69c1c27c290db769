"""OpenAI's protocol, and ``/v1/rerank`` in the format of Jina and Cohere. :mod:`.table` has its operations."""
