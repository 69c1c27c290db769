"""Names of the served models: models given at the start, and keys of the catalogue. Clients can never name a path.

``MODEL:ADAPTER`` is the name of a model with one of its adapters (LoRA): ``mpool.generate(..., adapter=ADAPTER)``.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..checks import nearest, shown
from ..errors import InvalidArgument, MpoolError
from ..host import native_calls
from ..model import MissingModel, Model
from ..models.catalogue import load as load_catalogue
from ..models.describing import resolve
from ..models.formats.adapters import check_places
from ..models.references import KeyRef
from ..models.references import parse as parse_reference
from ..models.similar_names import suggest
from ..names import CAPABILITIES
from ..runtime.load_options import LoadOptions
from ..stores import STORES
from .errors import Refusal

if TYPE_CHECKING:
    import asyncio

    from ..models import ModelDescription
    from ..models.spec import EmbeddingSettings
    from ..pool import Pool

_NAME = re.compile(r"(?!.*(?:\.\.|//|/$))[A-Za-z0-9][A-Za-z0-9._:+/-]{0,127}")
#: Maximum number of aliases, and of adapters that an error message names.
_MAX_ALIASES, _MAX_NAMED = STORES["aliases"].entries or 0, 20
#: Maximum bytes of the names, system messages and options of all aliases.
_MAX_ALIAS_BYTES = STORES["aliases"].bytes or 0
#: Capabilities of the models that have a tokenizer for texts.
_TOKENIZING = frozenset(("text_embedding", "text_to_text", "vision"))
_GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can use.

    Attributes:
        name: Name for clients.
        model: Model of the pool.
        since: ``time.time()`` when the server added it.
        system: System message of conversations without one, or None. Only aliases have one.
        defaults: Options of the library for requests that do not set them. Aliases may have any; a model with an
            adapter has ``adapter``. Other models have none.
        parent: Name of the model without the adapter; None: the name selects no adapter.
    """

    name: str
    model: Model
    since: int
    system: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parent: str | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that clients can select with ``NAME:ADAPTER``, in alphabetical order."""
        return () if "adapter" in self.defaults else self.model.adapters

    @property
    def target(self) -> dict[str, Any]:
        """Options of the library that name the model, and its adapter, for requests without sampling options."""
        adapter = self.defaults.get("adapter")
        return {"model": self.model} if adapter is None else {"model": self.model, "adapter": adapter}

    def with_adapter(self, adapter: str) -> ServedModel:
        """Return the model with one of its :attr:`adapters`."""
        return replace(self, name=f"{self.name}:{adapter}", defaults={**self.defaults, "adapter": adapter},
                       parent=self.name)

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a conversation, with the alias's system message unless they begin with one."""
        if self.system is None or messages and messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of the model. Reads the metadata in its files if it was not read before."""
        return self.model.capabilities


@dataclass(slots=True)
class Download:
    """A download in progress.

    Attributes:
        ended: Done when the download has ended.
        done: Bytes so far.
        total: All bytes, or None.
    """

    ended: asyncio.Future[None]
    done: int = 0
    total: int | None = None

    def report(self, done: int, total: int | None) -> None:
        """Set the bytes. Another total is that of another source, whose bytes count from 0."""
        self.done = done if total != self.total else max(self.done, done)
        self.total = total


class Models:
    """Served models by name.

    Args:
        pool: Pool that runs the models.
        refs: Models to serve: keys of the catalogue, paths or references, optionally as ``NAME=REF``. The constructor
            reads the metadata in their files, and downloads missing files.
        catalogue: Serve also the models of the catalogue whose files are on this machine, under their keys.
        compute: Compute type of all models.
        adapters: Adapters of the models in ``refs``, as ``NAME=PATH``, or ``MODEL:NAME=PATH`` if there are several
            models. Paths as for :func:`mpool.load`. The constructor reads their metadata.

    Attributes:
        downloads: Key of the catalogue -> download in progress; see :func:`mpool.server.ollama_models.fetch`.

    Raises:
        InvalidArgument: A name is not valid or is already taken, no valid name can be derived from a reference, or an
            adapter belongs to no model.
        MpoolError: A model cannot be registered; see :func:`mpool.register`. An adapter cannot be read, or does not fit
            its model; see :func:`mpool.load`.
    """

    def __init__(self, pool: Pool, refs: Iterable[str | os.PathLike[str]] = (), catalogue: bool = True,
                 compute: str = "auto", adapters: Iterable[str] = ()) -> None:
        self.pool, self.catalogue, self.compute = pool, catalogue, compute
        self._served: dict[str, ServedModel] = {}
        self._aliases: dict[str, ServedModel] = {}
        self._alias_bytes: dict[str, int] = {}
        self.downloads: dict[str, Download] = {}
        given = read_refs(refs)  # before files are read or downloaded
        self._given = tuple(given)
        split = [split_adapter(one, self._given) for one in adapters]
        for _, _, name, path in split:
            check_places(LoadOptions.checked(None, None, None, None, {name: path}).adapters or (),
                         pool.config.model_folders)
        for name, (ref, keyed) in given.items():
            self._open(name, ref, keyed)
        self._add_adapters(split)

    def _open(self, name: str, ref: str, keyed: bool) -> None:
        """Read the files of a model, and serve it."""
        if keyed:
            model = self.pool.get(ref)
            model.description  # noqa: B018 - read the metadata now and not during the first request
        else:
            # register under the name, so that no error message contains the path
            model = self.pool.register(name.replace(":", "-").replace("/", "--"), ref)
        self._served[name] = self._served_model(name, model)

    def _add_adapters(self, adapters: Iterable[tuple[str, str, str, str]]) -> None:
        found: dict[str, tuple[ServedModel, dict[str, str]]] = {}
        for given, model, name, path in adapters:
            served = self._served[model]
            paths = found.setdefault(served.model.key, (served, {}))[1]  # two names may share an entry
            if paths.setdefault(name, path) != path:
                raise InvalidArgument(param="adapter", got=given, allowed=f"one path for the name {name!r}")
        for served, paths in found.values():
            served.model.set_adapters(paths)

    def _served_model(self, name: str, model: Model) -> ServedModel:
        return ServedModel(name, model.with_compute(self.compute), int(time.time()))

    def names(self) -> list[str]:
        """Return the names of all served models in the order in which they were added."""
        return list(self._served)

    def all(self) -> list[ServedModel]:
        """Return the models that were given at the start, and the models of the catalogue that were used since."""
        return list(self._served.values())

    def here(self) -> list[ServedModel]:
        """Return :meth:`all`, and the models of the catalogue whose files are on this machine. Reads no files."""
        keys = [key for key in load_catalogue().rows if key not in self._served and is_cached(key)] \
            if self.catalogue else []
        return [*self.all(), *(self._served_model(key, self.pool.get(key)) for key in keys)]

    def at_start(self, names: Iterable[str], param: str) -> list[ServedModel]:
        """Return the models with these names, for an option that loads them before the first request.

        Args:
            names: Names of :meth:`here`.
            param: The option, for the error.

        Raises:
            InvalidArgument: The server does not serve a model of this name, or its files are not on this machine.
        """
        wanted = list(names)
        known = {served.name: served for served in self.here()} if wanted else {}
        for name in wanted:
            if name not in known:
                close = nearest(name, known, 1)
                raise InvalidArgument(param=param, got=shown(name), allowed="the name of a model that is served",
                                      hint=f"Did you mean {close[0]}?" if close else "Name the model with --model, too")
        return [known[name] for name in wanted]

    def with_output(self, output: str) -> list[ServedModel]:
        """Return the models given at the start that compute an output for texts. Reads the metadata in their files.

        A reranker, which is a classifier with one label, counts as a classifier if there is no other one.

        Args:
            output: One of :data:`mpool.models.spec.Output`; or a kind of vectors, ``"dense"``, ``"sparse"`` or
                ``"tokens"``.
        """
        given = [self._served[name] for name in self._given]
        return _with_output([(served, served.model.description) for served in given], output)

    def with_tokenizer(self) -> list[ServedModel]:
        """Return the models given at the start that have a tokenizer. If none of them has one, return those of
        :meth:`all` that have one. Reads the metadata in their files."""
        for served in ([self._served[name] for name in self._given], self.all()):
            found = [one for one in served if not _TOKENIZING.isdisjoint(one.capabilities)]
            if found:
                return found
        return []

    async def listed(self) -> list[ServedModel]:
        """Return all models that clients can use, also those of the catalogue, each before its adapters. Reads their
        metadata if necessary."""
        if self.catalogue:
            for key in load_catalogue().rows:
                try:
                    await self.find(key)
                except Refusal:
                    continue
        found = []
        for served in self.all():
            found.append(served)
            found += [one for one in map(served.with_adapter, served.adapters) if self._named(one.name) is None]
        found += self._aliases.values()
        await native_calls.REQUESTS.arun(lambda: [served.capabilities for served in found])
        return found

    async def find(self, name: str) -> ServedModel:
        """Find a model by name, or a model with an adapter by ``MODEL:ADAPTER``.

        Ignores the suffix ``:latest``, which clients of Ollama append, unless an adapter has this name.

        Raises:
            Refusal: The name is unknown, the model has no adapter of this name, or the files of the model are not on
                this machine.
        """
        found = self.known(name)
        if found is not None:
            if not found.model.is_current():
                await native_calls.REQUESTS.arun(self.pool.get, found.model.key)
            return found
        name = name.removesuffix(":latest")

        row = load_catalogue().get(name) if self.catalogue else None
        if row is None:
            raise Refusal("model_not_found", await native_calls.REQUESTS.arun(self._unknown, name), "model")
        name = row.key  # other spellings share its entry, so that clients cannot add any number of names
        if not await native_calls.REQUESTS.arun(is_cached, name):
            raise Refusal("model_not_found", f"{name} is in the catalogue: POST /api/pull downloads it.", "model")
        return self._served.get(name) or self._served.setdefault(name, self._served_model(name, self.pool.get(name)))

    def known(self, name: str) -> ServedModel | None:
        """Return the model with a name, as :meth:`find`; None: no model that was used or given has it."""
        for candidate in (name, name.removesuffix(":latest")):
            found = self._named(candidate) or self._adapted(candidate)
            if found is not None:
                return found
        return None

    def _named(self, name: str) -> ServedModel | None:
        return self._served.get(name) or self._aliases.get(name)

    def _parent(self, name: str) -> tuple[ServedModel | None, str]:
        """Split ``MODEL:ADAPTER``. Returns the model, or None if it is not served, and the rest of the name."""
        base, _, adapter = name.rpartition(":")
        found = self._named(base)
        if found is None and base and self.catalogue:
            row = load_catalogue().get(base)
            found = None if row is None else self._served.get(row.key)
        return found, adapter

    def _adapted(self, name: str) -> ServedModel | None:
        parent, adapter = self._parent(name)
        return parent.with_adapter(adapter) if parent is not None and adapter in parent.adapters else None

    def _unknown(self, name: str) -> str:
        """Return the part of an error message that has an unknown name, and the adapters or models it may mean."""
        adapters = self._adapters_of(name)
        if adapters:
            return adapters
        known = {own: own for own in (*self._served, *self._aliases)}
        if self.catalogue:
            known = {**load_catalogue().names(), **known}
        keys, spelling = suggest(name, known)
        if not keys:
            return f"{shown(name)} is unknown."
        return f"{shown(name)} is unknown; " + (f"did you mean {' or '.join(keys)}?" if spelling
                                                else f"known models of its family: {', '.join(keys)}.")

    def suggest(self, wanted: str | None) -> str:
        """Return the part of an error message that names models of a capability. Reads no files: a model whose files
        are not read now is left out.

        Args:
            wanted: As :attr:`mpool.errors.WrongCapability.wanted`.
        """
        if wanted is None:
            return ""
        read = ((served, served.model.description_if_read) for served in self.all())
        described = [(served, found) for served, found in read if found is not None]
        if wanted in CAPABILITIES:
            fitting = [served for served, found in described if wanted in found.capabilities]
        else:
            fitting = _with_output([(served, found) for served, found in described if served.name in self._given],
                                   wanted)
        names = [served.name for served in fitting[:_MAX_NAMED]]
        return f" Models that fit: {', '.join(names)}." if names else ""

    def _adapters_of(self, name: str) -> str:
        """Return the part of an error message that names the adapters of the model in ``MODEL:ADAPTER``."""
        parent, _ = self._parent(name)
        if parent is None:
            return ""
        names = [f"{parent.name}:{adapter}" for adapter in parent.adapters]
        if not names:
            return f"The model {parent.name} has no adapters."
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"The adapters of {parent.name} are {', '.join(names[:_MAX_NAMED])}{more}."

    async def add_alias(self, name: str, source: str, system: str | None = None,
                        defaults: Mapping[str, Any] | None = None) -> None:
        """Serve a model under another name. The name lasts as long as the server; it replaces an alias of this name.

        Args:
            name: New name.
            source: Name of a model or of an alias, whose system message and defaults the new one has.
            system: System message instead of that of the source; None: that of the source.
            defaults: Options of the library in addition to those of the source.

        Raises:
            Refusal: The name is not allowed or is that of a model, the source is unknown, or there are too many
                aliases, or too many bytes of them.
        """
        name = name.removesuffix(":latest")
        if not _NAME.fullmatch(name):
            raise Refusal("invalid_value", "A name must have 1 to 128 letters, digits, `.`, `_`, `:`, `+`, `-` and "
                                           "`/`, and begin with a letter or digit.", "model")
        found = await self.find(source)
        if name in self._served or self.is_in_catalogue(name) or self._adapted(name) is not None:
            raise Refusal("invalid_value", "The name is that of a model, which cannot be replaced.", "model")
        if name not in self._aliases and len(self._aliases) >= _MAX_ALIASES:
            raise Refusal("invalid_value", f"The server has {_MAX_ALIASES:,} aliases, the maximum: delete one.",
                          "model")
        made = replace(found, name=name, since=int(time.time()),
                       system=found.system if system is None else system or None,
                       defaults={**found.defaults, **(defaults or {})})
        size = _size(made)
        others = sum(count for other, count in self._alias_bytes.items() if other != name)
        if others + size > _MAX_ALIAS_BYTES:
            raise Refusal("invalid_value", f"The aliases of the server have {others:,} bytes, and this one {size:,}; "
                                           f"{_MAX_ALIAS_BYTES:,} are allowed: delete one.", "system")
        self._aliases[name], self._alias_bytes[name] = made, size

    async def remove_alias(self, name: str) -> None:
        """Remove an alias.

        Raises:
            Refusal: There is no model of this name, or it is not an alias.
        """
        name = name if name in self._aliases else name.removesuffix(":latest")
        self._alias_bytes.pop(name, None)
        if self._aliases.pop(name, None) is None:
            await self.find(name)
            raise Refusal("invalid_value", "Only names that /api/create or /api/copy made can be deleted.", "model")

    def is_registered(self, served: ServedModel) -> bool:
        """Return True if the model's name in the pool is one that :meth:`mpool.Pool.register` gave."""
        return served.model.is_registered

    def is_in_catalogue(self, name: str) -> bool:
        """Return True if the server serves the catalogue and the name is one of its keys or aliases."""
        return self.catalogue and load_catalogue().get(name) is not None


def is_missing(served: ServedModel) -> bool:
    """Return True for a model that the server does not serve: see :meth:`mpool.server.operations.Context.model`."""
    return isinstance(served.model, MissingModel)


async def embedding_of(served: ServedModel) -> EmbeddingSettings | None:
    """Return the settings of an embedding model, reranker or classifier. None: the model is of another kind or missing,
    and the library will refuse the request."""
    if is_missing(served):
        return None
    return await native_calls.REQUESTS.arun(lambda: served.model.description.embedding)


def read_refs(refs: Iterable[str | os.PathLike[str]]) -> dict[str, tuple[str, bool]]:
    """Return the name of each model, with its reference and whether that is a key of the catalogue. Reads no files.

    Args:
        refs: as for :class:`Models`.

    Raises:
        InvalidArgument: a name is not valid or is already taken, or no valid name can be derived from a reference.
    """
    given: dict[str, tuple[str, bool]] = {}
    for one in refs:
        ref = os.fspath(one)
        name, equals, rest = ref.partition("=")
        if equals and _NAME.fullmatch(name) and not ("/" in name and os.path.exists(ref)):
            ref = rest
        elif equals and not name.startswith((".", "/", "~")) and not os.path.exists(ref):
            raise InvalidArgument("the name in NAME=MODEL must be 1 to 128 letters, digits and . _ : + - /, starting "
                                  f"with a letter or digit, got {name!r}", param="model")
        else:
            name = ""
        reference = parse_reference(ref)
        keyed = isinstance(reference, KeyRef)
        name = name or (ref if keyed else name_of(ref))
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"no valid model name can be derived from {ref!r}", param="model",
                                  hint="Specify a name: NAME=" + ref)
        row = None if keyed else load_catalogue().get(name)
        if name in given or (row is not None and row.key.lower() == name.lower()):
            raise InvalidArgument(f"the model name {name!r} is already taken", param="model",
                                  hint="Specify another name: NAME=" + ref)
        given[name] = ref, keyed
    return given


def split_adapter(given: str, models: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Return an option ``--adapter`` with its parts: the model, the name and the path.

    Args:
        given: the option.
        models: names of the server's models.

    Raises:
        InvalidArgument: the name or the path is missing, or the model is none of the server's.
    """
    whole, _, path = given.partition("=")
    model, _, name = whole.rpartition(":")
    if not (name and path) or whole.startswith(":"):
        raise InvalidArgument(param="adapter", got=given, allowed="NAME=PATH or MODEL:NAME=PATH")
    if not model and len(models) == 1:
        model = models[0]
    if model not in models:
        raise InvalidArgument(param="adapter", got=given, allowed="MODEL:NAME=PATH with one of the models "
                              f"{', '.join(models) or 'given with --model'}")
    return given, model, name, path


def _size(alias: ServedModel) -> int:
    """Return the bytes in memory of what a client chose of an alias."""
    found, parts = 0, [alias.name, alias.system, *alias.defaults, *alias.defaults.values()]
    while parts:
        part = parts.pop()
        found += sys.getsizeof(part)
        if isinstance(part, (list, tuple)):
            parts += part
    return found


def _with_output(described: list[tuple[ServedModel, ModelDescription]], output: str) -> list[ServedModel]:
    """Return the models that compute an output; see :meth:`Models.with_output`."""
    found = [(served, settings) for served, description in described if (settings := description.embedding) is not None
             and (output in settings.outputs or "vectors" in settings.outputs and output in settings.embeddings)]
    if output == "labels" and any(not settings.scores for _, settings in found):
        return [served for served, settings in found if not settings.scores]
    return [served for served, _ in found]


def is_cached(key: str) -> bool:
    """Return True if the files of a model of the catalogue are on this machine."""
    try:
        resolve(key, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def name_of(ref: str) -> str:
    """Derive the name for clients from a path or reference."""
    last = ref.rstrip("/").rpartition("/")[2].partition("@")[0]
    return _GGUF_SUFFIX.sub("", last)


__all__ = ["Download", "Models", "ServedModel", "embedding_of", "is_cached", "is_missing", "name_of", "read_refs",
           "split_adapter"]
