"""mpool: run transformer models on a CPU, inside one Python process. A pool of workers serves each model.

    >>> import mpool
    >>> mpool.embed("A sentence.").shape
    (384,)
    >>> mpool.generate("The capital of France is", temperature=0, max_tokens=2).text
    ' Paris.'

Everything is imported on first use: ``import mpool`` itself loads neither numpy nor the C core.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any, NoReturn

from ._version import __version__ as __version__
from .host import forks as _forks  # noqa: F401  (registers what a fork waits for)

_MODULES = ("aio", "debug", "errors", "models", "results", "search", "tokenizers")
_ERRORS = ("Cancelled", "CircuitOpen", "ContextOverflow", "InternalError", "InvalidArgument", "LimitError",
           "MemoryExhausted", "ModelError", "MpoolError", "NoWorkers", "NumericError", "Overloaded", "PoolError",
           "RecvError", "SendError", "ShuttingDown", "SpawnFailed", "SpawnTimeout", "Timeout", "UnknownModel",
           "Unsupported", "WrongCapability")

#: Public name -> the module it lives in.
_HOME: dict[str, str] = {name: module for module, names in {
    "api.functions": ("begin_shutdown", "chat", "classify", "classify_tokens", "count_tokens", "describe_image",
                      "describe_url", "detokenize", "embed", "embed_all", "embed_image", "embed_iter", "embed_sparse",
                      "embed_tokens", "generate", "generate_image", "get", "health", "init_maintenance", "load",
                      "metrics", "ps", "register", "rerank", "submit", "swap", "tokenize", "unload", "vision"),
    "runtime.health": ("Health",),
    "tasks.classification": ("Classifications",),
    "config": ("PoolConfig",),
    "tasks.text_to_image": ("ImageStream",),
    "errors": _ERRORS,
    "tasks.embedding_results": ("SparseVectors", "TextEmbeddings", "TokenVectors"),
    "tasks.jobs": ("Job",),
    "model": ("Model",),
    "tasks.images_result": ("GeneratedImages",),
    "pool": ("Pool",),
    "tasks.rerank": ("Ranking",),
    "completions": ("Chunk", "Completion"),
    "debug": ("show_config",),
    "search": ("maxsim", "semantic_search", "similarity"),
    "tasks.streams": ("Stream",),
    "tasks.token_labels": ("TokenClassifications",),
}.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            value = getattr(_import_module(f".{_HOME[name]}", __name__), name)
        except (ImportError, MemoryError, RuntimeError, OSError) as error:
            _raise_typed(error)
    elif name in _MODULES:
        value = _import_module(f".{name}", __name__)
    elif name == "_core":
        value = _import_core()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_advice(name)}")
    globals()[name] = value
    return value


def _advice(name: str) -> str:
    """Return the end of the error of a missing name: what to use, if another library has the name."""
    if name.startswith("_"):
        return ""
    from .foreign_names import ATTRIBUTES

    use = ATTRIBUTES[__name__].get(name)
    return f"; {use}" if use else ""


def _raise_typed(error: Exception) -> NoReturn:
    """Raise the error of mpool for an import that lacked memory or a module, with the original as its cause."""
    try:
        from .host.resources import error_of

        found = error_of(error)
    except (ImportError, MemoryError):  # no memory for the error's own modules
        found = None
    if found is None:
        raise error
    raise found from error


def _import_core() -> Any:
    """Import the compiled core. ``from . import _core`` calls this through ``__getattr__``."""
    # Import numpy first. The core would import it from C, which turns a Ctrl-C during the import into an ImportError.
    _import_module(".host.lazy", __name__).import_numpy()
    try:
        return _import_module("._core", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._core":
            raise
        raise ImportError(f"{__path__[0]} contains the sources of mpool without the compiled core. To use the "
                          "installed mpool, start Python in another folder. To build the core here: pip install -e .",
                          name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

