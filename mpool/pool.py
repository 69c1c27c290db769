"""A pool: models by name, calls to them, what is loaded. The module's functions use a process-wide one."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ._methods import PoolVerbs
from .config import PoolConfig
from .debug import show
from .durations import seconds_of
from .errors import InvalidArgument, MemoryExhausted, ShuttingDown, WrongCapability
from .model import Model
from .runtime import hosts
from .runtime import logs as _logging
from .runtime import threads as _threads
from .runtime.entry import OVERRIDES, Entry
from .tasks.verbs import check_capability

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from . import _core
    from .runtime.events import Kind, PoolEvent
    from .runtime.health import CapabilityPools, Health, Pong
    from .tasks.options import Compute

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class Pool(PoolVerbs):
    """Models, and the workers that serve them, with limits of its own.

    The functions of the module (:func:`mpool.embed` and so on) are the methods of a process-wide pool that is made on
    first use; another one is worth having for other limits, or to be closed as a whole. Safe to use from any thread.
    It pickles as its configuration.

    Args:
        config: options; None: all defaults.

    Example:
        >>> with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        ...     pool.embed("A sentence.").shape
        (384,)
    """

    def __init__(self, config: PoolConfig | None = None, *, _identity: str | None = None) -> None:
        if config is not None and not isinstance(config, PoolConfig):
            raise InvalidArgument(f"config is {type(config).__name__}, allowed: mpool.PoolConfig")
        self.config = config or PoolConfig()
        self._identity = _identity or uuid.uuid4().hex
        self._lock = threading.RLock()
        self._registry: _core.Registry | None = None
        self._closed = False
        self._callbacks: tuple[tuple[str, Any], ...] = ()
        self._full_since: dict[str, float] = {}  # see _health.py
        self._entries: dict[str, Entry] = {}  # by key
        self._names: dict[Any, Entry] = {}    # by everything they were called, str and os.PathLike
        self._defaults: dict[str, Entry] = {}  # by capability
        hosts.register(self._identity, self)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def count_tokens(self, text: str, model: str | os.PathLike[str] | Model) -> int:
        """Tokens that a text has for a model, those put around it included.

        Example:
            >>> mpool.count_tokens("A sentence.", "all-MiniLM-L6-v2")
            5
        """
        return len(self.tokenize(text, model))

    def tokenize(self, text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True,
                 parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: a text of 0 to 1,000,000 characters.
            model: as for :func:`embed`.
            add_special: with the tokens that the model wants around a text.
            parse_special: take texts of control tokens (``"<|im_end|>"``) for those tokens.

        Raises:
            InvalidArgument: not text, too long, or half of a surrogate pair in it.

        Example:
            >>> mpool.tokenize("A sentence.", "all-MiniLM-L6-v2")
            [101, 1037, 6251, 1012, 102]
        """
        from .tasks import text_to_text as generation

        return generation.tokenize(self._find(model), text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
                   skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are no character (one cut in two) become U+FFFD.

        Args:
            ids: token ids, ``(n,)``.
            model: as for :func:`embed`.
            skip_special: leave control tokens out; False shows them by name.

        Raises:
            InvalidArgument: an id is not in the vocabulary.

        Example:
            >>> mpool.detokenize(mpool.tokenize("Hello, world!", "SmolLM2-135M-Instruct"), "SmolLM2-135M-Instruct")
            'Hello, world!'
        """
        from .tasks import text_to_text as generation

        return generation.detokenize(self._find(model), ids, skip_special)

    # ---- models ----------------------------------------------------------------------------------------------------

    def get(self, key: str | os.PathLike[str] | Model, capability: str | None = None) -> Model:
        """A model by name. Nothing is loaded yet.

        Args:
            key: a key of the catalogue, a name given by :func:`register` or :func:`load`, a path or a reference.
            capability: capability that the model must have; None: any.

        Raises:
            UnknownModel: no model has that name; the nearest is named.
            WrongCapability: it is for something else; the nearest that fits is named.
            InvalidArgument: not a name, or no capability.

        Example:
            >>> mpool.get("all-MiniLM-L6-v2", "text_embedding").batch_embed(["one", "two"]).shape
            (2, 384)
            >>> mpool.get("all-MiniLM-L6-v3")
            Traceback (most recent call last):
                ...
            mpool.errors.UnknownModel: ...Did you mean all-MiniLM-L6-v2...
        """
        if capability is not None:
            check_capability(capability)
        entry = self._find(key, capability)
        return Model(entry._main or entry, key._compute if isinstance(key, Model) else "auto")

    def load(self, ref: str | os.PathLike[str] | Model, *, alias: str | None = None, pin: bool = False,
             keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
             timeout: float | None = None, isolation: Literal["thread", "process"] | None = None) -> Model:
        """Loads a model now, fetching it first if it is not here, and waits until it serves.

        Loading beforehand is never needed; it moves the wait to a time of your choice. A model whose files have
        changed is read anew.

        Args:
            ref: as ``model`` of :func:`embed`.
            alias: a further name for it: 1 to 128 letters, digits and ``. _ + -``.
            pin: never unload it to make room for another, nor for want of work.
            keep_alive: how long it stays without work, instead of what ``PoolConfig.keep_alive`` says: seconds,
                ``"5m"``;
                0: not at all; below 0: for ever.
            compute: as for :func:`embed`.
            progress: show a bar for downloads; None: if standard error is a terminal.
            timeout: seconds for loading; the loading goes on when they are over. Downloads are not counted.
            isolation: where its workers run from now on, ``"thread"`` or ``"process"``; see ``PoolConfig.isolation``.
                None: as it is. A model that is loaded serves until it is loaded anew.

        Raises:
            InvalidArgument: the alias is no name or is taken, or the reference has no known form.
            UnknownModel, OfflineError, DownloadError, IntegrityError, FormatError, Unsupported, UnsafeFormat: it
                cannot be found, fetched or read.
            MemoryExhausted: it does not fit into the pool's memory beside what cannot be unloaded for it: models that
                have calls, are pinned, are being loaded or have not served yet (all others are, by themselves). The
                hint names those that are pinned and idle, so that :func:`unload` would make room.
            SpawnFailed, SpawnTimeout, Timeout: it could not be loaded.

        Example:
            >>> mpool.load("all-MiniLM-L6-v2", alias="mini").key
            'all-MiniLM-L6-v2'
            >>> mpool.embed("A sentence.", "mini").shape
            (384,)
        """
        _check_isolation(isolation)
        kept = None if keep_alive is None else seconds_of(keep_alive, "keep_alive")
        if not isinstance(pin, bool):
            raise InvalidArgument(f"pin is {pin!r}, allowed: True or False")
        deadline = _threads.deadline_of(timeout)
        if isinstance(ref, Model) and _is_auto(compute):
            compute = ref._compute  # type: ignore[assignment]
        entry = self._find(ref)
        if alias is not None:
            self._check_free(alias, entry)
        if entry.changed():
            self._forget_files(entry, deadline)
        try:
            entry.describe(progress)
        except BaseException:
            self._forget(entry)
            raise
        parts = entry.parts()
        was = [part.isolation for part in parts]
        try:
            if isolation is not None:
                entry.isolate(isolation)
            keys = [part.core_key(compute) for part in parts]
        except BaseException:
            for part, before in zip(parts, was):
                part.isolation = before
            raise
        for part, key in zip(parts, keys):
            if part.describe().tokenizes:
                part.tokenizer()
            if kept is not None:
                self.registry.keep_alive(key, kept)
        for key in keys:
            try:
                self.registry.load(key, pin=pin, timeout=_threads.remaining(deadline, entry.key))
            except BaseException as error:
                for part, before in zip(parts, was):  # what was there may serve on; the next attempt is to try again
                    part.isolation = before
                if isinstance(error, MemoryExhausted):
                    self._name_idle(error, key)
                raise
        if alias is not None:
            with self._lock:
                self._check_free(alias, entry)
                self._names[alias] = entry
        return Model(entry, compute)

    def _name_idle(self, error: MemoryExhausted, key: str) -> None:
        """Says in the hint, once, which models could be unloaded to make room for another."""
        if "Pinned and idle, so" in (error.hint or ""):
            return
        idle = [row.key for row in self.ps() if row.state == "ready" and row.pinned and row.key != key]
        if idle:
            error.hint = (f"{error.hint}. " if error.hint else "") \
                + "Pinned and idle, so that unload would make room: " + ", ".join(idle)

    def unload(self, alias: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> None:
        """Frees a model's memory, once its running calls are done, pinned or not.

        Its names stay: the next call loads it again.

        Args:
            alias: any of its names, or the model.
            timeout: seconds to wait for running calls.

        Raises:
            UnknownModel: no model has that name.
            Timeout: calls still run; it is freed when they are done.
        """
        deadline = _threads.deadline_of(timeout)
        entry = self._find(alias)
        if entry.changed(folders=True):
            self._forget_files(entry, deadline)
            return
        for key in entry.core_keys():
            self.registry.evict(key, timeout=_threads.remaining(deadline, key))

    def _forget_files(self, entry: Entry, deadline: float | None) -> None:
        """Drops the content of changed files once its requests are over. The next use reads the files again."""
        for key in entry.forget():
            self.registry.remove(key, timeout=_threads.remaining(deadline, key))

    def register(self, key: str, ref: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
                 default_prompt_name: str | None = None, pooling: str | None = None, normalize: bool | None = None,
                 max_length: int | None = None, chat_template: str | None = None,
                 isolation: Literal["thread", "process"] | None = None) -> Model:
        """Makes a model known under a name, from then on like one of the catalogue.

        Reads its files, fetching them if need be; loads no weights.

        Args:
            key: its name: 1 to 128 letters, digits and ``. _ + -``.
            ref: where it is: a path or a reference.
            prompts: name -> text, instead of the prompts its files have; default_prompt_name: the one used unasked.
            pooling: cls, mean, max, mean_sqrt_len, weightedmean or lasttoken, instead of what its files say.
            normalize: True: vectors of length 1; instead of what its files say.
            max_length: tokens of a text, at most what its files say.
            chat_template: Jinja, instead of what its files say.
            isolation: where its workers run, ``"thread"`` or ``"process"``; None: as ``PoolConfig.isolation`` says.

        Raises:
            InvalidArgument: the key is no valid name or is taken, or a setting does not fit the model.
            FileError, UnknownModel, OfflineError: the reference cannot be found or read, as for :func:`load`.

        Example:
            >>> model = mpool.register("mini-with-prompts", "all-MiniLM-L6-v2", prompts={"query": "Search for: "})
            >>> bool((model.embed("cats", "query") == mpool.embed("Search for: cats")).all())
            True
        """
        _check_isolation(isolation)
        settings = {"prompts": prompts, "default_prompt_name": default_prompt_name, "pooling": pooling,
                    "normalize": normalize, "max_length": max_length, "chat_template": chat_template}
        if not isinstance(ref, (str, os.PathLike)):
            raise InvalidArgument(f"ref is {type(ref).__name__}, allowed: a key, a reference or a path")
        return self._register(key, os.fspath(ref), {name: value for name, value in settings.items()
                                                    if value is not None}, isolation)

    def ps(self) -> show.ModelTable:
        """The models in use: state, memory, calls. Shows itself as a table in a terminal and in a notebook.

        Returns:
            a sequence of :class:`mpool.debug.show.ModelRow`, in order of key.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> [row.capability for row in mpool.ps() if row.key == "all-MiniLM-L6-v2"]
            ['text_embedding']
        """
        with self._lock:
            isolated = {key for entry in self._entries.values() if entry.runs_in == "process"
                        for key in entry.core_keys()}
        return show.table(self._registry.entries() if self._registry is not None else (), isolated)

    # ---- how it is -------------------------------------------------------------------------------------------------

    @overload
    def metrics(self, format: Literal["dict"] = "dict") -> dict[str, Any]: ...
    @overload
    def metrics(self, format: Literal["prometheus"]) -> str: ...
    def metrics(self, format: Literal["dict", "prometheus"] = "dict") -> dict[str, Any] | str:
        """Counters and gauges of the pool.

        Args:
            format: ``"dict"``, or ``"prometheus"``: text for a scrape, with names that begin with ``mpool_``; needs the
                package prometheus_client (``pip install "mpool[server]"``).

        Returns:
            a dict: counters by name (``total_requests``, ``errors``, ``timeouts``, ``queue_full_rejections``, ...;
            ``units_in`` and ``units_out`` are tokens read and written); ``memory_limit``, ``memory_used`` in bytes and
            ``bytes_by_kind``; ``compute_threads``, ``compute_threads_leased``; ``queue_depths`` by capability;
            ``models``: key -> its state, counts and ``latency`` in seconds, with a histogram of (upper bound, count).
            Or the text.

        Raises:
            InvalidArgument: another format.
            Unsupported: prometheus_client is not installed.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> mpool.metrics()["total_requests"] > 0
            True
        """
        if not isinstance(format, str) or format not in ("dict", "prometheus"):
            raise InvalidArgument(f"format is {format!r}, allowed: 'dict', 'prometheus'")
        if format == "dict":
            from .runtime import metrics as _metrics

            return _metrics.collect(self)
        from .runtime import prometheus as _prometheus

        return _prometheus.prometheus(self)

    def _stats(self) -> dict[str, Any]:
        from .runtime import metrics as _metrics

        return _metrics.stats(self)

    def health(self) -> Health:
        """How the pool is. Cheap: it waits for no work.

        Returns:
            a :class:`mpool.Health`: ``"degraded"`` while a queue stays full, a worker is much slower than its mates or
            does not move, a model has failed or its breaker is not closed, or memory is critical; ``"unhealthy"`` when
            the pool is closed or shuts down, or all models in use have failed.

        Example:
            >>> mpool.health().status
            'healthy'
        """
        from .runtime import health as _health

        return _health.health(self)

    def ping(self, key: str | os.PathLike[str] | Model | None = None) -> tuple[Pong, ...]:
        """Checks that workers respond. Never waits behind work, loads nothing, and does not count as work.

        Args:
            key: a model; None: all.

        Returns:
            a :class:`mpool.Pong` for each worker; none for a model that is not loaded.

        Raises:
            UnknownModel, InvalidArgument: no model has that name.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> mpool.ping("all-MiniLM-L6-v2")[0].queue_depth
            0
        """
        from .runtime import health as _health

        return _health.pongs(self, key)

    def check(self, key: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> float:
        """Check that a model computes: embed a text or generate one token, ahead of the model's queue.

        Loads the model if necessary.

        Args:
            key: the model.
            timeout: seconds.

        Returns:
            seconds that it took.

        Raises:
            ModelError, NumericError, Timeout: the model fails, as for :func:`embed` and :func:`generate`.

        Example:
            >>> mpool.check("all-MiniLM-L6-v2", timeout=60) < 60
            True
        """
        from .runtime import health as _health

        return _health.check(self, key, timeout)

    @property
    def pools(self) -> CapabilityPools:
        """See :data:`mpool.pools`."""
        from .runtime.health import CapabilityPools

        return CapabilityPools(lambda: self)

    def on(self, event: Kind, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Calls a function whenever something happens to a worker or a call of this pool.

        One thread of the process calls all callbacks in sequence, soon after the event. A callback may use mpool
        and may raise (the logger ``mpool.pool`` has it then); while it blocks, further events wait, up to a thousand,
        and those beyond are dropped and counted (``events_dropped`` of :func:`mpool.metrics`). No call ever waits for
        one.

        Args:
            event: ``"spawn"``, ``"ready"``, ``"evict"``, ``"fail"`` of workers; ``"request_start"``,
                ``"request_complete"``, ``"request_fail"`` of calls.
            callback: a function of one :class:`mpool.PoolEvent`.

        Returns:
            a function that ends it.

        Raises:
            InvalidArgument: there is no such event, or the callback is none.

        Example:
            >>> with mpool.Pool() as pool:
            ...     stop = pool.on("ready", lambda event: print(event.model))
            ...     stop()
        """
        from .runtime import events as _events

        return _events.subscribe(self, event, callback)

    def init_maintenance(self) -> None:
        """Starts the thread that looks after deadlines, workers without work and memory; it starts by itself with the
        first load. Idempotent.

        Raises:
            ShuttingDown: :func:`begin_shutdown` was called.
        """
        self.registry.maintain()

    def _register(self, key: str, ref: str, overrides: Mapping[str, Any], isolation: str | None = None) -> Model:
        assert set(overrides) <= set(OVERRIDES)
        entry = Entry(self, key, _absolute(ref), None, overrides, isolation)
        self._check_free(key, None)
        entry.describe()
        with self._lock:
            self._check_free(key, None)
            self._entries[key] = self._names[key] = entry
        return Model(entry)

    def _restore(self, key: str, ref: str, overrides: Mapping[str, Any], compute: str,
                 isolation: str | None = None) -> Model:
        """A model that was pickled, here or in another process. One that is known stays as it is."""
        with self._lock:
            entry = self._names.get(key)
            if entry is None or entry.ref != ref:
                entry = None
        if entry is None and (overrides or key != ref):
            return Model(self._register(key, ref, overrides, isolation)._entry, compute)
        if entry is None:
            entry = self._find(ref)
            if isolation is not None and entry.isolation is None and not entry.core_keys():
                entry.isolate(isolation)
        return Model(entry, compute)

    def _check_free(self, name: Any, entry: Entry | None) -> None:
        from .models import load_catalogue

        if not isinstance(name, str) or not _KEY.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no name for a model, allowed: 1 to 128 letters, digits and . _ + -, "
                                  "the first a letter or digit")
        held = self._names.get(name)
        if held is not None and held is entry:
            return
        if held is not None or load_catalogue().get(name) is not None:
            raise InvalidArgument(f"the name {name} is taken by {held.ref if held else 'a model of the catalogue'}",
                                  hint="Choose another one")

    def _find(self, model: Any, capability: str | None = None) -> Entry:
        """The entry of what a caller named, made if need be; files are read only if its capability is asked for."""
        entry = self._known(model, capability) or self._make_entry(model, capability)
        entry.look_again()
        if capability is not None and entry._capability != capability:
            return self._require(entry, capability)
        return entry

    def _known(self, model: Any, capability: str | None) -> Entry | None:
        """As :meth:`_find`, for what was named before."""
        if model is None:
            return self._defaults.get(capability or "")
        if isinstance(model, Model):
            found = model._entry if model._entry.pool is self else None
        else:
            found = self._names.get(model) \
                if isinstance(model, (str, os.PathLike)) and model.__hash__ is not None else None
        if found is not None and found._capability != capability and found._towers:
            return found._towers.get(capability or "", found)
        return found

    def _make_entry(self, model: Any, capability: str | None) -> Entry:
        from .models import KeyRef, LocalRef, load_catalogue, parse_reference
        from .models.catalogue import unknown

        if model is None:
            if capability is None:
                raise InvalidArgument("model is None, allowed: a key, a reference, a path or a Model")
            default = self._adopt(load_catalogue().default(capability).key, None, capability)
            self._defaults[capability] = default
            return default
        if isinstance(model, Model):  # of another pool
            entry = model._entry
            return self._restore(entry.key, entry.ref, entry.overrides, "auto", entry.isolation)._entry
        if not isinstance(model, (str, os.PathLike)):
            raise InvalidArgument(f"model is {type(model).__name__}, allowed: a key, a reference, a path or a Model")
        reference = parse_reference(model)
        if not isinstance(reference, KeyRef):
            # a relative path means something else after a change of directory, so it is looked up each time
            lasting = not isinstance(reference, LocalRef) or os.path.isabs(os.fspath(model))
            return self._adopt(str(reference), model if lasting else None, None)
        found = self._names.get(reference.key)
        if found is not None:
            return found
        row = load_catalogue().get(reference.key)
        if row is None:
            with self._lock:
                known = [*load_catalogue().rows, *(name for name in self._names if isinstance(name, str))]
            raise unknown(reference.key, known)
        return self._adopt(row.key, None, row.capability)

    def _adopt(self, key: str, name: Any, capability: str | None) -> Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = self._names[key] = Entry(self, key, key, capability)
            if name is not None:
                self._names[name] = entry
            return entry

    def _require(self, entry: Entry, capability: str) -> Entry:
        """The entry of the same model that is for a capability; reads its files if nothing else tells."""
        try:
            actual = entry.capability
            found = entry if actual == capability else entry.serving(capability)
        except BaseException:
            self._forget(entry)
            raise
        if found is None:
            from .checks import nearest
            from .models import load_catalogue

            with self._lock:
                fitting = list(dict.fromkeys([*load_catalogue().keys(capability),
                                              *(key for key, other in self._entries.items()
                                                if other._capability == capability)]))
            near = nearest(entry.key, fitting, 1) or fitting[:1]
            raise WrongCapability(f"is a model of {actual}, not {capability}"
                                  + (f"; the nearest that is: {near[0]}" if near else "; none that is is known"),
                                  key=entry.key)
        return found

    def _forget(self, entry: Entry) -> None:
        """Drops an entry whose files could not be read, so that a wrong path leaves nothing behind."""
        with self._lock:
            if entry._description is None and self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                for name in [name for name, other in self._names.items() if other is entry]:
                    del self._names[name]

    # ---- life ------------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> _core.Registry:
        """The core's registry, made on first use."""
        registry = self._registry
        if registry is None:
            from . import _core, _functions

            with self._lock:
                if self._closed:
                    raise ShuttingDown("the pool is closed", hint="Make a new mpool.Pool")
                if self._registry is None:
                    _functions.install()
                    self._registry = _core.Registry(**self.config._registry_options())
                registry = self._registry
        _logging.start()
        return registry

    def begin_shutdown(self) -> None:
        """Refuses new calls from now on (ShuttingDown); those in flight go on. Idempotent."""
        with self._lock:
            self._closed = True
            registry = self._registry
        if registry is not None:
            registry.begin_shutdown()

    def close(self) -> None:
        """Refuses new calls, gives those in flight ``shutdown_grace`` seconds, ends the rest, frees everything.

        Idempotent; from any thread. Calls that are cut off raise ShuttingDown.
        """
        self.begin_shutdown()
        registry = self._registry
        if registry is not None:
            registry.close()
            _logging.flush()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mpool.Pool of {len(self._entries)} models{', closed' if self._closed else ''}>"

    def __reduce__(self) -> Any:
        return _restore_pool, (self.config, self._identity)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        for entry in list(self._entries.values()):
            entry.renew_lock()
        if self._registry is not None:
            self._registry.after_fork()


def _restore_pool(config: PoolConfig, identity: str) -> Pool:
    """The pool itself where it exists, so that what is pickled together stays together; else one like it."""
    found: Pool | None = hosts.find(identity)
    return found if found is not None and not found._closed else Pool(config, _identity=identity)


def _check_isolation(isolation: Any) -> None:
    if isolation is not None:
        from .runtime import isolation as _isolated

        _isolated.check(isolation, "isolation")


def _is_auto(compute: Any) -> bool:
    return isinstance(compute, str) and compute == "auto"


def _absolute(ref: str) -> str:
    """A reference that means the same in every working directory and process."""
    from .models import parse_reference

    return str(parse_reference(ref))


def all_pools() -> list[Pool]:
    """Every pool that exists."""
    return hosts.hosts()


def _after_fork_in_child() -> None:
    for pool in all_pools():
        pool._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
__all__ = ["Pool"]
