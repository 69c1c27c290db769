"""Names of the served models: models given at the start, and keys of the catalogue. Clients can never name a path."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import native_calls
from ..errors import InvalidArgument, MpoolError
from .errors import Refusal

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import Pool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
#: Maximum number of aliases.
_MAX_ALIASES = 1000
_GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can use.

    Attributes:
        name: Name for clients.
        model: Model of the pool.
        since: ``time.time()`` when the server added it.
        system: System message of conversations without one, or None. Only aliases have one.
        defaults: Options of the library that a request without them has. Only aliases have some.
    """

    name: str
    model: Model
    since: int
    system: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a conversation, with the alias's system message unless they begin with one."""
        if self.system is None or messages and messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of the model. Reads the metadata in its files if it was not read before."""
        return self.model.capabilities


class Models:
    """Served models by name.

    Args:
        pool: Pool that runs the models.
        refs: Models to serve: keys of the catalogue, paths or references, optionally as ``NAME=REF``. The constructor
            reads the metadata in their files, and downloads missing files.
        catalogue: Serve also the models of the catalogue whose files are on this machine, under their keys.
        compute: Compute type of all models.

    Raises:
        InvalidArgument: A name is not valid or is already taken, or no valid name can be derived from a reference.
        MpoolError: A model cannot be registered; see :func:`mpool.register`.
    """

    def __init__(self, pool: Pool, refs: Iterable[str | os.PathLike[str]] = (), catalogue: bool = True,
                 compute: str = "auto") -> None:
        self.pool, self.catalogue, self.compute = pool, catalogue, compute
        self._served: dict[str, ServedModel] = {}
        self._aliases: dict[str, ServedModel] = {}
        for ref in refs:
            self._add(os.fspath(ref))
        self._given = tuple(self._served)

    def _add(self, ref: str) -> None:
        from ..models import KeyRef, load_catalogue, parse_reference

        name, equals, rest = ref.partition("=")
        if equals and _NAME.fullmatch(name):
            ref = rest
        else:
            name = ""
        reference = parse_reference(ref)
        keyed = isinstance(reference, KeyRef)
        name = name or (ref if keyed else name_of(ref))
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"no valid model name can be derived from {ref!r}", param="model",
                                  hint="Specify a name: NAME=" + ref)
        if name in self._served or (not keyed and name in load_catalogue().rows):
            raise InvalidArgument(f"the model name {name!r} is already taken", param="model",
                                  hint="Specify another name: NAME=" + ref)
        if keyed:
            model = self.pool.get(ref)
            model.description  # noqa: B018 - read the metadata now and not during the first request
        else:
            # register under the name, so that no error message contains the path
            model = self.pool.register(name.replace(":", "-"), ref)
        self._served[name] = self._served_model(name, model)

    def _served_model(self, name: str, model: Model) -> ServedModel:
        from ..model import Model

        return ServedModel(name, Model(model._entry, self.compute), int(time.time()))

    def names(self) -> list[str]:
        """Return the names of all served models in the order in which they were added."""
        return list(self._served)

    def all(self) -> list[ServedModel]:
        """Return the models that were given at the start, and the models of the catalogue that were used since."""
        return list(self._served.values())

    def with_output(self, output: str) -> list[ServedModel]:
        """Return the models given at the start that compute an output for texts. Reads the metadata in their files.

        A reranker, which is a classifier with one label, counts as a classifier if there is no other one.

        Args:
            output: One of :data:`mpool.models.spec.Output`; or a kind of vectors, ``"dense"``, ``"sparse"`` or
                ``"tokens"``.
        """
        given = [self._served[name] for name in self._given]
        found = [(served, settings) for served in given if (settings := served.model.description.embedding) is not None
                 and (output in settings.outputs or "vectors" in settings.outputs and output in settings.embeddings)]
        if output == "labels" and any(not settings.scores for _, settings in found):
            return [served for served, settings in found if not settings.scores]
        return [served for served, _ in found]

    async def listed(self) -> list[ServedModel]:
        """Return all models that clients can use, also those of the catalogue. Reads their metadata if necessary."""
        if self.catalogue:
            from ..models import load_catalogue

            for key in load_catalogue().rows:
                try:
                    await self.find(key)
                except Refusal:
                    continue
        found = self.all() + list(self._aliases.values())
        await native_calls.REQUESTS.arun(lambda: [served.capabilities for served in found])
        return found

    async def find(self, name: str) -> ServedModel:
        """Find a model by name. Ignores the suffix ``:latest``, which clients of Ollama append.

        Raises:
            Refusal: The name is unknown, or the files of the model are not on this machine.
        """
        found = self._named(name)
        if found is None and name.endswith(":latest"):
            name = name[:-7]
            found = self._named(name)
        if found is not None:
            return found
        from ..models import load_catalogue

        row = load_catalogue().get(name) if self.catalogue else None
        if row is None:
            raise Refusal("model_not_found", param="model")
        name = row.key  # other spellings share its entry, so that clients cannot add any number of names
        if not await native_calls.REQUESTS.arun(is_cached, name):
            raise Refusal("model_not_found", "It is in the catalogue: POST /api/pull downloads it.", "model")
        return self._served.get(name) or self._served.setdefault(name, self._served_model(name, self.pool.get(name)))

    def _named(self, name: str) -> ServedModel | None:
        return self._served.get(name) or self._aliases.get(name)

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
                aliases.
        """
        name = name.removesuffix(":latest")
        if not _NAME.fullmatch(name):
            raise Refusal("invalid_value", "A name must have 1 to 128 letters, digits, `.`, `_`, `:`, `+` and `-`, and "
                                           "begin with a letter or digit.", "model")
        found = await self.find(source)
        if name in self._served or self.is_in_catalogue(name):
            raise Refusal("invalid_value", "The name is that of a model, which cannot be replaced.", "model")
        if name not in self._aliases and len(self._aliases) >= _MAX_ALIASES:
            raise Refusal("invalid_value", f"The server has {_MAX_ALIASES:,} aliases, the maximum: delete one.",
                          "model")
        self._aliases[name] = replace(found, name=name, since=int(time.time()),
                                      system=found.system if system is None else system or None,
                                      defaults={**found.defaults, **(defaults or {})})

    async def remove_alias(self, name: str) -> None:
        """Remove an alias.

        Raises:
            Refusal: There is no model of this name, or it is not an alias.
        """
        if self._aliases.pop(name, None) is None and self._aliases.pop(name.removesuffix(":latest"), None) is None:
            await self.find(name)
            raise Refusal("invalid_value", "Only names that /api/create or /api/copy made can be deleted.", "model")

    def is_registered(self, served: ServedModel) -> bool:
        """Return True if the model's name in the pool is one that :meth:`mpool.Pool.register` gave."""
        return self.pool._names.holder(served.model.key) is served.model._entry

    def is_in_catalogue(self, name: str) -> bool:
        """Return True if the server serves the catalogue and the name is one of its keys or aliases."""
        from ..models import load_catalogue

        return self.catalogue and load_catalogue().get(name) is not None


def is_cached(key: str) -> bool:
    """Return True if the files of a model of the catalogue are on this machine."""
    from ..models import resolve

    try:
        resolve(key, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def name_of(ref: str) -> str:
    """Derive the name for clients from a path or reference."""
    last = ref.rstrip("/").rpartition("/")[2].partition("@")[0]
    return _GGUF_SUFFIX.sub("", last)


__all__ = ["Models", "ServedModel", "is_cached", "name_of"]
