"""mpool: every model always behind a pool of workers, inside one Python process, on a CPU.

    >>> import mpool
    >>> mpool.embed("A sentence.").shape
    (384,)
    >>> mpool.generate("The capital of France is", temperature=0, max_tokens=2).text
    ' Paris.'

Everything is imported on first use: ``import mpool`` itself loads neither numpy nor the C core.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import aio as aio
    from . import errors as errors
    from . import models as models
    from . import tokenizers as tokenizers
    from ._calls import chat as chat
    from ._calls import describe_image as describe_image
    from ._calls import describe_url as describe_url
    from ._calls import embed as embed
    from ._calls import embed_image as embed_image
    from ._calls import embed_iter as embed_iter
    from ._calls import generate as generate
    from ._calls import generate_image as generate_image
    from ._calls import rerank as rerank
    from ._calls import submit as submit
    from ._calls import vision as vision
    from ._runtime import begin_shutdown as begin_shutdown
    from ._runtime import check as check
    from ._runtime import count_tokens as count_tokens
    from ._runtime import detokenize as detokenize
    from ._runtime import get as get
    from ._runtime import health as health
    from ._runtime import init_maintenance as init_maintenance
    from ._runtime import load as load
    from ._runtime import metrics as metrics
    from ._runtime import ping as ping
    from ._runtime import pools as pools
    from ._runtime import ps as ps
    from ._runtime import register as register
    from ._runtime import tokenize as tokenize
    from ._runtime import unload as unload
    from .config import PoolConfig as PoolConfig
    from .debug.captures import Capture as Capture
    from .debug.captures import CaptureJob as CaptureJob
    from .debug.captures import CaptureRecord as CaptureRecord
    from .debug.captures import capture as capture
    from .debug.comparing import CaptureComparison as CaptureComparison
    from .debug.comparing import CaptureDifference as CaptureDifference
    from .debug.comparing import compare_captures as compare_captures
    from .debug.comparing import read_capture as read_capture
    from .debug.show import show_config as show_config
    from .errors import Cancelled as Cancelled
    from .errors import CircuitOpen as CircuitOpen
    from .errors import ContextOverflow as ContextOverflow
    from .errors import DownloadError as DownloadError
    from .errors import FileError as FileError
    from .errors import FormatError as FormatError
    from .errors import IntegrityError as IntegrityError
    from .errors import InternalError as InternalError
    from .errors import InvalidArgument as InvalidArgument
    from .errors import LimitError as LimitError
    from .errors import MemoryExhausted as MemoryExhausted
    from .errors import ModelError as ModelError
    from .errors import MpoolError as MpoolError
    from .errors import NoWorkers as NoWorkers
    from .errors import NumericError as NumericError
    from .errors import OfflineError as OfflineError
    from .errors import Overloaded as Overloaded
    from .errors import PoolError as PoolError
    from .errors import RecvError as RecvError
    from .errors import SendError as SendError
    from .errors import ShuttingDown as ShuttingDown
    from .errors import SpawnFailed as SpawnFailed
    from .errors import SpawnTimeout as SpawnTimeout
    from .errors import TemplateError as TemplateError
    from .errors import Timeout as Timeout
    from .errors import UnknownModel as UnknownModel
    from .errors import UnsafeFormat as UnsafeFormat
    from .errors import Unsupported as Unsupported
    from .errors import WrongCapability as WrongCapability
    from .model import Model as Model
    from .pool import Pool as Pool
    from .results import Choice as Choice
    from .results import Chunk as Chunk
    from .results import Completion as Completion
    from .results import Timings as Timings
    from .results import TokenLogprob as TokenLogprob
    from .results import ToolCall as ToolCall
    from .results import ToolCallDelta as ToolCallDelta
    from .results import TopLogprob as TopLogprob
    from .results import Usage as Usage
    from .runtime.events import PoolEvent as PoolEvent
    from .runtime.health import CapabilityPool as CapabilityPool
    from .runtime.health import Health as Health
    from .runtime.health import ModelHealth as ModelHealth
    from .runtime.health import Pong as Pong
    from .tasks.images_result import Picture as Picture
    from .tasks.images_result import Pictures as Pictures
    from .tasks.images_result import PictureStep as PictureStep
    from .tasks.jobs import Job as Job
    from .tasks.options import CallOptions as CallOptions
    from .tasks.rerank import RankedDocument as RankedDocument
    from .tasks.rerank import Ranking as Ranking
    from .tasks.similarity import similarity as similarity
    from .tasks.streams import Stream as Stream
    from .tasks.text_embedding import EmbedIterator as EmbedIterator
    from .tasks.text_to_image import PictureStream as PictureStream

_MODULES = ("aio", "errors", "models", "tokenizers")
_ERRORS = ("Cancelled", "CircuitOpen", "ContextOverflow", "DownloadError", "FileError", "FormatError", "IntegrityError",
           "InternalError", "InvalidArgument", "LimitError", "MemoryExhausted", "ModelError", "MpoolError", "NoWorkers",
           "NumericError", "OfflineError", "Overloaded", "PoolError", "RecvError", "SendError", "ShuttingDown",
           "SpawnFailed", "SpawnTimeout", "TemplateError", "Timeout", "UnknownModel", "UnsafeFormat", "Unsupported",
           "WrongCapability")

#: Public name -> the module it lives in.
_HOME: dict[str, str] = {name: module for module, names in {
    "_calls": ("chat", "describe_image", "describe_url", "embed", "embed_image", "embed_iter", "generate",
               "generate_image", "rerank", "submit", "vision"),
    "_runtime": ("begin_shutdown", "check", "count_tokens", "detokenize", "get", "health", "init_maintenance", "load",
                 "metrics", "ping", "pools", "ps", "register", "tokenize", "unload"),
    "runtime.events": ("PoolEvent",),
    "runtime.health": ("CapabilityPool", "Health", "ModelHealth", "Pong"),
    "tasks.options": ("CallOptions",),
    "debug.captures": ("Capture", "CaptureJob", "CaptureRecord", "capture"),
    "debug.comparing": ("CaptureComparison", "CaptureDifference", "compare_captures", "read_capture"),
    "config": ("PoolConfig",),
    "tasks.text_to_image": ("PictureStream",),
    "tasks.text_embedding": ("EmbedIterator",),
    "errors": _ERRORS,
    "tasks.jobs": ("Job",),
    "model": ("Model",),
    "tasks.images_result": ("Picture", "PictureStep", "Pictures"),
    "pool": ("Pool",),
    "tasks.rerank": ("RankedDocument", "Ranking"),
    "results": ("Choice", "Chunk", "Completion", "Timings", "TokenLogprob", "ToolCall", "ToolCallDelta", "TopLogprob",
                "Usage"),
    "debug.show": ("show_config",),
    "tasks.similarity": ("similarity",),
    "tasks.streams": ("Stream",),
}.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(_import_module(f".{_HOME[name]}", __name__), name)
    elif name in _MODULES:
        value = _import_module(f".{name}", __name__)
    elif name in _RENAMED:
        return _renamed(name)
    elif name == "_core":
        value = _import_core()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


#: Old public name -> the module that took its place, for one release.
_RENAMED = {"catalog": "models", "text": "tokenizers"}


def _renamed(name: str) -> Any:
    """The module behind an old name, with a DeprecationWarning that names the new one."""
    import warnings

    warnings.warn(f"mpool.{name} is now mpool.{_RENAMED[name]}", DeprecationWarning, stacklevel=3)
    return _import_module(f".{_RENAMED[name]}", __name__)


def _import_core() -> Any:
    """The compiled core, which `from . import _core` asks of the package first."""
    _import_module("numpy")  # or the core does, from C, which prints a Ctrl-C on the way and makes an ImportError of it
    try:
        return _import_module("._core", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._core":
            raise
        raise ImportError(f"{__path__[0]}: these are mpool's sources, without the compiled core. Start Python in "
                          "another folder to use the mpool that is installed, or build the core here: pip install -e .",
                          name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
