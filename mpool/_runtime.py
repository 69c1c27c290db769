"""The process-wide pool, made on first use, and the functions of the module about models and the pool itself: its
methods. Those that compute are in _calls.py."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .config import PoolConfig
from .pool import Pool, all_pools
from .runtime.health import CapabilityPools, Health, Pong

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .debug.show import ModelTable
    from .model import Model
    from .tasks.options import Compute

_lock = threading.Lock()
_default: Pool | None = None
_installed = False
_ending = False  # begin_shutdown was called: no new pool takes the place of the closed one


def default_pool() -> Pool:
    """The pool that the functions of the module use."""
    global _default
    if _default is None or (_default._closed and not _ending):
        with _lock:
            if _default is None or (_default._closed and not _ending):
                _default = Pool(PoolConfig())
    return _default


def is_default(pool: Pool) -> bool:
    """Whether it is that one."""
    return pool is _default


def install() -> None:
    """Before the first registry: has all of them closed when the interpreter ends."""
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            atexit.register(_at_exit)


def _at_exit() -> None:
    from .runtime import logs as _logging

    pools = all_pools()
    for pool in pools:
        pool.begin_shutdown()
    for pool in pools:
        pool.close()
    captures = sys.modules.get("mpool.debug.captures")
    if captures is not None:
        captures.finish()
    _logging.stop()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def get(key: str | os.PathLike[str] | Model, capability: str | None = None) -> Model:
    """A model by name. Nothing is loaded yet.

    Args:
        key: a key of the catalogue, a name given by :func:`register` or :func:`load`, a path or a reference.
        capability: what the model must be for; None: anything.

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
        mpool.errors.UnknownModel: ...the nearest are all-MiniLM-L6-v2...
    """
    return default_pool().get(key, capability)


def load(ref: str | os.PathLike[str] | Model, *, alias: str | None = None, pin: bool = False,
         keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
         timeout: float | None = None, isolation: Literal["thread", "process"] | None = None) -> Model:
    """Loads a model now, fetching it first if it is not here, and waits until it serves.

    Loading beforehand is never needed; it moves the wait to a time of your choice. A model whose files have changed is
    read anew.

    Args:
        ref: as ``model`` of :func:`embed`.
        alias: a further name for it: 1 to 128 letters, digits and ``. _ + -``.
        pin: never unload it to make room for another, nor for want of work.
        keep_alive: how long it stays without work, instead of what ``PoolConfig.keep_alive`` says: seconds, ``"5m"``;
            0: not at all; below 0: for ever.
        compute: as for :func:`embed`.
        progress: whether to show a bar for downloads; None: if standard error is a terminal.
        timeout: seconds for loading; the loading goes on when they are over. Downloads are not counted.
        isolation: where its workers run from now on, ``"thread"`` or ``"process"``; see ``PoolConfig.isolation``. None:
            as it is. A model that is loaded serves until it is loaded anew.

    Raises:
        InvalidArgument: the alias is no name or is taken, or the reference has no known form.
        UnknownModel, OfflineError, DownloadError, IntegrityError, FormatError, Unsupported, UnsafeFormat: it cannot be
            found, fetched or read.
        MemoryExhausted: it does not fit into the pool's memory beside what cannot be unloaded for it: models that have
            calls, are pinned, are being loaded or have not served yet (all others are, by themselves). The hint names
            those that are pinned and idle, so that :func:`unload` would make room.
        SpawnFailed, SpawnTimeout, Timeout: it could not be loaded.

    Example:
        >>> mpool.load("all-MiniLM-L6-v2", alias="mini").key
        'all-MiniLM-L6-v2'
        >>> mpool.embed("A sentence.", "mini").shape
        (384,)
    """
    return default_pool().load(ref, alias=alias, pin=pin, keep_alive=keep_alive, compute=compute, progress=progress,
                               timeout=timeout, isolation=isolation)


def unload(alias: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> None:
    """Frees a model's memory, once its running calls are done, pinned or not.

    Its names stay: the next call loads it again.

    Args:
        alias: any of its names, or the model.
        timeout: seconds to wait for running calls.

    Raises:
        UnknownModel: no model has that name.
        Timeout: calls still run; it is freed when they are done.
    """
    default_pool().unload(alias, timeout=timeout)


def register(key: str, ref: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
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
        normalize: whether vectors have length 1, instead of what its files say.
        max_length: tokens of a text, at most what its files say.
        chat_template: Jinja, instead of what its files say.
        isolation: where its workers run, ``"thread"`` or ``"process"``; None: as ``PoolConfig.isolation`` says.

    Raises:
        InvalidArgument: the key is no name or is taken, or a setting does not fit the model.
        and what :func:`load` raises for a reference that cannot be found or read.

    Example:
        >>> model = mpool.register("mini-with-prompts", "all-MiniLM-L6-v2", prompts={"query": "Search for: "})
        >>> bool((model.embed("cats", "query") == mpool.embed("Search for: cats")).all())
        True
    """
    return default_pool().register(key, ref, prompts=prompts, default_prompt_name=default_prompt_name, pooling=pooling,
                                   normalize=normalize, max_length=max_length, chat_template=chat_template,
                                   isolation=isolation)


def ps() -> ModelTable:
    """The models in use: state, memory, calls. Shows itself as a table in a terminal and in a notebook.

    Returns:
        a sequence of :class:`mpool.debug.show.ModelRow`, in order of key.

    Example:
        >>> _ = mpool.embed("A sentence.")
        >>> [row.capability for row in mpool.ps() if row.key == "all-MiniLM-L6-v2"]
        ['text_embedding']
    """
    return default_pool().ps()


@overload
def metrics(format: Literal["dict"] = "dict") -> dict[str, Any]: ...
@overload
def metrics(format: Literal["prometheus"]) -> str: ...
def metrics(format: Literal["dict", "prometheus"] = "dict") -> dict[str, Any] | str:
    """What the pool has counted.

    Args:
        format: ``"dict"``, or ``"prometheus"``: text for a scrape, with names that begin with ``mpool_``; needs the
            package prometheus_client (``pip install "mpool[server]"``).

    Returns:
        a dict: counters by name (``total_requests``, ``errors``, ``timeouts``, ``queue_full_rejections``, ...;
        ``units_in`` and ``units_out`` are tokens read and written); ``memory_limit``, ``memory_used`` in bytes and
        ``bytes_by_kind``; ``lanes``, ``lanes_leased``; ``queue_depths`` by capability; ``models``: key -> its state,
        counts and ``latency`` in seconds, with a histogram of (upper bound, count). Or the text.

    Raises:
        InvalidArgument: another format.
        Unsupported: prometheus_client is not installed.

    Example:
        >>> _ = mpool.embed("A sentence.")
        >>> mpool.metrics()["total_requests"] > 0
        True
    """
    return default_pool().metrics(format)  # type: ignore[call-overload]


def health() -> Health:
    """How the pool is. Cheap: it waits for no work.

    Returns:
        a :class:`mpool.Health`: ``"degraded"`` while a queue stays full, a worker is much slower than its mates or does
        not move, a model has failed or its breaker is not closed, or memory is critical; ``"unhealthy"`` when the pool
        is closed or shuts down, or all models in use have failed.

    Example:
        >>> mpool.health().status
        'healthy'
    """
    return default_pool().health()


def ping(key: str | os.PathLike[str] | Model | None = None) -> tuple[Pong, ...]:
    """Whether workers are there. Never waits behind work, loads nothing, and does not count as work.

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
    return default_pool().ping(key)


def check(key: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> float:
    """Has a model compute something, ahead of everything that waits: a text embedded, or one token generated.

    Loads it if need be.

    Args:
        key: the model.
        timeout: seconds.

    Returns:
        seconds that it took.

    Raises:
        as :func:`embed` and :func:`generate`.

    Example:
        >>> mpool.check("all-MiniLM-L6-v2", timeout=60) < 60
        True
    """
    return default_pool().check(key, timeout=timeout)


#: Capability -> :class:`mpool.CapabilityPool`: policy, workers, queue and models of it, as they are when asked for.
#: ``mpool.pools["text_embedding"].queue_depth``
pools = CapabilityPools(default_pool)


def init_maintenance() -> None:
    """Starts the thread that looks after deadlines, workers without work and memory; it starts by itself with the first
    load. Idempotent.

    Raises:
        ShuttingDown: :func:`begin_shutdown` was called.
    """
    default_pool().init_maintenance()


def begin_shutdown() -> None:
    """Refuses new calls from now on (ShuttingDown), for the rest of the process; those in flight go on. Idempotent.

    It concerns the functions of the module. A :class:`mpool.Pool` has a method of this name.
    """
    global _ending
    _ending = True
    default_pool().begin_shutdown()


def count_tokens(text: str, model: str | os.PathLike[str] | Model) -> int:
    """Tokens that a text has for a model, those put around it included.

    Example:
        >>> mpool.count_tokens("A sentence.", "all-MiniLM-L6-v2")
        5
    """
    return default_pool().count_tokens(text, model)


def tokenize(text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True,
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
    return default_pool().tokenize(text, model, add_special=add_special, parse_special=parse_special)


def detokenize(ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
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
    return default_pool().detokenize(ids, model, skip_special=skip_special)
