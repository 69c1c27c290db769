"""Embedders and a ranker for Haystack (extra ``haystack``)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks import integer, refuse
from ..host.resources import importing
from . import _requests as requests

with importing("haystack"):
    from haystack import Document, component, default_from_dict, default_to_dict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import Model


class _Component:
    """Base of the components: the model, the options, and their form in a saved pipeline."""

    def __init__(self, model: str | os.PathLike[str] | Model | None, options: dict[str, Any] | None) -> None:
        self.model, self.options = model, dict(options or {})

    def _arguments(self) -> dict[str, Any]:
        return {"model": requests.stored_name(self.model, "a saved pipeline"), "options": self.options}

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a saved pipeline has it.

        Raises:
            InvalidArgument: the model is a :class:`mpool.Model`, which cannot be saved.
        """
        found: dict[str, Any] = default_to_dict(self, **self._arguments())
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Make the component from what :meth:`to_dict` returned."""
        return default_from_dict(cls, data)


class _DocumentComponent(_Component):
    """Base of the components that read documents."""

    def __init__(self, model: str | os.PathLike[str] | Model | None, options: dict[str, Any] | None,
                 meta_fields_to_embed: list[str] | None, embedding_separator: str) -> None:
        super().__init__(model, options)
        self.meta_fields_to_embed = list(meta_fields_to_embed or [])
        self.embedding_separator = embedding_separator

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "meta_fields_to_embed": self.meta_fields_to_embed,
                "embedding_separator": self.embedding_separator}

    def _texts(self, documents: list[Document]) -> list[str]:
        if not isinstance(documents, list) or not all(isinstance(one, Document) for one in documents):
            refuse("documents", documents, "a list of haystack.Document", hint="MpoolTextEmbedder embeds a str")
        return [self.embedding_separator.join(
            [*(str(one.meta[name]) for name in self.meta_fields_to_embed if one.meta.get(name) is not None),
             one.content or ""]) for one in documents]


@component
class MpoolTextEmbedder(_Component):
    """A Haystack component that embeds a query with :func:`mpool.embed`, with the model's prompt for queries.

    Args:
        model: a key, a path, a reference or a :class:`mpool.Model`, as for :func:`mpool.embed`; None:
            all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed`, such as ``dimensions``, ``prompt`` or ``compute``.

    Raises:
        MpoolError: a request fails as in :func:`mpool.embed`; constructing the object reads no files.

    Example:
        >>> from mpool.integrations.haystack import MpoolTextEmbedder
        >>> len(MpoolTextEmbedder().run(text="Where is the cat?")["embedding"])
        384

    Source:
        https://docs.haystack.deepset.ai/docs/custom-components
    """

    def __init__(self, model: Any = None, options: dict[str, Any] | None = None) -> None:
        _Component.__init__(self, model, options)  # not super(): the decorator makes a new class

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        """Embed a text.

        Args:
            text: the query.

        Returns:
            ``{"embedding": [...], "meta": {"model": ...}}``.

        Raises:
            InvalidArgument: the text is not a str.
        """
        return self._output(requests.embed(self.model, [_text(text)], "query", self.options))

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        """Asynchronous form of :meth:`run`."""
        return self._output(await requests.aembed(self.model, [_text(text)], "query", self.options))

    def _output(self, rows: NDArray[Any]) -> dict[str, Any]:
        return {"embedding": rows[0].tolist(), "meta": {"model": requests.name_of(self.model)}}


@component
class MpoolDocumentEmbedder(_DocumentComponent):
    """A Haystack component that embeds documents with :func:`mpool.embed`, with the model's prompt for documents.

    Args:
        model: a key, a path, a reference or a :class:`mpool.Model`, as for :func:`mpool.embed`; None:
            all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed`, such as ``dimensions``, ``prompt`` or ``compute``.
        meta_fields_to_embed: names of metadata that are put before the content.
        embedding_separator: text between metadata and content.

    Raises:
        MpoolError: a request fails as in :func:`mpool.embed`; constructing the object reads no files.

    Example:
        >>> from haystack import Document
        >>> from mpool.integrations.haystack import MpoolDocumentEmbedder
        >>> len(MpoolDocumentEmbedder().run(documents=[Document(content="A cat.")])["documents"][0].embedding)
        384
    """

    def __init__(self, model: Any = None, options: dict[str, Any] | None = None,
                 meta_fields_to_embed: list[str] | None = None, embedding_separator: str = "\n") -> None:
        _DocumentComponent.__init__(self, model, options, meta_fields_to_embed, embedding_separator)

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Embed documents.

        Args:
            documents: documents with text content; a document without content is embedded as an empty text.

        Returns:
            ``{"documents": [...], "meta": {"model": ...}}``: copies of the documents, with their ``embedding``.

        Raises:
            InvalidArgument: ``documents`` is not a list of documents.
        """
        return self._output(documents, requests.embed(self.model, self._texts(documents), "document", self.options))

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """Asynchronous form of :meth:`run`."""
        texts = self._texts(documents)
        return self._output(documents, await requests.aembed(self.model, texts, "document", self.options))

    def _output(self, documents: list[Document], rows: NDArray[Any]) -> dict[str, Any]:
        return {"documents": [replace(one, embedding=row) for one, row in zip(documents, rows.tolist())],
                "meta": {"model": requests.name_of(self.model)}}


@component
class MpoolRanker(_DocumentComponent):
    """A Haystack component that ranks documents by their relevance to a query with :func:`mpool.rerank`.

    Args:
        model: a reranker: a key, a path, a reference or a :class:`mpool.Model`; None: ms-marco-MiniLM-L6-v2.
        top_k: number of documents to return; None: all.
        score_threshold: minimum score of a document to be returned; None: any. The model's files define the scale.
        options: further options of :func:`mpool.rerank`, such as ``compute``.
        meta_fields_to_embed: names of metadata that are put before the content.
        embedding_separator: text between metadata and content.

    Raises:
        InvalidArgument: ``top_k`` is not a positive integer.
        MpoolError: a request fails as in :func:`mpool.rerank`; constructing the object reads no files.

    Example:
        >>> from haystack import Document
        >>> from mpool.integrations.haystack import MpoolRanker
        >>> documents = [Document(content="Shares fell."), Document(content="The cat sleeps.")]
        >>> found = MpoolRanker().run(query="Where is the cat?", documents=documents)  # doctest: +SKIP
        >>> found["documents"][0].content  # doctest: +SKIP
        'The cat sleeps.'
    """

    def __init__(self, model: Any = None, top_k: int | None = 10, score_threshold: float | None = None,
                 options: dict[str, Any] | None = None, meta_fields_to_embed: list[str] | None = None,
                 embedding_separator: str = "\n") -> None:
        _DocumentComponent.__init__(self, model, options, meta_fields_to_embed, embedding_separator)
        self.top_k, self.score_threshold = _count(top_k), score_threshold

    def _arguments(self) -> dict[str, Any]:
        return {**_DocumentComponent._arguments(self), "top_k": self.top_k, "score_threshold": self.score_threshold}

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document], top_k: int | None = None,
            score_threshold: float | None = None) -> dict[str, Any]:
        """Rank documents.

        Args:
            query: the query.
            documents: documents with text content; a document without content is scored as an empty text.
            top_k, score_threshold: override those of the constructor, if given.

        Returns:
            ``{"documents": [...]}``: copies of the best documents, with their ``score``, the best first. Documents with
            equal scores keep their order.

        Raises:
            InvalidArgument: an argument is of another type or out of range.
        """
        scores = requests.scores(self.model, query, self._texts(documents), self.options)
        return self._output(documents, scores, top_k, score_threshold)

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, documents: list[Document], top_k: int | None = None,
                        score_threshold: float | None = None) -> dict[str, Any]:
        """Asynchronous form of :meth:`run`."""
        scores = await requests.ascores(self.model, query, self._texts(documents), self.options)
        return self._output(documents, scores, top_k, score_threshold)

    def _output(self, documents: list[Document], scores: requests.Scores, top_k: int | None,
                score_threshold: float | None) -> dict[str, Any]:
        count = self.top_k if top_k is None else _count(top_k)
        least = self.score_threshold if score_threshold is None else score_threshold
        return {"documents": [replace(documents[at], score=float(scores.values[at])) for at in scores.best(count)
                              if least is None or scores.values[at] >= least]}


def _text(text: Any) -> str:
    if not isinstance(text, str):
        refuse("text", text, "a str", hint="MpoolDocumentEmbedder embeds documents")
    return text


def _count(top_k: Any) -> int | None:
    if top_k is None:
        return None
    count = integer(top_k)
    if count is None or count < 1:
        refuse("top_k", top_k, ">= 1, or None for all documents")
    return count


__all__ = ["MpoolDocumentEmbedder", "MpoolRanker", "MpoolTextEmbedder"]
