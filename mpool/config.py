"""Options of a pool: one frozen dataclass with one field per option."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .chaos import chaos_of
from .checks import check_path, integer, known_keywords, one_of, real, refuse, shown, with_plain_bools
from .durations import seconds_of
from .errors import InvalidArgument
from .host.resources import typed
from .names import CAPABILITIES, ISOLATION, KV_DTYPES, POLICIES, WEIGHTS

#: Maximum of every queue capacity, in requests.
MAX_QUEUE_CAPACITY = 1_000_000
#: Field -> (types, minimum, maximum). Where 0 is allowed as a default, the field's description says what it selects.
_RANGES: dict[str, tuple[tuple[type[int] | type[float], ...], float, float]] = {
    "threads": ((int,), 0, 256),
    "memory_bytes": ((int,), 0, 2**62),
    "process_memory": ((int,), 0, 2**62),
    "load_timeout": ((int, float), 0.01, 86400.0),
    "load_ceiling": ((int, float), 0.01, 604800.0),
    "stall_timeout": ((int, float), 0.01, 86400.0),
    "shutdown_grace": ((int, float), 0.0, 3600.0),
    "maintenance_interval": ((int, float), 0.01, 86400.0),
    "max_workers_per_model": ((int,), 1, 16),
    "batch_wait": ((int, float), 0.0, 0.002),
    "embed_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "batch_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "prompt_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "image_gen_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "vision_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "image_embed_queue_capacity": ((int,), 1, MAX_QUEUE_CAPACITY),
    "breaker_threshold": ((int,), 0, 64),
    "breaker_window": ((int, float), 0.001, 86400.0),
    "breaker_rest": ((int, float), 0.001, 86400.0),
    "max_embed_inputs": ((int,), 1, 2**31 - 1),
}
#: Capability -> the fields with its queue capacities.
CAPACITIES = {"text_embedding": ("embed_queue_capacity", "batch_queue_capacity"),
              "text_to_text": ("prompt_queue_capacity",), "image_embedding": ("image_embed_queue_capacity",),
              "vision": ("vision_queue_capacity",), "text_to_image": ("image_gen_queue_capacity",)}
_SWITCHES = ("fail_fast", "predictive_scaling", "scale_timeout", "background")


@dataclass(frozen=True)
class PoolConfig:
    """Options of a :class:`mpool.Pool`. Immutable. The constructor checks every value.

    Attributes:
        threads: number of compute threads of this pool alone; 0: share those of the process, whose number is
            ``MPOOL_THREADS``, or one per core: :func:`mpool.show_config` says which cores count.
        memory_bytes: limit for models, caches and queues of this pool alone, in bytes; 0: share the limit of the
            process, which is ``MPOOL_MEMORY_MB``, or a share of the memory of the machine or its cgroup. To make room
            for a model, the pool unloads idle models: first those that have been idle for long and are quick to load
            again. Models that are in use, pinned or loading stay loaded.
        load_timeout: seconds without progress after which loading a model is aborted.
        load_ceiling: maximum seconds for loading a model.
        stall_timeout: seconds without progress in a compute step after which a worker is abandoned: its requests fail
            with RecvError, and a new worker replaces it when requests need one.
        shutdown_grace: seconds that :meth:`mpool.Pool.close` and the interpreter's exit wait for running requests.
        request_timeout: seconds without a result or progress after which a request fails with Timeout; None: no limit.
            A coroutine's wait for room in a full queue does not count. Its wait for memory does, from the last time
            that a request of its event loop for the model found memory.
            Time in which the process was stopped or suspended does not count.
            A request that makes progress may take any time; set its ``timeout`` for a deadline.
        keep_alive: how long idle workers, and finally their model, stay loaded: seconds, or as Ollama writes it, "5m",
            "1h30m"; 0: unload at once; -1: forever. :func:`mpool.load` and requests can override it for a model.
        maintenance_interval: maximum seconds between two maintenance runs. A deadline before that makes a run earlier.
        max_workers_per_model: a model starts with two workers, if memory allows, and gets more while all are busy and
            requests wait, up to this number and the number of compute threads.
        policy: how a worker is chosen for a request, for all capabilities or by capability: ``"shared"`` (any idle
            worker; default for image embedding), ``"pack"`` (the first worker with room, so that one pass over the
            weights serves many sequences; default for text generation and vision, and for image generation, where each
            further worker would load the networks again), ``"p2c"`` (the less loaded of two random workers; default
            for text embedding, and with ``isolation="process"`` for all capabilities except image generation),
            ``"sequential"`` (one request at a time per worker). None: the defaults.
        batch_wait: seconds, at most 0.002, that an idle worker waits for further requests to batch.
        embed_queue_capacity: maximum queued requests per model for text embedding, requests of one text. When a queue
            is full, callers block until there is room, but :func:`mpool.submit` and requests with ``fail_fast`` raise
            Overloaded.
        batch_queue_capacity: the same for text embedding, requests of several texts.
        prompt_queue_capacity: the same for text generation.
        image_gen_queue_capacity: the same for image generation.
        vision_queue_capacity: the same for requests with images and text.
        image_embed_queue_capacity: the same for image embedding.
        breaker_threshold: number of worker faults of a model within ``breaker_window`` that open its circuit breaker;
            0: never. A fault during several requests counts once, and the retry of a request does not count again.
        breaker_window: seconds over which faults are counted.
        breaker_rest: seconds during which requests fail with CircuitOpen; then trial requests are admitted.
        isolation: where workers run. ``"thread"``: in threads of this process. ``"process"``: each in a process of its
            own, which shares the memory of the weights. A worker process that crashes, is killed or hangs does not
            affect the others. Its requests are retried once (generation continues at the same token), then they raise
            RecvError. Linux only. :func:`mpool.load` and :func:`mpool.register` can override it for a model.
        weights: how the weights of text models are used; the results have the same bytes, except with
            ``compute="float32-fast"``, where ``"auto"`` may mean ``"mapped"``. ``"packed"``: copied into the
            order in which the kernels read them, before the first result. ``"mapped"``: never copied. The kernels read
            them from the file in the page cache, which processes share, and only scratch and caches count in
            ``memory_bytes``. Measured speed with float32 weights, relative to ``"packed"``: 1.14 for a step of 1 token,
            0.80 for 2, 0.62 to 0.74 for 4 to 16, 0.81 to 0.93 for 32 to 128, 0.98 and more from 256 tokens on (Zen 3,
            mpool's kernels); 0.84 to 0.86 from 128 tokens on with OpenBLAS (Zen 4). Most quantised weights are
            multiplied as they are stored in steps of 1 or 2 tokens, and packed again in every longer step.
            ``"auto"``: models of at least ``MPOOL_PACK_ON_USE_MB`` compute from the mapped file at first, and are
            packed as requests use them. Smaller models, text encoders except those with float32 weights that compute in
            float32, and models with ``isolation="process"`` are packed before the first result. Weights of image
            networks are packed, whatever the value; so are those of language models that compute in another type than
            that of their file (float32 as bfloat16, or int8). Experts are read from the file as they are
            used. Packed copies of them are kept while a third of the memory limit stays free: with ``"packed"``, a load
            makes them; with ``"auto"``, requests and idle workers do. Worker processes make none.
            :func:`mpool.load` can override it for a model.
        kv_dtype: type of the keys and values of language models in their KV cache, ``"auto"`` or ``"int8"``;
            :func:`mpool.load` describes the values, and can override it for a model. Other models have no KV cache.
        process_memory: bytes that a worker process may use for caches, scratch and requests. 0: derived from the
            initial use u of a worker in a thread: 4 u; for vision models u + 192 MiB; for image generation
            1.25 u + 64 MiB. These bytes must be free in ``memory_bytes`` when the process starts; afterwards only the
            bytes that it uses count.
        fail_fast: requests raise Overloaded if the queue is full, or if other requests hold the memory that they or the
            loads of their models need, instead of waiting. A request can override it.
        max_embed_inputs: maximum number of inputs per request, of pairs of a text and a label, and of windows of long
            texts; None: no limit in this process, and 10,000 for requests to the server. :func:`mpool.embed_iter` has
            no limit.
        offline: True: never download; False: allow downloads; None: ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE`` decide.
        model_folders: folders that links in the folder of a model may lead to, beside that folder and the hub's cache;
            the environment variable ``MPOOL_MODEL_FOLDERS`` names further ones, separated by ``:``.
        background: other programs go first. The pool's workers, their processes and the compute threads run with a nice
            value that is 10 higher and the policy SCHED_BATCH (Linux), or with the QoS class utility (macOS); other
            threads of the process keep their priority. The pool has compute threads of its own, as many as the process
            if ``threads`` is 0. On Linux, a nice value has an effect only among programs of one session or one control
            group: see ``/proc/sys/kernel/sched_autogroup_enabled``.

    Rarely used switches, all off by default:

        chaos: inject faults, to test a program that uses the pool; None: off. A seed and the probabilities, 0 to 1,
            that a step of a worker has a fault: ``"seed=7,fail=0.01,stall=0.002,die=0.001,slow=0.05,memory=0.01"``, or
            a mapping with the same keys. ``fail``: all requests of the step fail with a worker fault (ModelError) and
            are retried once. ``die``: the worker ends with an internal error and is replaced. ``stall``: the worker
            makes no progress until it is abandoned after ``stall_timeout`` (RecvError). ``slow``: the step takes five
            times as long. ``memory``: the step is refused memory (MemoryExhausted if no memory can be freed). Callers
            observe the effects of real faults: retries, an open breaker (CircuitOpen), quarantine, NoWorkers after
            many deaths. The same seed gives the same faults at the same worker and step. ``metrics()["chaos_faults"]``
            counts the faults.
        predictive_scaling: start workers before they are needed, and keep workers that will soon be needed, within
            ``max_workers_per_model``, memory and CPUs. The forecast multiplies the arrival rate by the compute time
            per request, which gives the average number of busy workers, and adds workers until each is busy for at
            most 70 % of the time. In the arrival rate, a request from 10 s ago has half the weight of a current one.
            No effect with the policy ``"pack"``, where one worker serves all requests.
        scale_timeout: let requests in a long queue wait for longer than ``request_timeout``: for three times the
            predicted wait, at most ten times ``request_timeout``. Does not change the ``timeout`` of a request.

    Raises:
        InvalidArgument: a value is of the wrong type or out of range.

    Example:
        >>> mpool.PoolConfig(threads=1, keep_alive="10m").keep_alive
        '10m'
    """

    threads: int = 0
    memory_bytes: int = 0
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
    weights: str = "auto"
    process_memory: int = 0
    fail_fast: bool = False
    max_embed_inputs: int | None = None
    offline: bool | None = None
    chaos: str | Mapping[str, float] | None = None
    predictive_scaling: bool = False
    scale_timeout: bool = False
    kv_dtype: str = "auto"
    model_folders: Sequence[str | os.PathLike[str]] = ()
    background: bool = False

    def __post_init__(self) -> None:
        for name, (kinds, low, high) in _RANGES.items():
            if name != "max_embed_inputs" or self.max_embed_inputs is not None:
                self._check_number(name, integer if kinds == (int,) else real, low, high)
        if self.request_timeout is not None:
            self._check_number("request_timeout", real, 0.0, None)
        seconds_of(self.keep_alive, "keep_alive")
        one_of("isolation", self.isolation, ISOLATION)
        one_of("weights", self.weights, WEIGHTS)
        one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        for name, value in with_plain_bools({name: getattr(self, name) for name in (*_SWITCHES, "offline")}).items():
            object.__setattr__(self, name, value)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "True or False")
        self._policies()
        if self.offline is not None and not isinstance(self.offline, bool):
            refuse("offline", self.offline, "True, False or None")
        chaos_of(self.chaos)
        self._folders()

    def _folders(self) -> None:
        given = self.model_folders
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, (str, os.PathLike)) for one in given):
            refuse("model_folders", given, "a list of folders",
                   hint=f"Pass [{given!r}]" if isinstance(given, (str, os.PathLike)) else None)
        for folder in given:
            check_path("model_folders", folder)
        object.__setattr__(self, "model_folders", tuple(os.path.abspath(os.path.expanduser(one)) for one in given))

    def _check_number(self, name: str, convert: Callable[[Any], Any], low: float, high: float | None) -> None:
        """Check a number, and convert a NumPy number to one of Python. ``high`` None: any number above ``low``."""
        given = getattr(self, name)
        value = convert(given)
        if value is None or not (low < value if high is None else low <= value <= high):
            unit = "an integer" if convert is integer else "a number of seconds"
            refuse(name, given, f"{unit} above {low:g}, or None" if high is None else f"{unit} from {low} to {high}")
        if not isinstance(given, (int, float)):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._policies().items()))) ^ hash((self.threads, self.memory_bytes))

    def _policies(self) -> dict[str, str]:
        given = self.policy
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            if not isinstance(given, str) or given not in POLICIES:
                refuse("policy", given, f"one of {', '.join(POLICIES)}, or a dict from capability to one of these")
            return dict.fromkeys(CAPABILITIES, given)
        for capability, policy in given.items():
            if capability not in CAPABILITIES or not isinstance(policy, str) or policy not in POLICIES:
                raise InvalidArgument(param="policy", got=f"{shown(capability)}: {shown(policy)}",
                                      allowed=f"a dict from a capability ({', '.join(CAPABILITIES)}) to a policy "
                                              f"({', '.join(POLICIES)})")
        return dict(given)

    def _registry_options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``_core.Registry``."""
        options: dict[str, Any] = {
            "threads": self.threads, "memory_bytes": self.memory_bytes, "keep_alive": self._keep_alive(),
            "max_workers": self.max_workers_per_model, "policy": self._policies(),
            "breaker_threshold": self.breaker_threshold or -1,
            "queue_capacity": self._capacities()}
        for name in ("shutdown_grace", "load_timeout", "load_ceiling", "stall_timeout", "maintenance_interval",
                     "breaker_window", "breaker_rest"):
            options[name] = float(getattr(self, name))
        options["predictive_scaling"], options["scale_timeout"] = self.predictive_scaling, self.scale_timeout
        options["background"] = self.background
        if self.request_timeout is not None:
            options["request_timeout"] = real(self.request_timeout)  # infinite if it is too large for a float
        if self.batch_wait:
            options["batch_wait"] = float(self.batch_wait)
        chaos = chaos_of(self.chaos)
        if chaos:
            options["chaos"] = chaos
        return options

    def _capacities(self) -> dict[str, int | tuple[int, int]]:
        """Return the queue capacity of each capability; for text embedding a pair: one text, several texts."""
        return {name: tuple(getattr(self, field) for field in names) if len(names) > 1  # type: ignore[misc]
                else getattr(self, names[0]) for name, names in CAPACITIES.items()}

    def _keep_alive(self) -> float:
        return seconds_of(self.keep_alive, "keep_alive")


PoolConfig.__init__ = typed(known_keywords(PoolConfig.__init__))  # type: ignore[method-assign]


def same_queue_capacities(capacity: int | None) -> dict[str, Any]:
    """Return the fields of :class:`PoolConfig` that give every queue one capacity; None: the defaults."""
    if capacity is None:
        return {}
    if not 1 <= capacity <= MAX_QUEUE_CAPACITY:
        refuse("queue_capacity", capacity, f"1 to {MAX_QUEUE_CAPACITY:,}")
    return {field: capacity for names in CAPACITIES.values() for field in names}


assert set(_RANGES) | {"offline", "request_timeout", "keep_alive", "policy", *_SWITCHES, "chaos",
                       "isolation", "weights", "kv_dtype", "model_folders"} == {
    field.name for field in fields(PoolConfig)}
