"""How a model is loaded: the options of :meth:`mpool.Pool.load` and :meth:`mpool.Pool.register` that need a load."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..checks import one_of, refuse, shown
from ..errors import InvalidArgument
from ..models.references import HubRef
from ..models.references import parse as parse_reference
from ..names import ISOLATION, KV_DTYPES, WEIGHTS

if TYPE_CHECKING:
    from ..models import ModelDescription

#: Maximum number of adapters of a model, as in the C core (csrc/models/nn/adapter.h).
MAX_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True)
class LoadOptions:
    """Settings of a model that take effect when it is loaded.

    Attributes:
        isolation: where the model's workers run, one of :data:`mpool.names.ISOLATION`; None: the pool's setting.
        weights: how the model's weights are used, one of :data:`mpool.names.WEIGHTS`; None: the pool's setting.
        kv_dtype: type of the keys and values in the KV cache, one of :data:`mpool.names.KV_DTYPES`; None: the pool's
            setting.
        draft: reference of the draft model; False and None: none.
        adapters: names of the model's adapters, and their absolute paths or references to the hub; None: none.
    """

    isolation: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    draft: str | Literal[False] | None = None
    adapters: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def checked(cls, isolation: object, weights: object, kv_dtype: object,
                draft: str | Literal[False] | None, adapters: object = None) -> LoadOptions:
        """Check the arguments of a caller. ``draft`` must be a valid reference.

        Raises:
            InvalidArgument: a value is not allowed.
        """
        for name, value, allowed in (("isolation", isolation, ISOLATION), ("weights", weights, WEIGHTS),
                                     ("kv_dtype", kv_dtype, KV_DTYPES)):
            if value is not None:
                one_of(name, value, allowed)
        return cls(isolation, weights, kv_dtype, draft, _adapters(adapters))  # type: ignore[arg-type]

    def over(self, other: LoadOptions) -> LoadOptions:
        """Return these options, with those of ``other`` in place of None."""
        return LoadOptions(self.isolation or other.isolation, self.weights or other.weights,
                           self.kv_dtype or other.kv_dtype, other.draft if self.draft is None else self.draft,
                           other.adapters if self.adapters is None else self.adapters)


def refused(found: ModelDescription, name: str, settings: Mapping[str, Any], allowed: str) -> InvalidArgument:
    """Return the error for a setting or an option that the model does not support."""
    return InvalidArgument(param=name, got=shown(settings[name]), allowed=allowed, key=found.key)


def _adapters(given: object) -> tuple[tuple[str, str], ...] | None:
    """Return names and places of adapters, ordered by name; None: not given."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        refuse("adapters", given, "a dict from name to path, or None")
    if len(given) > MAX_ADAPTERS:
        refuse("adapters", len(given), f"a dict with at most {MAX_ADAPTERS} adapters")
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            refuse("adapters", name, "a dict whose keys are names of 1 to 128 letters, digits and . _ + -, starting "
                   "with a letter or digit")
    return tuple(sorted((name, _place(name, path)) for name, path in given.items()))


def _place(name: str, path: object) -> str:
    """Return the absolute path of an adapter, or its reference to the hub.

    Raises:
        InvalidArgument: ``path`` is not a path, or is an invalid reference.
    """
    try:
        found = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        found = None
    if not isinstance(found, str) or not found:
        refuse(f"adapters[{name!r}]", path, "the path of a PEFT folder or of a GGUF file, or a reference to the hub: "
               "owner/name")
    if isinstance(path, str) and not os.path.exists(found):
        try:
            if "/" in found and isinstance(parse_reference(found), HubRef):
                return found.strip()
        except InvalidArgument as error:
            error.rename({"model": f"adapters[{name!r}]"})
            raise
    return os.path.abspath(found)


#: Options that leave every setting to the pool's configuration.
AS_CONFIGURED = LoadOptions()

__all__ = ["AS_CONFIGURED", "LoadOptions", "refused"]
