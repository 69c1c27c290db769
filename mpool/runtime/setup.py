"""How a model is set up: its load options, and the draft model and the adapters that they name."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..errors import InvalidArgument
from ..models.describing import resolve
from ..models.files import changed, model_folders, of_files
from ..models.formats.adapters import read_adapter
from ..models.spec import OWN_ADAPTERS
from .load_options import MAX_ADAPTERS, LoadOptions, refused
from .model_files import ModelFiles, reading

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..models.spec import Adapter

#: Capabilities of the models that can have adapters.
_ADAPTED = ("text_to_text", "vision", "text_embedding")

#: Load options, and the adapters that they name; None: these are not read yet.
Saved = tuple[LoadOptions, "dict[str, Adapter] | None"]


class Setup:
    """The load options of a model, and the files of its draft model and of its adapters. Thread-safe.

    Fields change only under ``lock``, the lock of the entry. :meth:`open_draft` and :meth:`read_adapters` read files
    without it.

    Attributes:
        options: the load options.
        draft: files of the draft model, from :meth:`set` until its spec is made.
        draft_stamps: stamps of the draft model's files.
    """

    def __init__(self, config: PoolConfig, files: ModelFiles, options: LoadOptions, lock: threading.RLock) -> None:
        self._config, self._files, self.options, self.lock = config, files, options, lock
        self.draft: ModelFiles | None = None
        self.draft_stamps: Mapping[str, Any] = {}
        self._adapters: dict[str, Adapter] | None = None  # by name; None: not read yet
        self._adapter_ids: dict[Any, int] = {}  # name and stamps of every adapter that was read -> its id in the core

    @property
    def runs_in(self) -> str:
        """Where the model's workers run: ``"thread"`` or ``"process"``."""
        return self.options.isolation or self._config.isolation

    @property
    def weights(self) -> str:
        """Use of the model's weights: one of :data:`mpool.names.WEIGHTS`."""
        return self.options.weights or self._config.weights

    @property
    def kv_dtype(self) -> str:
        """Type of the keys and values in the KV cache, one of :data:`mpool.names.KV_DTYPES`. Only language models have
        a KV cache."""
        return self.options.kv_dtype or self._config.kv_dtype

    def settings(self) -> tuple[Any, ...]:
        """Return what the core must load the model with."""
        return self.runs_in, self.weights, self.kv_dtype, self.options.draft or "", self.options.adapters or ()

    def set(self, options: LoadOptions, draft: ModelFiles | None, adapters: dict[str, Adapter]) -> None:
        """Set the options, and the files that were read for them. Must hold ``lock``."""
        self.options, self.draft, self._adapters = options, draft, adapters

    def saved(self) -> Saved:
        """Return the present options for :meth:`restore`."""
        return self.options, self._adapters

    def restore(self, saved: Saved) -> None:
        """Set options back to former ones, after a call that failed."""
        with self.lock:
            self.options, self._adapters = saved

    def read(self) -> None:
        """Read the files of the draft model and of the adapters. Nothing may use the model yet."""
        self.draft = self.open_draft(self.options, self.options)
        self._adapters = self.read_adapters(self.options)
        if self.draft is not None:
            self.draft_stamps = self.draft.describe().stamps

    def open_draft(self, given: LoadOptions, found: LoadOptions) -> ModelFiles | None:
        """Return the draft model that a call names, with its files read. Check that the model can have one.

        Args:
            given: options of the call.
            found: these options, with the present ones in place of None.
        """
        if not found.draft:
            return None
        if self._files.describe().capability != "text_to_text":
            error = refused(self._files.describe(), "draft", {"draft": found.draft},
                            "None or False: only text_to_text models have draft models")
            if self._files.describe().capability == "vision":
                error.hint = "A reference to the GGUF file, hf://org/name/file.gguf, loads it without its image encoder"
            raise error
        if (found.isolation or self._config.isolation) == "process":
            raise refused(self._files.describe(), "draft", {"draft": found.draft},
                          'None or False with isolation="process"; use isolation="thread"')
        if not given.draft:
            return None
        draft = self._draft_of(found.draft)
        draft.describe()
        return draft

    def _draft_of(self, ref: str) -> ModelFiles:
        return ModelFiles(self._config, ref, ref, threading.RLock(), "text_to_text")

    def use_draft(self) -> ModelFiles | None:
        """Return the files of the draft model for a spec, which needs its vocabulary once. Must hold ``lock``."""
        draft, self.draft, self.draft_stamps = self.draft, None, {}
        if not self.options.draft:
            return None
        draft = draft or self._draft_of(self.options.draft)
        self.draft_stamps = draft.describe().stamps
        return draft

    # ---- adapters --------------------------------------------------------------------------------------------------

    def read_adapters(self, options: LoadOptions) -> dict[str, Adapter]:
        """Read the adapters that ``options`` name. Check that the model can have them."""
        if not options.adapters:
            return {}
        base = self._files.describe()
        if base.capability not in _ADAPTED:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          f"None or {{}}: only {', '.join(_ADAPTED[:-1])} and {_ADAPTED[-1]} models have adapters")
        if base.networks:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          "None or {}: the model has two encoders, and an adapter belongs to one")
        own = self.own_adapters()
        shared = next((name for name, _ in options.adapters if name in own), None)
        if shared is not None:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          f"other names than those of the model's own adapters: {', '.join(own)}")
        if len(options.adapters) + len(own) > MAX_ADAPTERS:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          f"at most {MAX_ADAPTERS - len(own)} adapters beside the model's own")
        with reading(self._files.key), model_folders(self._config.model_folders):
            return {name: read_adapter(self._path_of(place), base) for name, place in options.adapters}

    def _path_of(self, place: str) -> str:
        """Return the path of an adapter. Downloads the files of a reference to the hub if necessary."""
        return place if posixpath.isabs(place) else resolve(place, self._config.offline, listed=False).path

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that a caller added by load(), register() or swap(), in alphabetical order."""
        return tuple(name for name, _ in self.options.adapters or ())

    def own_adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters in the model's files, one per task of the model."""
        settings = self._files.describe().embedding
        return settings.adapters if settings is not None else ()

    def adapters(self) -> list[tuple[int, Adapter]]:
        """Return the adapters with their ids in the core, read if necessary. Must hold ``lock``."""
        if self._adapters is None:
            self._adapters = self.read_adapters(self.options)
        return [(self._id_of(name, adapter), adapter) for name, adapter in self._adapters.items()]

    def adapter_id(self, name: object) -> int:
        """Return the id of an adapter in the core.

        Raises:
            InvalidArgument: the model has no adapter of this name.
        """
        own = self.own_adapters()
        if isinstance(name, str) and name in own:
            return OWN_ADAPTERS + own.index(name)
        found = self._adapters if self._adapters is not None else self.read_adapters(self.options)
        if not isinstance(name, str) or name not in found:
            names = (*own, *self.adapter_names)
            raise InvalidArgument(param="adapter", got=shown(name), key=self._files.key,
                                  allowed=f"{', '.join(names)} or None" if names else "None: the model has no adapters",
                                  hint="mpool.load(model, adapters={name: path}) adds adapters")
        return self._id_of(name, found[name])

    def _id_of(self, name: str, adapter: Adapter) -> int:
        """Return the id of an adapter: the same number as long as its files are the same."""
        key = name, adapter.files, tuple(sorted(of_files(adapter.stamps).items()))
        with self.lock:
            return self._adapter_ids.setdefault(key, len(self._adapter_ids) + 1)

    # ---- changes of the files --------------------------------------------------------------------------------------

    def stamps(self) -> list[Mapping[str, Any]]:
        """Return the stamps of the files that were read: of the draft model, and of each adapter."""
        return [self.draft_stamps, *(adapter.stamps for adapter in (self._adapters or {}).values())]

    def changed(self, folders: bool = False) -> str | None:
        """Return the first of these files that changed since it was read; None: none changed."""
        return next(filter(None, (changed(stamps, folders) for stamps in self.stamps())), None)

    def matches(self, other: Setup) -> bool:
        """Return True if another setup with the same options has read the same files. Must hold ``lock``."""
        if self._adapters is None:  # only the other one has read the adapters
            return of_files(self.draft_stamps) == of_files(other.draft_stamps)
        return list(self._adapters) == list(other._adapters or {}) \
            and list(map(of_files, self.stamps())) == list(map(of_files, other.stamps()))

    def adopt(self, other: Setup) -> None:
        """Take the stamps of another setup that :meth:`matches`. Must hold ``lock``."""
        self.draft_stamps = other.draft_stamps
        if self._adapters is not None and other._adapters:
            self._adapters = other._adapters

    def forget(self) -> None:
        """Forget what was read from files; the options stay. Must hold ``lock``."""
        self.draft, self.draft_stamps, self._adapters = None, {}, None


__all__ = ["Saved", "Setup"]
