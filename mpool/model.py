"""Handle of a model in a pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .api.methods import ModelVerbs
from .checks import missing_attribute, one_of, refuse
from .errors import InvalidArgument, WrongCapability
from .host.resources import list_of_caller, typed
from .models.formats.adapters import check_places
from .names import COMPUTE
from .runtime import swapping
from .runtime.load_options import LoadOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .models import ModelDescription
    from .pool import Pool
    from .runtime.entry import Entry
    from .runtime.health import Pong
    from .tokenizers import Tokenizer


class Model(ModelVerbs):
    """Handle of a model in a pool, returned by :func:`mpool.get`, :func:`mpool.load` and :func:`mpool.register`.

    The handle holds a name, not the weights: the pool loads them on first use, and again after they were unloaded. It
    pickles as its reference and settings, so it can be sent to other processes. Its methods are the functions of the
    same name with ``model`` filled in.

    Example:
        >>> model = mpool.get("all-MiniLM-L6-v2")
        >>> model.embed("A sentence.", "query").shape
        (384,)
    """

    __slots__ = ("_held", "_compute", "__weakref__")

    def __init__(self, entry: Entry, compute: str = "auto") -> None:
        self._compute = compute
        self._hold(entry)

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

    @property
    def _entry(self) -> Entry:
        """Entry of the model that has the name now; :func:`mpool.swap` gives the name to another."""
        found = self._held
        if found.replacement.successor is not None:
            found = found.latest()
            self._hold(found)
        return found

    def _hold(self, entry: Entry) -> None:
        """Lead to an entry, which moves the handle when it loses its name."""
        self._held = entry
        entry.replacement.handles[id(self)] = self

    @property
    def key(self) -> str:
        """Name of the model in the pool."""
        return self._entry.key

    @property
    def ref(self) -> str:
        """Reference of the model's files, which is a key, a path, or a repository such as ``owner/name``."""
        return self._entry.ref

    @property
    def pool(self) -> Pool:
        """The pool of the model."""
        pool: Any = self._entry.pool
        found: Pool = pool
        return found

    @property
    @typed
    def capability(self) -> str:
        """``"text_embedding"``, ``"text_to_text"``, ``"image_embedding"``, ``"vision"`` or ``"text_to_image"``. The
        first one, if the model has several."""
        return self._entry.capability

    @property
    @typed
    def capabilities(self) -> tuple[str, ...]:
        """All capabilities of the model. A model that embeds images and texts in one space has two. Reads its files."""
        return self._entry.describe().capabilities

    @property
    @typed
    def description(self) -> ModelDescription:
        """Description of the model's files. Reads them, and downloads them if they are missing."""
        return self._entry.describe()

    @typed
    def description_of(self, capability: str) -> ModelDescription:
        """Return the description of the network that serves a capability: a model that embeds images and texts has
        two. Reads the files.

        Args:
            capability: one of :attr:`capabilities`.

        Raises:
            WrongCapability: the model does not have the capability.
        """
        return self.pool._names.require(self._entry, capability).describe()

    @property
    def description_if_read(self) -> ModelDescription | None:
        """As :attr:`description` if the files are read already; None: they are not. Reads no file."""
        return self._entry.files.known

    @property
    @typed
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with the ids and bytes of single tokens, and their number. Reads the files.

        Raises:
            InvalidArgument: the model has none.
        """
        return self._entry.tokenizer()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that :func:`mpool.load`, :func:`mpool.register` or :func:`mpool.swap` added, in
        alphabetical order. ``description.embedding.adapters`` are those of the model's own files."""
        return self._entry.setup.adapter_names

    @typed
    def set_adapters(self, adapters: Mapping[str, str | os.PathLike[str]]) -> None:
        """Set the adapters as ``mpool.load(model, adapters=adapters)`` does, but without loading the model.

        Args:
            adapters: paths by name.

        Raises:
            InvalidArgument, MpoolError: as for :func:`mpool.load`.
        """
        options = LoadOptions.checked(None, None, None, None, adapters)
        check_places(options.adapters or (), self.pool.config.model_folders)
        self._entry.set_loading(options)

    @typed
    def with_compute(self, compute: str) -> Model:
        """Return a handle of the same model whose requests use another compute type by default."""
        one_of("compute", compute, COMPUTE)
        return Model(self._entry, compute)

    @property
    def is_registered(self) -> bool:
        """True if the name is one that :func:`mpool.register` gave."""
        return self.pool._names.holder(self.key) is self._entry

    @property
    def core_keys(self) -> tuple[str, ...]:
        """The keys of :func:`mpool.ps` and :func:`mpool.health` that belong to the model: one for each compute type and
        capability that was used."""
        return tuple(self._entry.core_keys())

    @property
    def revision(self) -> int:
        """Number of the model's files as they were read. A request runs on one revision; another number means that the
        files were read again, or that another model has the name."""
        return self._entry.revision

    @typed
    def is_current(self) -> bool:
        """Return True unless the next request reads files again because they changed."""
        return swapping.is_current(self._entry)

    @typed
    def changed_file(self) -> str | None:
        """Return the first file that changed since it was read; None: none changed."""
        return self._entry.changed()

    @property
    @typed
    def dimensions(self) -> int:
        """Number of components of the model's vectors.

        Raises:
            WrongCapability: the model computes no embeddings.
        """
        image = self._entry.describe().image
        if image is not None:
            return image.output_size
        settings = self.description_of("text_embedding").embedding
        assert settings is not None
        if "vectors" not in settings.outputs:
            raise WrongCapability(f"is {settings.kind}, which computes no embeddings", key=self.key)
        return settings.truncate_dim or settings.output_size

    @property
    @typed
    def context_length(self) -> int:
        """Maximum number of tokens, of a text to embed or of prompt and completion together.

        Raises:
            WrongCapability: the model has no such limit: it generates images, or embeds images only.
        """
        description = self._entry.describe()
        if description.image is not None:
            description = self.description_of("text_embedding")
        if description.embedding is not None:
            return description.embedding.max_tokens
        if description.pipeline is not None:
            raise WrongCapability("is a text_to_image model, which has no context length: it truncates long prompts",
                                  key=self.key)
        if description.generation is None:
            raise WrongCapability(f"is a {description.capability} model, which has no context length", key=self.key)
        return description.generation.context_length

    @typed
    def batch_embed(self, texts: Iterable[str], task: Literal["query", "document"] | None = None,
                    **options: Any) -> NDArray[Any]:
        """Embed several texts; see :func:`mpool.embed`.

        Args:
            texts: any iterable of texts, read completely before the request.
            task: as for :func:`mpool.embed`.
            **options: other options of :func:`mpool.embed`.

        Returns:
            Array ``(n, d)``, also for one text; float32, or the dtype that ``precision`` selects.

        Raises:
            InvalidArgument: ``texts`` is a single str, or not iterable.
            MpoolError: as for :func:`mpool.embed`.
        """
        if isinstance(texts, str):
            raise InvalidArgument(param="texts", got="a single str", allowed="an iterable of str",
                                  hint="Use embed for a single text")
        if not hasattr(texts, "__iter__"):
            refuse("texts", texts, "an iterable of str")
        return self.embed(list_of_caller(texts), task, **options)

    @typed
    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text. Arguments and errors are those of :func:`mpool.count_tokens`."""
        return self.pool.count_tokens(text, self)

    @typed
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Convert a text to token ids. Arguments and errors are those of :func:`mpool.tokenize`."""
        return self.pool.tokenize(text, self, add_special=add_special, parse_special=parse_special)

    @typed
    def detokenize(self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = True) -> str:
        """Convert token ids to text. Arguments and errors are those of :func:`mpool.detokenize`."""
        return self.pool.detokenize(ids, self, skip_special=skip_special)

    @typed
    def unload(self, *, timeout: float | None = None) -> None:
        """Free the model's memory. ``timeout`` and errors are those of :func:`mpool.unload`."""
        self.pool.unload(self, timeout=timeout)

    @typed
    def ping(self) -> tuple[Pong, ...]:
        """Report the state of every worker of the model. Loads nothing. Result and errors are those of
        :meth:`mpool.Pool.ping`."""
        return self.pool.ping(self)

    @typed
    def check(self, *, timeout: float | None = None) -> float:
        """Check that the model computes; see :meth:`mpool.Pool.check`."""
        return self.pool.check(self, timeout=timeout)

    def __repr__(self) -> str:
        compute = "" if self._compute == "auto" else f", compute={self._compute!r}"
        return f"mpool.Model({self.key!r}{compute})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._entry is other._entry and self._compute == other._compute

    def __hash__(self) -> int:
        return hash((id(self._held.pool), self._held.key, self._compute))  # constant, also if the model is swapped

    def __reduce__(self) -> Any:
        from .api.functions import is_default

        pool = None if is_default(self.pool) else self.pool
        entry = self._entry
        return _restore, (pool, entry.key, entry.ref, entry.overrides, self._compute, entry.loading)


class MissingModel(Model):
    """Handle of a model that does not exist: a request with it checks its arguments, and raises an error where it
    would look the model up.

    Args:
        key: name of the model in the request.
        error: returns the error.
    """

    __slots__ = ("_error", "_key")

    def __init__(self, key: str, error: Callable[[], Exception]) -> None:
        self._compute, self._key, self._error = "auto", key, error

    @property
    def key(self) -> str:
        """Name of the model in the request."""
        return self._key

    @property
    def _entry(self) -> Entry:
        raise self._error()


def _restore(pool: Pool | None, key: str, ref: str, overrides: Mapping[str, Any], compute: str,
             options: LoadOptions) -> Model:
    from .api.functions import default_pool

    return (pool or default_pool())._restore(key, ref, overrides, compute, options)
