"""Names of the served models: models given at the start, and keys of the catalogue. Clients can never name a path."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import native_calls
from ..errors import InvalidArgument, MpoolError
from .errors import Refusal

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import Pool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
_GGUF_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can use.

    Attributes:
        name: Name for clients.
        model: Model of the pool.
        since: ``time.time()`` when the server added it.
    """

    name: str
    model: Model
    since: int

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
        for ref in refs:
            self._add(os.fspath(ref))

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

    async def listed(self) -> list[ServedModel]:
        """Return all models that clients can use, also those of the catalogue. Reads their metadata if necessary."""
        if self.catalogue:
            from ..models import load_catalogue

            for key in load_catalogue().rows:
                try:
                    await self.find(key)
                except Refusal:
                    continue
        found = self.all()
        await native_calls.REQUESTS.arun(lambda: [served.capabilities for served in found])
        return found

    async def find(self, name: str) -> ServedModel:
        """Find a model by name. Ignores the suffix ``:latest``, which clients of Ollama append.

        Raises:
            Refusal: The name is unknown, or the files of the model are not on this machine.
        """
        found = self._served.get(name)
        if found is None and name.endswith(":latest"):
            name = name[:-7]
            found = self._served.get(name)
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
