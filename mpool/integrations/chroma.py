"""An embedding function for Chroma (extra ``chroma``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse
from ..errors import InvalidArgument
from ..host.resources import importing
from . import _requests as requests

with importing("chroma"):
    from chromadb.api.types import Documents, EmbeddingFunction, Embeddings, Space
    from chromadb.utils.embedding_functions import register_embedding_function

if TYPE_CHECKING:
    from numpy.typing import NDArray


@register_embedding_function
class MpoolEmbeddingFunction(EmbeddingFunction[Documents]):  # type: ignore[misc]
    """A Chroma embedding function that runs :func:`mpool.embed`, with the model's prompts for queries and documents.

    Chroma stores the name ``mpool``, the model and the options with a collection. A process that imports this module
    can open the collection without naming the function again.

    Args:
        model: a key, a path or a reference, as for :func:`mpool.embed`; None: all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed` that JSON can hold, such as ``dimensions`` or ``compute``.

    Raises:
        InvalidArgument: the model is a :class:`mpool.Model`, which cannot be stored.
        MpoolError: a request fails as in :func:`mpool.embed`; constructing the object reads no files.

    Example:
        >>> from mpool.integrations.chroma import MpoolEmbeddingFunction
        >>> len(MpoolEmbeddingFunction()(["Where is the cat?"])[0])
        384

    Source:
        https://docs.trychroma.com/docs/embeddings/embedding-functions
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, options: dict[str, Any] | None = None) -> None:
        self.model = requests.stored_name(model, "a collection")
        self.options = dict(options or {})

    def __call__(self, input: Documents) -> Embeddings:
        """Return the vectors of documents, float32 ``(d,)`` each."""
        return _rows(requests.embed(self.model, input, "document", self.options))

    def embed_query(self, input: Documents) -> Embeddings:
        """Return the vectors of queries, float32 ``(d,)`` each."""
        return _rows(requests.embed(self.model, input, "query", self.options))

    @staticmethod
    def name() -> str:
        """``"mpool"``."""
        return "mpool"

    def default_space(self) -> Space:
        """``"cosine"``."""
        return "cosine"

    def supported_spaces(self) -> list[Space]:
        """All spaces that Chroma has."""
        return ["cosine", "l2", "ip"]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"model": self.model, "options": self.options}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> MpoolEmbeddingFunction:
        """Make the function from what :meth:`get_config` returned."""
        MpoolEmbeddingFunction.validate_config(config)
        return MpoolEmbeddingFunction(**config)

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        """Check a configuration.

        Raises:
            InvalidArgument: a name or a type is not that of an argument of the constructor.
        """
        for name, value in config.items():
            kind = {"model": (str, type(None)), "options": (dict, type(None))}.get(name)
            if kind is None:
                raise InvalidArgument(param="config", got=repr(name), allowed="model and options")
            if not isinstance(value, kind):
                refuse(f"config.{name}", value, "a string or None" if name == "model" else "a dict or None")

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """Check that a collection keeps its model: vectors of two models cannot be compared.

        Raises:
            InvalidArgument: the model or the options differ.
        """
        self.validate_config(new_config)
        for name in ("model", "options"):
            if (old_config.get(name) or None) != (new_config.get(name) or None):
                raise InvalidArgument(param=name, got=repr(new_config.get(name)), allowed=repr(old_config.get(name)),
                                      hint="Make another collection: vectors of two models cannot be compared")


def _rows(found: NDArray[Any]) -> Embeddings:
    return list(found.astype(np.float32, copy=False))


__all__ = ["MpoolEmbeddingFunction"]
