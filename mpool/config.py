"""Options of a pool: one frozen dataclass with one field per option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .chaos import chaos_of
from .checks import integer, one_of, refuse, shown, unknown_option
from .durations import seconds_of
from .errors import InvalidArgument
from .names import CAPABILITIES, ISOLATION, POLICIES

#: Field -> (kinds, lowest, highest). 0 leaves a value to the environment variable or rule that the field names.
_RANGES: dict[str, tuple[tuple[type[int] | type[float], ...], float, float]] = {
    "threads": ((int,), 0, 256),
    "memory_bytes": ((int,), 0, 2**62),
    "process_memory": ((int,), 0, 2**62),
    "step_budget": ((int, float), 0.0, 60.0),
    "load_timeout": ((int, float), 0.01, 86400.0),
    "load_ceiling": ((int, float), 0.01, 604800.0),
    "stall_timeout": ((int, float), 0.01, 86400.0),
    "shutdown_grace": ((int, float), 0.0, 3600.0),
    "maintenance_interval": ((int, float), 0.01, 86400.0),
    "max_workers_per_model": ((int,), 1, 16),
    "batch_wait": ((int, float), 0.0, 0.002),
    "embed_queue_capacity": ((int,), 1, 1_000_000),
    "batch_queue_capacity": ((int,), 1, 1_000_000),
    "prompt_queue_capacity": ((int,), 1, 1_000_000),
    "image_gen_queue_capacity": ((int,), 1, 1_000_000),
    "vision_queue_capacity": ((int,), 1, 1_000_000),
    "image_embed_queue_capacity": ((int,), 1, 1_000_000),
    "breaker_threshold": ((int,), 0, 64),
    "breaker_window": ((int, float), 0.001, 86400.0),
    "breaker_rest": ((int, float), 0.001, 86400.0),
    "max_embed_inputs": ((int,), 1, 2**31 - 1),
}
#: Capability -> the fields that set how many of its requests may wait, without ``queue_capacity``.
_CAPACITIES = {"text_embedding": ("embed_queue_capacity", "batch_queue_capacity"),
               "text_to_text": ("prompt_queue_capacity",), "image_embedding": ("image_embed_queue_capacity",),
               "vision": ("vision_queue_capacity",), "text_to_image": ("image_gen_queue_capacity",)}
_SWITCHES = ("fail_fast", "predictive_scaling", "scale_timeout")


@dataclass(frozen=True)
class PoolConfig:
    """Options of a :class:`mpool.Pool`. Immutable; checked when made.

    Attributes:
        threads: number of compute threads; 0: ``MPOOL_THREADS``, else the CPUs available to this process.
        memory_bytes: limit for models, caches and queues together, in bytes; 0: ``MPOOL_MEMORY_MB``, else a share of
            the memory of the machine or its cgroup. To load a model that does not fit, idle models are unloaded, the
            least recently used first. Models that are in use, pinned or have not served yet stay.
        step_budget: seconds that one compute step may take while other requests wait; 0: ``MPOOL_STEP_BUDGET_MS``.
        load_timeout: seconds without progress after which loading a model is aborted.
        load_ceiling: maximum seconds for loading a model.
        stall_timeout: seconds without progress in a compute step after which a worker is abandoned: its requests fail
            with RecvError, and a new worker replaces it.
        shutdown_grace: seconds that :meth:`mpool.Pool.close` and the interpreter's exit wait for running requests.
        request_timeout: seconds without a result or progress after which a request fails with Timeout; None: no limit.
            A request that makes progress may take any time; use the request's own ``timeout`` for a deadline.
        keep_alive: how long idle workers, and finally their model, stay loaded: seconds, or as Ollama writes it, "5m",
            "1h30m"; 0: unload at once; -1: for ever. :func:`mpool.load` and requests can override it for a model.
        maintenance_interval: maximum seconds between two maintenance runs; earlier deadlines are kept.
        max_workers_per_model: a model starts with two workers, if memory allows, and gets more while all are busy and
            requests wait, up to this number and the number of CPUs.
        policy: how a worker is chosen for a request, for all capabilities or by capability: ``"shared"`` (any idle
            worker; default for image embedding), ``"pack"`` (the first worker with room, so that one pass over the
            weights serves many streams; default for text, and for image generation, where each further worker would
            load the networks again), ``"p2c"`` (the less loaded of two at random; default for embeddings of texts),
            ``"sequential"`` (one request at a time per worker). None: the defaults.
        batch_wait: seconds, at most 0.002, that a worker without work waits for more calls to batch.
        queue_capacity: requests that may wait, a model: a mapping of capability and count, as ``{"vision": 10}``; for
            ``"text_embedding"`` also a pair, requests of one text and of many. A capability that it leaves out has the
            value of its field below; one that it names must leave that field at its default. None: the fields below.
            Beyond it callers wait outside, save for :func:`mpool.submit` and requests with ``fail_fast``, which raise
            Overloaded.
        embed_queue_capacity: embedding calls of one text that may wait, a model; further callers wait outside, save
            for :func:`mpool.submit` and calls with ``fail_fast``, which raise Overloaded.
        batch_queue_capacity: the same for embedding requests of many texts.
        prompt_queue_capacity: the same for text generation.
        image_gen_queue_capacity: the same for image generation.
        vision_queue_capacity: the same for calls with images and text.
        image_embed_queue_capacity: the same for image embedding.
        breaker_threshold: faults of a model's workers within ``breaker_window`` that open its circuit breaker; 0:
            never.
        breaker_window: seconds.
        breaker_rest: seconds during which requests fail with CircuitOpen; then trial requests are admitted.
        isolation: where workers run. ``"thread"``: in threads of this process. ``"process"``: each in a process of its
            own, over the same weights in memory: a worker that crashes, is killed or hangs does not affect the others.
            Its requests are retried once (generation continues at the same token), then they raise RecvError. Linux
            only. :func:`mpool.load` and :func:`mpool.register` can override it for a model.
        process_memory: bytes that such a process may use for caches, scratch and requests; 0: four times the initial
            use of a worker in a thread, for vision models plus the bytes of one image. It is reserved from
            ``memory_bytes`` while the process lives.
        fail_fast: calls into a full queue raise Overloaded instead of waiting, unless they say otherwise.
        max_embed_inputs: texts that one :func:`mpool.embed` takes; :func:`mpool.embed_iter` takes any number.
        offline: True: never download; False: allowed; None: as ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE`` say.

    Rarely used switches, all off by default:

        chaos: faults on purpose, to test what stands on a pool; None: off. A seed and the chances, 0 to 1, that a
            worker's step goes wrong: ``"seed=7,fail=0.01,stall=0.002,die=0.001,slow=0.05,memory=0.01"``, or a mapping
            of the same. ``fail``: all calls in the step fail with a worker's fault (ModelError) and are tried once
            more; ``die``: the worker ends with an internal error and is replaced; ``stall``: it shows no sign of life
            until ``stall_timeout`` sets it apart (RecvError); ``slow``: the step takes five times as long;
            ``memory``: it gets none (MemoryExhausted, if nobody can give it). Callers see what real faults would show:
            retries, the breaker (CircuitOpen), quarantine, NoWorkers after many deaths. The same seed gives the same
            faults at the same worker and step. ``metrics()["chaos_faults"]`` counts them.
        predictive_scaling: start workers ahead of need, and keep those that are about to be needed, within
            ``max_workers_per_model``, memory and CPUs. Calls a second, of which one that came 10 s ago counts half of
            one that comes now, times the seconds of computing that a call takes, are the workers that are busy on
            average; so many are there that each is busy for at most 70 % of its time. Not for the policy ``"pack"``,
            of which one worker serves as many calls as come.
        scale_timeout: behind a long queue calls wait for longer than ``request_timeout``: for three times the predicted
            wait, but for ten times ``request_timeout`` at most. What a call asks for itself (``timeout``) stays.

    Raises:
        InvalidArgument: a value is of the wrong type or out of range.

    Example:
        >>> mpool.PoolConfig(threads=1, keep_alive="10m").keep_alive
        '10m'
    """

    threads: int = 0
    memory_bytes: int = 0
    step_budget: float = 0.0
    load_timeout: float = 30.0
    load_ceiling: float = 600.0
    stall_timeout: float = 30.0
    shutdown_grace: float = 5.0
    request_timeout: float | None = 30.0
    keep_alive: float | str = "5m"
    maintenance_interval: float = 60.0
    max_workers_per_model: int = 4
    policy: str | Mapping[str, str] | None = None
    batch_wait: float = 0.0
    embed_queue_capacity: int = 100
    batch_queue_capacity: int = 50
    prompt_queue_capacity: int = 100
    image_gen_queue_capacity: int = 20
    vision_queue_capacity: int = 50
    image_embed_queue_capacity: int = 50
    breaker_threshold: int = 5
    breaker_window: float = 60.0
    breaker_rest: float = 60.0
    isolation: str = "thread"
    process_memory: int = 0
    fail_fast: bool = False
    max_embed_inputs: int = 10_000
    offline: bool | None = None
    chaos: str | Mapping[str, float] | None = None
    predictive_scaling: bool = False
    scale_timeout: bool = False
    queue_capacity: Mapping[str, int | tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        for name, (kinds, low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                unit = "an integer" if kinds == (int,) else "seconds"
                refuse(name, value, f"{unit} from {low} to {high}")
        limit = self.request_timeout
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            refuse("request_timeout", limit, "seconds above 0, or None")
        seconds_of(self.keep_alive, "keep_alive")
        one_of("isolation", self.isolation, ISOLATION)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "True or False")
        self._policies()
        if self.offline is not None and not isinstance(self.offline, bool):
            refuse("offline", self.offline, "True, False or None")
        self._capacities()
        chaos_of(self.chaos)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._policies().items()))) ^ hash((self.threads, self.memory_bytes))

    def _policies(self) -> dict[str, str]:
        given = self.policy
        if given is None:
            return {}
        found = dict.fromkeys(CAPABILITIES, given) if isinstance(given, str) else given
        if not isinstance(found, Mapping):
            refuse("policy", given, "the name of a policy, or a dict, capability -> policy")
        for capability, policy in found.items():
            if capability not in CAPABILITIES or policy not in POLICIES:
                raise InvalidArgument(param="policy", got=f"{shown(capability)}: {shown(policy)}",
                                      allowed=f"a dict of these capabilities: {', '.join(CAPABILITIES)}; and these "
                                              f"policies: {', '.join(POLICIES)}")
        return dict(found)

    def _registry_options(self) -> dict[str, Any]:
        """Keyword arguments of ``_core.Registry``."""
        options: dict[str, Any] = {
            "threads": self.threads, "memory_bytes": self.memory_bytes, "keep_alive": self._keep_alive(),
            "max_workers": self.max_workers_per_model, "policy": self._policies(),
            "breaker_threshold": self.breaker_threshold or -1,
            "queue_capacity": self._capacities()}
        for name in ("shutdown_grace", "load_timeout", "load_ceiling", "stall_timeout", "maintenance_interval",
                     "breaker_window", "breaker_rest"):
            options[name] = float(getattr(self, name))
        options["predictive_scaling"], options["scale_timeout"] = self.predictive_scaling, self.scale_timeout
        if self.request_timeout is not None:
            options["request_timeout"] = float(self.request_timeout)
        for name in ("step_budget", "batch_wait"):
            if getattr(self, name):
                options[name] = float(getattr(self, name))
        chaos = chaos_of(self.chaos)
        if chaos:
            options["chaos"] = chaos
        return options

    def _capacities(self) -> dict[str, int | tuple[int, int]]:
        """Capability -> requests that may wait; for texts to embed, of one text and of many."""
        found: dict[str, int | tuple[int, int]] = {
            name: tuple(getattr(self, field) for field in names) if len(names) > 1  # type: ignore[misc]
            else getattr(self, names[0]) for name, names in _CAPACITIES.items()}
        if self.queue_capacity is None:
            return found
        if not isinstance(self.queue_capacity, Mapping):
            refuse("queue_capacity", self.queue_capacity, "a dict of capability and count, or None")
        for name, given in self.queue_capacity.items():
            if name not in _CAPACITIES:
                raise unknown_option(str(name), _CAPACITIES, of="PoolConfig.queue_capacity")
            names = _CAPACITIES[name]
            counts = tuple(given) if isinstance(given, (tuple, list)) and len(given) == len(names) > 1 \
                else (given,) * len(names)
            for field, count in zip(names, counts):
                number = integer(count)
                if number is None or not 1 <= number <= 1_000_000:
                    refuse(f"queue_capacity[{name!r}]", given, "1 to 1,000,000"
                           + (", or a pair of such" if len(names) > 1 else ""))
                if getattr(self, field) != getattr(type(self), field):
                    raise InvalidArgument(f"`queue_capacity[{name!r}]` and `{field}` are both given",
                                          param="queue_capacity", hint="Both set the same capacity: pass one of them")
            found[name] = counts if len(counts) > 1 else counts[0]  # type: ignore[assignment]
        return found

    def _keep_alive(self) -> float:
        return seconds_of(self.keep_alive, "keep_alive")


assert set(_RANGES) | {"offline", "request_timeout", "keep_alive", "policy", "queue_capacity", *_SWITCHES, "chaos",
                       "isolation"} == {
    field.name for field in fields(PoolConfig)}
