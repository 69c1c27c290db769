"""A model as callers hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .errors import InvalidArgument, WrongCapability

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from .images import ImageInput
    from .models import ModelDescription
    from .pool import Pool
    from .results import Completion
    from .runtime.entry import Entry
    from .tasks.images_result import Pictures
    from .tasks.options import EmbedOptions, ImageOptions, PictureOptions, RerankOptions, TextOptions
    from .tasks.rerank import Ranking
    from .tasks.streams import Stream
    from .tasks.text_embedding import EmbedIterator
    from .tasks.text_to_image import PictureStream


class Model:
    """A model of a pool. Made by :func:`mpool.get`, :func:`mpool.load` and :func:`mpool.register`.

    It holds a name, not the weights: they are loaded on first use, and again if they were unloaded since. It pickles
    as its reference and settings, so that it can be sent to other processes. Its methods are the functions of the
    same name with the model filled in.

    Example:
        >>> model = mpool.get("all-MiniLM-L6-v2")
        >>> model.embed("A sentence.", "query").shape
        (384,)
    """

    __slots__ = ("_entry", "_compute", "__weakref__")

    def __init__(self, entry: Entry, compute: str = "auto") -> None:
        self._entry, self._compute = entry, compute

    @property
    def key(self) -> str:
        """Its name in the pool."""
        return self._entry.key

    @property
    def ref(self) -> str:
        """What its files are found by."""
        return self._entry.ref

    @property
    def pool(self) -> Pool:
        """The pool it belongs to."""
        pool: Any = self._entry.pool
        found: Pool = pool
        return found

    @property
    def capability(self) -> str:
        """``"text_embedding"``, ``"text_to_text"``, ``"image_embedding"``, ``"vision"`` or ``"text_to_image"``; the
        first of several."""
        return self._entry.capability

    @property
    def capabilities(self) -> tuple[str, ...]:
        """All that it is for: a model of images and texts in one space is for two. Reads its files."""
        also = ("text_to_text",) if self._entry.capability == "vision" else ()
        return (*(part.capability for part in self._entry.parts()), *also)

    @property
    def description(self) -> ModelDescription:
        """What its files say; reads them, and fetches them if they are not here."""
        return self._entry.describe()

    @property
    def dimensions(self) -> int:
        """Components of its vectors. Raises WrongCapability for a model that gives none."""
        image = self._entry.describe().image
        if image is not None:
            return image.output_size
        settings = self._entry.pool._require(self._entry, "text_embedding").describe().embedding
        assert settings is not None
        if settings.scores:
            raise WrongCapability("is a reranker, which has no vectors", key=self.key)
        return settings.truncate_dim or settings.output_size

    @property
    def context_length(self) -> int:
        """Tokens that it takes: of a text to embed, or of prompt and answer together. Raises WrongCapability for a
        model that takes none."""
        description = self._entry.describe()
        if description.image is not None:
            description = self._entry.pool._require(self._entry, "text_embedding").describe()
        if description.embedding is not None:
            return description.embedding.max_tokens
        if description.drawing is not None:
            raise WrongCapability("is a text_to_image model, which takes texts of any length and sees their beginning",
                                  key=self.key)
        assert description.generation is not None
        return description.generation.context_length

    def embed(self, inputs: str | Sequence[str], task: Literal["query", "document"] | None = None,
              **options: Unpack[EmbedOptions]) -> NDArray[Any]:
        """Vectors of a text or of texts; see :func:`mpool.embed`."""
        return self.pool.embed(inputs, self, task=task, **options)

    def embed_image(self, images: ImageInput | Sequence[ImageInput], **options: Unpack[ImageOptions]) -> NDArray[Any]:
        """Vectors of an image or of images; see :func:`mpool.embed_image`."""
        return self.pool.embed_image(images, self, **options)

    @overload
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str, *, stream: Literal[False] = False,
               **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str, *, stream: Literal[True],
               **sampling: Unpack[TextOptions]) -> Stream: ...
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str, *, stream: bool = False,
               **sampling: Any) -> Completion | Stream:
        """An answer to a question about images; see :func:`mpool.vision`."""
        return self.pool.vision(images, prompt, self, stream=stream, **sampling)  # type: ignore[call-overload]

    @overload
    def generate_image(self, prompt: str, *, stream: Literal[False] = False,
                       **options: Unpack[PictureOptions]) -> Pictures: ...
    @overload
    def generate_image(self, prompt: str, *, stream: Literal[True],
                       **options: Unpack[PictureOptions]) -> PictureStream: ...
    def generate_image(self, prompt: str, *, stream: bool = False, **options: Any) -> Pictures | PictureStream:
        """Pictures of what a text says; see :func:`mpool.generate_image`."""
        return self.pool.generate_image(prompt, self, stream=stream, **options)  # type: ignore[call-overload]

    def batch_embed(self, texts: Iterable[str], task: Literal["query", "document"] | None = None,
                    **options: Unpack[EmbedOptions]) -> NDArray[Any]:
        """Vectors of texts, always ``(n, d)``; see :func:`mpool.embed`."""
        if isinstance(texts, str):
            raise InvalidArgument("texts is one str, allowed: a list of str", hint="embed takes a single text")
        return self.pool.embed(list(texts), self, task=task, **options)

    def embed_iter(self, texts: Iterable[str], task: Literal["query", "document"] | None = None, *,
                   batch_size: int | None = None, **options: Unpack[EmbedOptions]) -> EmbedIterator:
        """Vectors of any number of texts, lazily; see :func:`mpool.embed_iter`."""
        return self.pool.embed_iter(texts, self, task=task, batch_size=batch_size, **options)

    def rerank(self, query: str, documents: Sequence[str], *, top_k: int | None = None,
               **options: Unpack[RerankOptions]) -> Ranking:
        """Documents by how well they answer a query; see :func:`mpool.rerank`."""
        return self.pool.rerank(query, documents, self, top_k=top_k, **options)

    @overload
    def generate(self, prompt: str | Sequence[int], *, stream: Literal[False] = False,
                 **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def generate(self, prompt: str | Sequence[int], *, stream: Literal[True],
                 **sampling: Unpack[TextOptions]) -> Stream: ...
    def generate(self, prompt: str | Sequence[int], *, stream: bool = False, **sampling: Any) -> Completion | Stream:
        """Continues a text; see :func:`mpool.generate`."""
        return self.pool.generate(prompt, self, stream=stream, **sampling)  # type: ignore[call-overload]

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False,
             **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True],
             **sampling: Unpack[TextOptions]) -> Stream: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False,
             **sampling: Any) -> Completion | Stream:
        """Answers a conversation; see :func:`mpool.chat`."""
        return self.pool.chat(messages, self, stream=stream, **sampling)  # type: ignore[call-overload]

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; see :func:`mpool.count_tokens`."""
        return self.pool.count_tokens(text, self)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see :func:`mpool.tokenize`."""
        return self.pool.tokenize(text, self, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = True) -> str:
        """Text of token ids; see :func:`mpool.detokenize`."""
        return self.pool.detokenize(ids, self, skip_special=skip_special)

    def unload(self, *, timeout: float | None = None) -> None:
        """Frees its memory; see :func:`mpool.unload`."""
        self.pool.unload(self, timeout=timeout)

    def __repr__(self) -> str:
        compute = "" if self._compute == "auto" else f", compute={self._compute!r}"
        return f"mpool.Model({self.key!r}{compute})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._entry is other._entry and self._compute == other._compute

    def __hash__(self) -> int:
        return hash((id(self._entry), self._compute))

    def __reduce__(self) -> Any:
        from ._runtime import is_default

        pool = None if is_default(self.pool) else self.pool
        entry = self._entry
        return _restore, (pool, entry.key, entry.ref, entry.overrides, self._compute, entry.isolation)


def _restore(pool: Pool | None, key: str, ref: str, overrides: Mapping[str, Any], compute: str,
             isolation: str | None = None) -> Model:
    from ._runtime import default_pool

    return (pool or default_pool())._restore(key, ref, overrides, compute, isolation)
