"""How a model is loaded: the options of :meth:`mpool.Pool.load` and :meth:`mpool.Pool.register` that need a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checks import one_of
from ..names import ISOLATION, KV_DTYPES, WEIGHTS


@dataclass(frozen=True)
class LoadOptions:
    """Settings of a model that take effect when it is loaded.

    Attributes:
        isolation: where the model's workers run, one of :data:`mpool.names.ISOLATION`; None: the pool's setting.
        weights: how the model's weights are used, one of :data:`mpool.names.WEIGHTS`; None: the pool's setting.
        kv_dtype: type of the keys and values in the KV cache, one of :data:`mpool.names.KV_DTYPES`; None: ``"auto"``.
        draft: reference of the draft model; False and None: none.
    """

    isolation: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    draft: str | Literal[False] | None = None

    @classmethod
    def checked(cls, isolation: object, weights: object, kv_dtype: object,
                draft: str | Literal[False] | None) -> LoadOptions:
        """Check the arguments of a caller. ``draft`` must be a valid reference.

        Raises:
            InvalidArgument: a value is not allowed.
        """
        for name, value, allowed in (("isolation", isolation, ISOLATION), ("weights", weights, WEIGHTS),
                                     ("kv_dtype", kv_dtype, KV_DTYPES)):
            if value is not None:
                one_of(name, value, allowed)
        return cls(isolation, weights, kv_dtype, draft)  # type: ignore[arg-type]

    def over(self, other: LoadOptions) -> LoadOptions:
        """Return these options, with those of ``other`` in place of None."""
        return LoadOptions(self.isolation or other.isolation, self.weights or other.weights,
                           self.kv_dtype or other.kv_dtype, other.draft if self.draft is None else self.draft)


#: Everything as the pool's configuration says.
AS_CONFIGURED = LoadOptions()

__all__ = ["AS_CONFIGURED", "LoadOptions"]
