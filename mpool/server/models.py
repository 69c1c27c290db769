"""The models that clients may name: those given at the start, and keys of the catalogue. Never a path or reference."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidArgument, MpoolError
from .errors import Refusal

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import Pool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Served:
    """A model and its name for clients; ``since``: ``time.time()`` when it was added."""

    name: str
    model: Model
    since: int

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of the model. Reads its files unless they were read before."""
        return self.model.capabilities


class Models:
    """Names that clients may use.

    Args:
        pool: computes.
        refs: models to serve: keys of the catalogue, paths or references, each also as ``NAME=REF``. Reads their files,
            and downloads missing ones.
        catalogue: clients may also name keys of the catalogue whose files are on this machine.
        compute: compute type of all models.

    Raises:
        InvalidArgument: a name is not valid or is taken, or a reference makes no valid name.
        and what :func:`mpool.register` raises.
    """

    def __init__(self, pool: Pool, refs: Iterable[str | os.PathLike[str]] = (), catalogue: bool = True,
                 compute: str = "auto") -> None:
        self.pool, self.catalogue, self.compute = pool, catalogue, compute
        self._served: dict[str, Served] = {}
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
            raise InvalidArgument(f"{ref!r} makes no valid model name", param="model", hint="Name it: NAME=" + ref)
        if name in self._served or (not keyed and load_catalogue().get(name) is not None):
            raise InvalidArgument(f"the model name {name!r} is taken", param="model",
                                  hint="Choose another: NAME=" + ref)
        if keyed:
            model = self.pool.get(ref)
            model.description  # noqa: B018 - reads the files now, not in the first request
        else:
            # registered under its name, so that no error text contains the path
            model = self.pool.register(name.replace(":", "-"), ref)
        self._served[name] = self._made(name, model)

    def _made(self, name: str, model: Model) -> Served:
        from ..model import Model

        return Served(name, Model(model._entry, self.compute), int(time.time()))

    def names(self) -> list[str]:
        """Names of all served models in the order in which they were added."""
        return list(self._served)

    def all(self) -> list[Served]:
        """Models that were given at the start or used since."""
        return list(self._served.values())

    async def listed(self) -> list[Served]:
        """All models that clients may name, with those of the catalogue. Reads files that were not read yet."""
        if self.catalogue:
            from ..models import load_catalogue

            for key in load_catalogue().rows:
                try:
                    await self.find(key)
                except Refusal:
                    continue
        found = self.all()
        await asyncio.to_thread(lambda: [served.capabilities for served in found])
        return found

    async def find(self, name: str) -> Served:
        """Find a model by its name. The suffix ``:latest`` of Ollama's clients is ignored.

        Raises:
            Refusal: the name is unknown, or the model's files are not on this machine.
        """
        found = self._served.get(name)
        if found is None and name.endswith(":latest"):
            name = name[:-7]
            found = self._served.get(name)
        if found is not None:
            return found
        if not self.is_in_catalogue(name):
            raise Refusal("model_not_found", param="model")
        if not await asyncio.to_thread(is_here, name):
            raise Refusal("model_not_found", "The catalogue has it: POST /api/pull fetches it.", "model")
        return self._served.setdefault(name, self._made(name, self.pool.get(name)))

    def is_in_catalogue(self, name: str) -> bool:
        """True if a name is a key of the catalogue, and clients may use these."""
        from ..models import load_catalogue

        return self.catalogue and load_catalogue().get(name) is not None


def is_here(key: str) -> bool:
    """True if the files of a model of the catalogue are on this machine."""
    from ..models import resolve

    try:
        resolve(key, offline=True, progress=False)
    except MpoolError:
        return False
    return True


def name_of(ref: str) -> str:
    """The name for clients of a model that was given by a path or reference."""
    last = ref.rstrip("/").rpartition("/")[2].partition("@")[0]
    return _ENDING.sub("", last)


__all__ = ["Models", "Served", "is_here", "name_of"]
