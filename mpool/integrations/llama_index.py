"""Embeddings and a reranker for LlamaIndex (extra ``llama_index``)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..checks import refuse
from ..host.resources import importing
from . import _requests as requests

with importing("llama-index"):
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.callbacks import CBEventType, EventPayload
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
    from pydantic import ConfigDict, Field, field_serializer, model_validator


class MpoolEmbedding(BaseEmbedding):  # type: ignore[misc]
    """LlamaIndex embeddings that run :func:`mpool.embed`, with the model's prompts for queries and documents.

    Args:
        model: a key, a path, a reference or a :class:`mpool.Model`, as for :func:`mpool.embed`; None:
            all-MiniLM-L6-v2. ``model_name``, as LlamaIndex calls it, is accepted too.
        options: further options of :func:`mpool.embed`, such as ``dimensions`` or ``compute``.
        embed_batch_size: number of texts of one request, 1 to 2,048.
        callback_manager, num_workers, embeddings_cache, rate_limiter: see LlamaIndex.

    Raises:
        MpoolError: a request fails as in :func:`mpool.embed`; constructing the object reads no files.

    Example:
        >>> from mpool.integrations.llama_index import MpoolEmbedding
        >>> len(MpoolEmbedding().get_query_embedding("Where is the cat?"))
        384

    Source:
        https://docs.llamaindex.ai/en/stable/module_guides/models/embeddings/
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = None
    options: dict[str, Any] = Field(default_factory=dict)
    embed_batch_size: int = Field(default=256, gt=0, le=2048)

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        """Use ``model_name`` as the model if ``model`` is missing. Set ``model_name``, which LlamaIndex records, to the
        name of the model."""
        given = dict(data)
        if given.get("model") is None and given.get("model_name") not in (None, _DEFAULT):
            given["model"] = given["model_name"]
        return {**given, "model_name": requests.name_of(given.get("model")) or _DEFAULT}

    @field_serializer("model")
    def _name(self, model: Any) -> str | None:
        return requests.stored_name(model, "a saved component")

    @classmethod
    def class_name(cls) -> str:
        """``"MpoolEmbedding"``."""
        return "MpoolEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return _rows(requests.embed(self.model, [query], "query", self.options))[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return _rows(await requests.aembed(self.model, [query], "query", self.options))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aget_text_embeddings([text]))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return _rows(requests.embed(self.model, texts, "document", self.options))

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return _rows(await requests.aembed(self.model, texts, "document", self.options))


class MpoolRerank(BaseNodePostprocessor):  # type: ignore[misc]
    """A LlamaIndex node postprocessor that runs :func:`mpool.rerank`: it scores nodes by their relevance to the query.

    Args:
        model: a reranker: a key, a path, a reference or a :class:`mpool.Model`; None: ms-marco-MiniLM-L6-v2.
        top_n: number of nodes to return, the best first.
        keep_retrieval_score: True: nodes keep the score of their retrieval as ``metadata["retrieval_score"]``.
        options: further options of :func:`mpool.rerank`, such as ``compute``.
        callback_manager: see LlamaIndex.

    Raises:
        MpoolError: a request fails as in :func:`mpool.rerank`; constructing the object reads no files.
        InvalidArgument: there is no query.

    Example:
        >>> from llama_index.core.schema import NodeWithScore, TextNode
        >>> from mpool.integrations.llama_index import MpoolRerank
        >>> nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("Shares fell.", "The cat sleeps.")]
        >>> found = MpoolRerank(top_n=1).postprocess_nodes(nodes, query_str="Where is the cat?")  # doctest: +SKIP
        >>> found[0].node.get_content()  # doctest: +SKIP
        'The cat sleeps.'
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Any = None
    top_n: int = Field(default=2, gt=0)
    keep_retrieval_score: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @field_serializer("model")
    def _name(self, model: Any) -> str | None:
        return requests.stored_name(model, "a saved component")

    @classmethod
    def class_name(cls) -> str:
        """``"MpoolRerank"``."""
        return "MpoolRerank"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
                           ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        with self.callback_manager.event(CBEventType.RERANKING, payload=self._payload(nodes, query)) as event:
            best = self._best(nodes, requests.scores(self.model, query, _texts(nodes), self.options))
            event.on_end(payload={EventPayload.NODES: best})
        return best

    async def _apostprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
                                  ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        with self.callback_manager.event(CBEventType.RERANKING, payload=self._payload(nodes, query)) as event:
            best = self._best(nodes, await requests.ascores(self.model, query, _texts(nodes), self.options))
            event.on_end(payload={EventPayload.NODES: best})
        return best

    def _payload(self, nodes: list[NodeWithScore], query: str) -> dict[str, Any]:
        return {EventPayload.NODES: nodes, EventPayload.MODEL_NAME: requests.name_of(self.model),
                EventPayload.QUERY_STR: query, EventPayload.TOP_K: self.top_n}

    def _best(self, nodes: list[NodeWithScore], scores: requests.Scores) -> list[NodeWithScore]:
        order = scores.best(self.top_n)
        found = [NodeWithScore(node=nodes[at].node, score=float(scores.values[at])) for at in order]
        if self.keep_retrieval_score:
            for node in nodes:
                node.node.metadata["retrieval_score"] = node.score
                if "retrieval_score" not in node.node.excluded_embed_metadata_keys:  # no part of the text to score
                    node.node.excluded_embed_metadata_keys.append("retrieval_score")
        return found


#: Name of the default model in LlamaIndex's records.
_DEFAULT = "unknown"


def _query(bundle: QueryBundle | None) -> str:
    if bundle is None:
        refuse("query_str", None, "a query: documents are scored by their relevance to it")
    return str(bundle.query_str)


def _texts(nodes: list[NodeWithScore]) -> list[str]:
    return [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]


def _rows(found: NDArray[Any]) -> list[list[float]]:
    rows: list[list[float]] = found.tolist()
    return rows


__all__ = ["MpoolEmbedding", "MpoolRerank"]
