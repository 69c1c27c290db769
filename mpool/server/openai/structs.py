"""Requests and answers of OpenAI's protocol, as they are on the wire.

A field that is not here is refused by its name, as OpenAI's own servers do; fields that are here for clients that send
them, and do nothing, say so.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=128)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(min_length=1)]
#: One text, its token ids, or a list of either.
Inputs = Text | Annotated[list[Text | Token | Annotated[list[Token], Meta(min_length=1)]],
                          Meta(min_length=1, max_length=1_000_000)]


class Request(Struct, forbid_unknown_fields=True):
    """A request."""


# ---- models --------------------------------------------------------------------------------------------------------

class ModelCard(Struct):
    """A model; ``capabilities`` is beyond OpenAI's."""

    id: str
    created: int
    capabilities: list[str]
    object: str = "model"
    owned_by: str = "mpool"


class ModelList(Struct):
    """All of them."""

    data: list[ModelCard]
    object: str = "list"


# ---- vectors -------------------------------------------------------------------------------------------------------

class EmbeddingsRequest(Request):
    """Texts to embed; ``user`` does nothing."""

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    task: Literal["query", "document"] | None = None
    user: str | None = None


class Embedding(Struct):
    """One vector: numbers, or base64 of them as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class InputUsage(Struct):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Struct):
    """A vector for each text."""

    data: list[Embedding]
    model: str
    usage: InputUsage
    object: str = "list"


class Document(Struct):
    """A document as an object."""

    text: Text


class RerankRequest(Request):
    """Documents to put in order by how well they answer a query."""

    model: Name
    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=10_000)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False


class RankedResult(Struct, omit_defaults=True):
    """A document's place."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(Struct):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: dict[str, int]


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]
