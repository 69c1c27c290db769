"""Module-level functions such as ``mpool.embed``: methods of the default pool, which the first call creates. A function
that gets a :class:`mpool.Model` is a method of the pool of that model: its limits and isolation apply.

Type checkers read their signatures in ``functions.pyi``, which ``python -m mpool.api.stubs`` writes.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import PoolConfig
from ..errors import InvalidArgument, UnknownModel
from ..host.resources import typed
from ..model import Model
from ..models.catalogue import load as load_catalogue
from ..pool import Pool
from ..runtime import hosts, saturation
from ..runtime import logs as _logging
from ..tasks.running import run
from ..tasks.verbs import VERBS, Verb
from .methods import _named

if TYPE_CHECKING:
    from ..tasks.jobs import Job

#: Methods of :class:`mpool.Pool` that are also functions of the module.
FORWARDED = ("count_tokens", "detokenize", "get", "health", "init_maintenance", "load", "metrics", "ps", "register",
             "swap", "tokenize", "unload")

_lock = threading.Lock()
_default: Pool | None = None
_installed = False
_ending = False  # begin_shutdown was called: do not replace the closed pool by a new one


def default_pool() -> Pool:
    """Return the pool that the functions of the module use. Thread-safe; creates the pool on first use."""
    global _default
    if _default is None or (_default._closed and not _ending):
        with _lock:
            if _default is None or (_default._closed and not _ending):
                _default = Pool(PoolConfig())
    return _default


def pool_of(*arguments: object) -> Pool:
    """Return the pool of the first :class:`mpool.Model` among the arguments of a function, else the default pool."""
    for one in arguments:
        if isinstance(one, Model):
            return one.pool
    return default_pool()


def is_default(pool: Pool) -> bool:
    """Return True for the pool that the functions of the module use."""
    return pool is _default


def install() -> None:
    """Register the exit handler that closes every pool, and read what earlier processes measured. Called before the
    first registry is created."""
    global _installed
    with _lock:
        if not _installed:
            _installed = True
            atexit.register(_at_exit)
            saturation.recall()


def _at_exit() -> None:
    pools: list[Pool] = hosts.hosts()
    for pool in pools:
        pool.begin_shutdown()
    for pool in pools:
        pool.close()
    captures = sys.modules.get("mpool.tasks.captures")
    if captures is not None:
        captures.finish()
    saturation.remember()
    _logging.stop()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _of_verb(verb: Verb) -> Callable[..., Any]:
    @typed
    def function(*args: Any, **keywords: Any) -> Any:
        given = verb.bind(args, keywords)
        try:
            return run(verb, pool_of(given.get("model")), given)
        except (InvalidArgument, UnknownModel) as error:
            if len(args) == 2 and _is_model(args[0]) and verb.positional[1].name == "model":
                error.hint = f"The model is the second argument: {verb.name}({verb.positional[0].name}, {args[0]!r})"
            raise

    return _named(function, verb, "function", verb.doc)


def _is_model(value: object) -> bool:
    """Return True for the name of a model of the catalogue, which other libraries take as the first argument."""
    return isinstance(value, str) and load_catalogue().get(value) is not None


def _forwarded(name: str) -> Callable[..., Any]:
    method = getattr(Pool, name)

    @typed
    def function(*args: Any, **keywords: Any) -> Any:
        return getattr(pool_of(*args, *keywords.values()), name)(*args, **keywords)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = method.__doc__
    signature = inspect.signature(method)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:])
    return function


@typed
def submit(capability: str, **request: Any) -> Job:
    """Start a request and return a job without waiting for the result.

    Before it returns, the function reads the model's files (on first use) and tokenizes the inputs. It does not wait
    for the weights to load or for the computation. A full queue is an error.

    Args:
        capability: ``"text_embedding"``, ``"text_to_text"``, ``"image_embedding"``, ``"vision"`` or
            ``"text_to_image"``.
        **request: keyword arguments, except ``progress`` and ``stream``. ``"text_embedding"``: those of
            :func:`embed` (``inputs=...``), :func:`rerank` (``query=..., documents=...``) or :func:`classify`
            (``texts=...``); ``output="sparse"``, ``"tokens"`` or ``"all"`` with ``inputs`` selects
            :func:`embed_sparse`, :func:`embed_tokens` or :func:`embed_all`, and ``output="spans"`` with ``texts``
            :func:`classify_tokens`. ``"text_to_text"``: those of :func:`generate` (``prompt=...``) or :func:`chat`
            (``messages=...``). ``"image_embedding"``: those of :func:`embed_image` (``images=...``). ``"vision"``:
            those of :func:`vision` (``images=..., prompt=...``) or :func:`chat` (``messages=...``).
            ``"text_to_image"``: those of :func:`generate_image` (``prompt=...``).

    Returns:
        a :class:`mpool.Job` with ``result(timeout)``, ``done()``, ``cancel()`` and ``position()``. A job can be
        awaited; a job that generates text or images can be iterated over.

    Raises:
        InvalidArgument: an unknown capability or an invalid argument.
        Overloaded: the model's queue is full (``PoolConfig.embed_queue_capacity``, ``prompt_queue_capacity`` and the
            like), or other requests hold the memory for now. Collect the result of an earlier job first, or pass many
            texts in one job.

    Example:
        >>> jobs = [mpool.submit("text_embedding", inputs=text) for text in ("one", "two")]
        >>> [job.result(timeout=60).shape for job in jobs]
        [(384,), (384,)]
    """
    return pool_of(request.get("model")).submit(capability, **request)


@typed
def begin_shutdown() -> None:
    """Refuse new requests with ``ShuttingDown`` for the rest of the process. Requests in flight finish. Idempotent.

    Applies to the functions of the module. :meth:`mpool.Pool.begin_shutdown` does the same for one pool.
    """
    global _ending
    _ending = True
    default_pool().begin_shutdown()


def __getattr__(name: str) -> Any:
    """Build a function of a verb or of a method on first use, because signatures and documentation take time."""
    if name in VERBS:
        function = _of_verb(VERBS[name])
    elif name in FORWARDED:
        function = _forwarded(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = function
    return function
