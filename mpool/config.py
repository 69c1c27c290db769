"""What a pool can be told: one frozen dataclass, one field an option."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidArgument

#: Field -> (kinds, lowest, highest). 0 leaves a value to the environment variable or rule that the field names.
_RANGES: dict[str, tuple[tuple[type[int] | type[float], ...], float, float]] = {
    "threads": ((int,), 0, 256),
    "memory_bytes": ((int,), 0, 2**62),
    "step_budget": ((int, float), 0.0, 60.0),
    "load_timeout": ((int, float), 0.01, 86400.0),
    "shutdown_grace": ((int, float), 0.0, 3600.0),
    "embed_queue_capacity": ((int,), 1, 1_000_000),
    "prompt_queue_capacity": ((int,), 1, 1_000_000),
    "max_embed_inputs": ((int,), 1, 2**31 - 1),
}


@dataclass(frozen=True)
class PoolConfig:
    """Options of a :class:`mpool.Pool`. Immutable; checked when made.

    Attributes:
        threads: compute threads in all; 0: ``MPOOL_THREADS``, else the CPUs this process may use.
        memory_bytes: limit for models, caches and queues together, in bytes; 0: ``MPOOL_MEMORY_MB``, else a share of
            what the machine or its cgroup offers. A model that does not fit beside those that are loaded is refused
            with MemoryExhausted: nothing is evicted to make room for it, so unload one.
        step_budget: seconds that one step of computing may take while other calls wait; 0: ``MPOOL_STEP_BUDGET_MS``.
        load_timeout: seconds without a sign of progress after which a load is given up.
        shutdown_grace: seconds that :meth:`mpool.Pool.close` and the interpreter's exit give to calls in flight.
        embed_queue_capacity: embedding calls that may wait, a model; further callers wait outside, save for
            :func:`mpool.submit`, which raises Overloaded.
        prompt_queue_capacity: the same for text generation.
        max_embed_inputs: texts that one :func:`mpool.embed` takes; :func:`mpool.embed_iter` takes any number.
        offline: True: never download; False: allowed; None: as ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE`` say.

    Raises:
        InvalidArgument: a value is of the wrong type or out of range.

    Example:
        >>> mpool.PoolConfig(threads=1, max_embed_inputs=50_000).threads
        1
    """

    threads: int = 0
    memory_bytes: int = 0
    step_budget: float = 0.0
    load_timeout: float = 30.0
    shutdown_grace: float = 5.0
    embed_queue_capacity: int = 100
    prompt_queue_capacity: int = 100
    max_embed_inputs: int = 10_000
    offline: bool | None = None

    def __post_init__(self) -> None:
        for name, (kinds, low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                what = "an integer" if kinds == (int,) else "seconds"
                raise InvalidArgument(f"PoolConfig.{name} is {value!r}, allowed: {what} from {low} to {high}")
        if self.offline is not None and not isinstance(self.offline, bool):
            raise InvalidArgument(f"PoolConfig.offline is {self.offline!r}, allowed: True, False, None")

    def _registry_options(self) -> dict[str, Any]:
        """Keyword arguments of ``_core.Registry``."""
        return {"threads": self.threads, "memory_bytes": self.memory_bytes, "step_budget": float(self.step_budget),
                "shutdown_grace": float(self.shutdown_grace), "load_timeout": float(self.load_timeout),
                "queue_capacity": {"text_embedding": self.embed_queue_capacity,
                                   "text_to_text": self.prompt_queue_capacity}}


assert set(_RANGES) | {"offline"} == {field.name for field in fields(PoolConfig)}
