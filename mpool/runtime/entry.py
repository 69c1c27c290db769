"""A model of a pool: its name, its description, its tokenizer, and its entries in the core's registry.

Files are read once, on first use; the core gets a spec and loads from it without Python. Each compute type has its own
entry in the core, loaded when a request first asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks import one_of, shown
from ..errors import (
    IntegrityError,
    InvalidArgument,
    MpoolError,
    SendError,
    Timeout,
    UnknownModel,
    WrongCapability,
)
from ..host.address_space import require_if_limited
from ..models.layout import missing_tokenizer
from ..models.spec import OWN_ADAPTERS
from ..names import COMPUTE as COMPUTE
from . import isolation as _isolated
from .load_options import AS_CONFIGURED, MAX_ADAPTERS, LoadOptions, refused

if TYPE_CHECKING:
    from ..conversation.template import ChatTemplate
    from ..models import ModelDescription
    from ..models.spec import Adapter, TokenizerSource
    from ..tokenizers import Tokenizer
    from ..tokenizers.gguf_vocab import GGUFVocab
    from .hosts import Host

#: Maximum length of a key of the core, in bytes.
_MAX_KEY = 240
#: Maximum number of plans that are cached per model.
MAX_PLANS = 64
_revisions = itertools.count(1)
#: Capabilities of the models that can have adapters.
_ADAPTED = ("text_to_text", "text_embedding")


@contextmanager
def _reading(key: str | None = None) -> Iterator[None]:
    """Mark errors that are raised while files are read. ``key``: key of the model for errors that have none."""
    try:
        yield
    except MpoolError as error:
        error.key, error._of_files = error.key or key, True
        raise


class Entry:
    """A model of a pool. Thread-safe.

    Attributes:
        pool: pool of the model.
        key: name of the model in the pool.
        ref: reference of the model's files.
        overrides: settings that replace those of the files (see :meth:`mpool.Pool.register`).
        loading: how the model is loaded; see :meth:`set_loading`.
        plans: cache of embedding options -> their plan; see tasks/vectors.py.
        revision: number of the model in the core. A request that was prepared for one revision never runs on another.
        successor: the entry that took over the name; None: this one has it. See :meth:`retire`.
        handles: the handles that lead to the entry, by ``id()``.
        former: references that the name had before.
        kept: key in the core -> whether it was pinned, and its keep-alive in seconds, when :meth:`remember` was called.
        was_read: the files have been read once.
        outdated: a request needs the files again, but they have changed since they were read: the next request must
            read them anew. See :func:`mpool.runtime.swapping.current`.
        process: id of the process that created the entry.
    """

    def __init__(self, pool: Host, key: str, ref: str, capability: str | None = None,
                 overrides: Mapping[str, Any] | None = None, loading: LoadOptions = AS_CONFIGURED) -> None:
        self.pool, self.key, self.ref, self.loading = pool, key, ref, loading
        self.overrides = dict(overrides or {})
        self.plans: dict[Any, Any] = {}
        self._given_capability = capability  # None: the files decide
        self._capability = capability  # None: the files are unread
        self._networks: dict[str, Entry] = {}  # the model's other networks, by name; see serving() and for_task()
        self._main: Entry | None = None  # the entry that this network belongs to
        self._network = ""  # name of this network: its capability, with its task if it has one
        self._lock = threading.RLock()
        self._description: ModelDescription | None = None
        self._stamps: Mapping[str, Any] | None = None  # in place of the description's, from adopt_stamps()
        self._tokenizer: Tokenizer | None = None
        self._vocab: GGUFVocab | None = None  # kept from _set_tokens until the tokenizer is built from it
        self._template: ChatTemplate | None = None
        self._draft: Entry | None = None  # the draft model, from set_loading until its spec is made
        self._draft_stamps: Mapping[str, Any] = {}  # stamps of the draft model's files
        self._adapters: dict[str, Adapter] | None = None  # adapters of `loading`, by name; None: not read yet
        self._adapter_ids: dict[Any, int] = {}  # name and stamps of every adapter that was read -> its id in the core
        self._core: dict[str, str] = {}
        self._table: tuple[bytes, Any] | None = None
        self.revision = next(_revisions)
        self.successor: Entry | None = None
        self.handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.former: tuple[str, ...] = ()
        self.kept: dict[str, tuple[bool, float]] = {}
        self.was_read = self.outdated = False
        self.process = os.getpid()
        self.changing = threading.Lock()  # held while the entry's models in the core are replaced; taken before _lock
        self.reading = threading.Lock()  # held while changed files are read for a successor; taken before `changing`

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self._lock, self.changing, self.reading = threading.RLock(), threading.Lock(), threading.Lock()
        for part in (*self._networks.values(), *(() if self._draft is None else (self._draft,))):
            part.renew_lock()
        self.plans = {}  # the next request asks the pool for its registry, which restarts the child's threads

    def ready(self, compute: str, chat: bool = False) -> bool:
        """Return True if a request needs no file beyond those already read."""
        tokenizer = self._tokenizer
        if self._description is not None:
            if not self._description.tokenizes:
                return compute in self._core
            sides = (self._networks.get(_name_of(part)) for part in self._description.networks if part.task)
            if not all(side is not None and side.ready(compute) for side in sides):
                return False
        return tokenizer is not None and tokenizer.complete and compute in self._core \
            and not (chat and self._template is None)

    @property
    def renders(self) -> bool:
        """True for rerankers that render each pair with the chat template; False while the files are unread."""
        settings = None if self._description is None else self._description.embedding
        return settings is not None and settings.answering is not None

    @property
    def capability(self) -> str:
        """Capability of the model; reads its files if the capability is not known yet."""
        return self._capability or self.describe().capability

    def describe(self, progress: bool | None = None) -> ModelDescription:
        """Return the description of the files with the overrides applied. Downloads missing files first."""
        if self._description is None:
            from ..models import describe
            from ..models.files import model_folders

            if self._main is not None:
                self._main._read_network(self, progress)
                assert self._description is not None
                return self._description
            with self._lock:
                if self._description is None:
                    with _reading(), model_folders(self.pool.config.model_folders):
                        found = describe(self.ref, self.key, offline=self.pool.config.offline, progress=progress)
                    if self._given_capability not in (None, found.capability):
                        raise wrong_capability(self, found.capability, self._given_capability)
                    if self.overrides:
                        from .overrides import override

                        found = override(found, self.overrides)
                    self._description = found
                    self._capability, self.was_read = found.capability, True
                    names = {_name_of(part) for part in found.networks}
                    self._networks = {name: part for name, part in self._networks.items() if name in names}
        return self._description

    @property
    def known(self) -> ModelDescription | None:
        """The description of the files if they are read already; None: they are not, or are forgotten."""
        return self._description

    def serving(self, capability: str) -> Entry | None:
        """Return the model's entry for a capability: itself or one of its other networks; None: it has none.

        Reads the model's files if its capability is not known yet.
        """
        if self._capability == capability or self.capability == capability:
            return self
        if self.capability == "vision" and capability == "text_to_text":
            return self  # a vision model also serves conversations without images
        if self.capability != "image_embedding":
            return None  # only image_embedding models have further networks: no file needs to be read
        found = self._networks.get(capability)
        if found is None and any(part.capability == capability for part in self.describe().networks):
            found = self._by_name(capability)
        return found

    def for_task(self, task: object) -> Entry:
        """Return the entry that embeds texts of a task: that of the task's own encoder if the model has one, else this
        entry."""
        if not isinstance(task, str):
            return self
        part = next((one for one in self.describe().networks if one.task and one.task == task), None)
        return self if part is None else self._by_name(_name_of(part))

    def _by_name(self, name: str) -> Entry:
        """Return the entry of one of the model's other networks."""
        found = self._networks.get(name)
        if found is None:
            with self._lock:
                if name not in self._networks:
                    network = Entry(self.pool, self.key, self.ref, name.partition(" ")[0], None, self.loading)
                    network._main, network._network, network.revision = self, name, self.revision
                    if self.successor is not None:
                        return network
                    self._networks[name] = network
                found = self._networks[name]
        return found

    @property
    def name_of_network(self) -> str:
        """Name of the network among those of its model: its capability, with its task if it serves only one task."""
        return self._network or self.capability

    def parts(self) -> list[Entry]:
        """Return itself and the entries of its other networks: one entry per capability and task of the model."""
        return [self, *(self._by_name(_name_of(part)) for part in self.describe().networks)]

    def _read_network(self, network: Entry, progress: bool | None) -> None:
        """Set the description of one of the model's other networks."""
        found = next((one for one in self.describe(progress).networks if _name_of(one) == network._network), None)
        if found is None:  # the files have changed
            raise wrong_capability(self, self.capability, network._network)
        with self._lock:
            if network._description is None:
                network._description = found

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def _make_tokenizer(self) -> Tokenizer:
        from ..models.files import expect
        from ..tokenizers import open_tokenizer

        description = self.describe()
        if description.image is not None and (texts := self.serving("text_embedding")) is not None:
            return texts.tokenizer()
        if description.tokenizer is None and description.embedding is not None:  # CLIP or SigLIP without the file
            raise missing_tokenizer(posixpath.dirname(description.spec.files[0]))
        if description.tokenizer is None:
            raise InvalidArgument("the model has no tokenizer", param="model", key=self.key,
                                  hint="Models that embed, classify or generate text have one")
        spec = description.spec
        require_if_limited(_space_of(description.tokenizer), "the tokenizer")
        with _reading(self.key), expect(self._stamps or description.stamps):
            try:
                tokenizer = open_tokenizer(description.tokenizer, self._vocab)
            except MpoolError:
                self._require_unchanged()
                raise
            self._require_unchanged()
            rows = spec.kv.get(f"{spec.architecture}.vocab_size")
            if isinstance(rows, int):  # text encoders of image-generation pipelines have their own vocabulary sizes
                tokenizer.fit(rows, file=description.tokenizer.json_path)
        # drop the vocabulary of the file: tens of megabytes that are not needed again
        self._description, self._vocab = replace(description, tokenizer=None), None
        return tokenizer

    def token_text(self, token: int) -> str:
        """Return the text of a token; bytes of an incomplete character appear as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be part of a UTF-8 character."""
        if self._table is None:
            table = self.tokenizer().token_table()
            self._table = (table.data, table.offsets)
        data, offsets = self._table
        return bytes(data[offsets[token]:offsets[token + 1]])

    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            Unsupported: the model has no chat template.
        """
        if self._template is None:
            with self._lock:
                if self._template is None:
                    self._template = self._make_template()
        return self._template

    def _make_template(self) -> ChatTemplate:
        from ..conversation.template import ChatTemplate

        return ChatTemplate.for_model(self.describe().chat_template, self.tokenizer(), key=self.key)

    def core_key(self, compute: str = "auto") -> str:
        """Return the key in the core's registry for a compute type. The first use adds the key, and loads nothing.

        The load begins when the first request is submitted, so a request that is refused before loads no model and
        evicts none.
        """
        key = self._core.get(compute) if isinstance(compute, str) else None
        if key is not None:
            return key
        if not isinstance(compute, str) or compute not in COMPUTE:
            one_of("compute", compute, COMPUTE, key=self.key)
        with self._lock:
            self.require_current()
            if compute not in self._core:
                self._core[compute] = self._key_with_compute(compute) or self.add_cold(compute)
        return self._core[compute]

    def latest(self) -> Entry:
        """Return the entry that has the name now."""
        found = self
        while found.successor is not None:
            found = found.successor
        return found

    def retire(self, successor: Entry) -> None:
        """Lose the name to another entry. Must hold the locks of the entry and of all its networks.

        Nothing leads to this entry from then on but requests that were prepared for it, and nothing that it holds leads
        back to it: it is freed with the last of these requests. A cycle would keep the tokenizer until a garbage
        collection, and so would the handle of a caller that makes no further request.
        """
        self.successor = successor
        for part in (self, *self._networks.values()):
            part.plans = {}
        self._networks = {}
        for handle in list(self.handles.values()):
            handle._hold(successor)

    def keep_plan(self, key: Any, plan: Any) -> None:
        """Cache a plan, unless another model has the name by now. A full cache is emptied first."""
        with self._lock:
            if (self._main or self).successor is None:
                if len(self.plans) >= MAX_PLANS:
                    self.plans.clear()
                self.plans[key] = plan

    def was_replaced(self) -> bool:
        """Return True if another model has the name by now. Waits while the name is being given to it."""
        with self._lock:
            return (self._main or self).successor is not None

    def require_current(self) -> None:
        """Raise SendError if another model has the name by now: the core's keys belong to that model."""
        if (self._main or self).successor is not None:
            raise SendError("the model was replaced before the request was queued", key=self.key)

    def changed(self, folders: bool = False) -> str | None:
        """Return the first file that changed since it was read; None: none changed.

        Args:
            folders: also detect a folder in which files were added or removed.
        """
        from ..models.files import changed

        return next(filter(None, (changed(stamps, folders) for stamps in self._all_stamps())), None)

    def _all_stamps(self) -> list[Mapping[str, Any]]:
        """Return the stamps of the files that were read: those of the model, of its draft model and of its adapters."""
        description = self._description
        if description is None:
            return []
        return [self._stamps or description.stamps, self._draft_stamps,
                *(adapter.stamps for adapter in (self._adapters or {}).values())]

    def forget_unless_added(self) -> bool:
        """Forget what was read from files if the core has no key of the model. Returns False if it has one."""
        with contextlib.ExitStack() as held:
            for part in (self, *self._networks.values()):
                held.enter_context(part._lock)
            if self.core_keys():
                return False
            self.forget()
            return True

    def read(self) -> None:
        """Read all files of an entry that no request uses yet, also those of its adapters and of its draft model."""
        self.describe()
        self._draft = self._open_draft(self.loading, self.loading)
        self._adapters = self._read_adapters(self.loading)
        if self._draft is not None:
            self._draft_stamps = self._draft.describe().stamps

    def adopt_stamps(self, other: Entry) -> bool:
        """Take the stamps of an entry of the same model that has read its files. Returns False, and changes nothing, if
        one of these files has changed.

        Files that do not belong to the model may have been added to its folder.
        """
        from ..models.files import of_files

        with self._lock:
            found = self._adapters or {}
            given = other._adapters or {} if self._adapters is not None else {}
            others = [other.describe().stamps, other._draft_stamps, *(adapter.stamps for adapter in given.values())]
            if list(found) != list(given) or list(map(of_files, self._all_stamps())) != list(map(of_files, others)):
                return False
            self._stamps, self._draft_stamps = others[:2]
            if given:
                self._adapters = given
        return True

    def lost_weights(self) -> bool:
        """Return True if a file of the weights is missing at its path. A loaded model does not need the path."""
        description = self.describe()
        return not all(map(os.path.exists, (path for part in (description, *description.networks)
                                            for path in part.spec.files)))

    def _require_unchanged(self) -> None:
        """Raise IntegrityError if a file changed since it was read: later reads would mix two versions."""
        path = self.changed()
        if path is not None:
            (self._main or self).outdated = True
            error = IntegrityError(f"{path} changed since it was read", hint="Repeat the request to read its files "
                                   "again", key=self.key)
            error._outdated = True
            raise error

    def forget(self, wait: bool = True) -> None:
        """Forget everything read from files. The next use reads them again. The core must not have the model.

        Without ``wait``, an entry whose files another thread reads is left as it is: the read may never return.
        """
        if not self._lock.acquire(wait):
            return
        try:
            for network in self._networks.values():
                network.forget(wait)
            self._description = self._tokenizer = self._vocab = self._template = self._table = self._draft = None
            self._stamps = None
            self.plans, self._draft_stamps, self._adapters, self.outdated = {}, {}, None, False
            self._capability = self._given_capability
        finally:
            self._lock.release()

    def unread(self) -> Entry:
        """Return an entry of the same model that has read no file yet, with the same pins and keep-alives."""
        self.remember()
        found = Entry(self.pool, self.key, self.ref, self._given_capability, self.overrides, self.loading)
        found.kept, found.former, found.was_read = dict(self.kept), self.former, self.was_read
        return found

    def remember(self) -> None:
        """Remember pin and keep-alive of the keys in the core, before another version of the model gets them."""
        main, keys = self._main or self, set(self.core_keys())
        main.kept.update({row["key"]: (row["pinned"], row["keep_alive"])
                          for row in (self.pool.registry.entries() if keys else ()) if row["key"] in keys})

    def core_keys(self) -> list[str]:
        """Return all keys in use in the core's registry, including those of the model's other networks."""
        return list(dict.fromkeys([*self._core.values(), *(key for network in list(self._networks.values())
                                                          for key in network.core_keys())]))

    def _key_with_compute(self, compute: str) -> str | None:
        """Return the key of the ``"auto"`` entry if that is loaded with this compute type."""
        auto = self._core.get("auto")
        if auto is not None:
            for row in self.pool.registry.entries():
                if row["key"] == auto and (row.get("facts") or {}).get("compute") == compute:
                    return auto
        return None

    @property
    def runs_in(self) -> str:
        """Where the model's workers run: ``"thread"`` or ``"process"``."""
        return self.loading.isolation or self.pool.config.isolation

    @property
    def uses_weights(self) -> str:
        """Use of the model's weights: one of :data:`mpool.names.WEIGHTS`."""
        return self.loading.weights or self.pool.config.weights

    @property
    def uses_kv_dtype(self) -> str:
        """Type of the keys and values in the KV cache, one of :data:`mpool.names.KV_DTYPES`. Only language models have
        a KV cache."""
        return self.loading.kv_dtype or self.pool.config.kv_dtype

    def set_loading(self, options: LoadOptions) -> None:
        """Set how the model is loaded from now on. Options that are None stay unchanged.

        If an option changes for a loaded model, the next request or load loads it again; the old workers complete the
        requests that they have.

        Raises:
            InvalidArgument: ``kv_dtype`` is given, but the model has no KV cache; or the model cannot have a draft
                model, or adapters.
            FileError, FormatError, LimitError, UnsafeFormat, Unsupported: an adapter cannot be read, or does not fit.
            WrongCapability: the draft model is not a language model for text.
            SendError: another model has the name by now.
        """
        if options.kv_dtype not in (None, "auto") and self.describe().generation is None:
            raise refused(self.describe(), "kv_dtype", {"kv_dtype": options.kv_dtype},
                          "auto: the model has no KV cache")
        if options == LoadOptions():
            return  # without an option, do not wait for a swap of the name
        while not self._changed_loading(options):
            pass

    def _changed_loading(self, options: LoadOptions) -> bool:
        """Change how the model is loaded. Returns False if another thread changed it while files were read."""
        found = options.over(self.loading)
        draft, adapters = self._open_draft(options, found), self._read_adapters(found)
        with self.changing, self._lock:
            self.require_current()
            if options.over(self.loading) != found:
                return False
            before, was, had = self._settings(), self.loading, self._adapters
            self.loading, self._draft, self._adapters = found, draft, adapters
            for network in self._networks.values():
                network.set_loading(replace(options, kv_dtype=None, draft=None, adapters=None))
            if before == self._settings():
                self._draft = None
                return True
            try:
                self._replace()
            except BaseException:
                # The workers still run with the former settings: a repeated call must not find the new ones and return.
                self.restore_loading(was, had)
                raise
        return True

    def restore_loading(self, loading: LoadOptions, adapters: dict[str, Adapter] | None) -> None:
        """Set ``loading`` and the adapters that it names back to former values, after a call that failed."""
        with self._lock:
            self.loading, self._adapters = loading, adapters

    def _open_draft(self, options: LoadOptions, found: LoadOptions) -> Entry | None:
        """Return the draft model that ``options`` name, with its files read. Check that the model can have one.

        Args:
            options: options of the call.
            found: these options, with the present ones in place of None.
        """
        if not found.draft:
            return None
        if self.capability != "text_to_text":
            raise refused(self.describe(), "draft", {"draft": found.draft},
                          "None or False: only text_to_text models have draft models")
        if (found.isolation or self.pool.config.isolation) == "process":
            raise refused(self.describe(), "draft", {"draft": found.draft},
                          'None or False with isolation="process"; use isolation="thread"')
        if not options.draft:
            return None
        draft = Entry(self.pool, found.draft, found.draft, "text_to_text")
        draft.describe()
        return draft

    def _read_adapters(self, options: LoadOptions) -> dict[str, Adapter]:
        """Read the adapters that ``options`` name. Check that the model can have them."""
        if not options.adapters:
            return {}
        if self.capability not in _ADAPTED:
            raise refused(self.describe(), "adapters", {"adapters": dict(options.adapters)},
                          f"None or {{}}: only {' and '.join(_ADAPTED)} models have adapters")
        from ..models.files import model_folders
        from ..models.formats.adapters import read_adapter

        base = self.describe()
        if base.networks:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          "None or {}: the model has two encoders, and an adapter belongs to one")
        own = base.embedding.adapters if base.embedding is not None else ()
        shared = next((name for name, _ in options.adapters if name in own), None)
        if shared is not None:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          f"other names than those of the model's own adapters: {', '.join(own)}")
        if len(options.adapters) + len(own) > MAX_ADAPTERS:
            raise refused(base, "adapters", {"adapters": dict(options.adapters)},
                          f"at most {MAX_ADAPTERS - len(own)} adapters beside the model's own")
        with _reading(self.key), model_folders(self.pool.config.model_folders):
            return {name: read_adapter(self._path_of(place), base) for name, place in options.adapters}

    def _path_of(self, place: str) -> str:
        """Return the path of an adapter. Downloads the files of a reference to the hub if necessary."""
        from ..models import resolve

        return place if posixpath.isabs(place) else resolve(place, self.pool.config.offline, listed=False).path

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that a caller added by load(), register() or swap(), in alphabetical order."""
        return tuple(name for name, _ in self.loading.adapters or ())

    def own_adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters in the model's files, one per task of the model."""
        settings = self.describe().embedding
        return settings.adapters if settings is not None else ()

    def adapter_id(self, name: object) -> int:
        """Return the id of an adapter in the core.

        Raises:
            InvalidArgument: the model has no adapter of this name.
        """
        own = self.own_adapters()
        if isinstance(name, str) and name in own:
            return OWN_ADAPTERS + own.index(name)
        found = self._adapters if self._adapters is not None else self._read_adapters(self.loading)
        if not isinstance(name, str) or name not in found:
            names = (*own, *self.adapter_names)
            raise InvalidArgument(param="adapter", got=shown(name), key=self.key,
                                  allowed=f"{', '.join(names)} or None" if names else "None: the model has no adapters",
                                  hint="mpool.load(model, adapters={name: path}) adds adapters")
        return self._id_of(name, found[name])

    def _id_of(self, name: str, adapter: Adapter) -> int:
        """Return the id of an adapter: the same number as long as its files are the same."""
        from ..models.files import of_files

        key = name, adapter.files, tuple(sorted(of_files(adapter.stamps).items()))
        with self._lock:
            return self._adapter_ids.setdefault(key, len(self._adapter_ids) + 1)

    def _settings(self) -> tuple[Any, ...]:
        return (self.runs_in, self.uses_weights, self.uses_kv_dtype, self.loading.draft or "",
                self.loading.adapters or ())

    def _replace(self) -> None:
        """Replace the entries of the core's registry by entries with the present settings."""
        self.remember()
        for compute, key in list(self._core.items()):
            if compute == "auto" or key != self._core.get("auto"):
                self.add_cold(compute, replace=True)

    def computes(self) -> list[str]:
        """Return the compute types that have keys of their own in the core."""
        auto = self._core.get("auto")
        return [compute for compute, key in list(self._core.items()) if compute == "auto" or key != auto]

    def add_cold(self, compute: str, replace: bool = False, staged: bool = False) -> str:
        """Add the model to the core's registry without loading it, and return its key.

        Args:
            compute: compute type, which the key includes unless it is ``"auto"``.
            replace: the key exists: the core replaces its model once this one is loaded.
            staged: the core replaces the model when :mod:`mpool.runtime.swapping` commits the replacement.
        """
        name = self.key if self._main is None else f"{self.key} {self._network}"
        key = name if compute == "auto" else f"{name} ({compute})"
        if len(key.encode()) > _MAX_KEY:
            import hashlib

            end = key.encode()[-_MAX_KEY // 2:].decode(errors="ignore")
            key = "..." + hashlib.sha256(key.encode()).hexdigest()[:12] + end
        # The core has float32 with the setting mpool.float32_fast. A worker process opens only a library that the user
        # named, and the core must choose the same use of the weights there as here.
        fast = compute == "float32-fast" and (self.runs_in == "thread" or _names_blas())
        compute_type = "float32" if compute == "float32-fast" else compute
        spec = self._make_spec(self.uses_weights, self.uses_kv_dtype, fast)
        if self.loading.draft:
            draft = self._draft or Entry(self.pool, self.loading.draft, self.loading.draft, "text_to_text")
            spec.set_draft(draft._make_spec(self.uses_weights, self.uses_kv_dtype, fast))
            self._draft, self._draft_stamps = None, draft.describe().stamps  # its vocabulary is not needed again
        else:
            self._draft_stamps = {}
        registry = self.pool.registry
        if not replace and not staged:
            self._remove_stray(key)
        if self.runs_in == "process":
            registry.add(key, spec, compute_type, replace, _isolated.command(), self.pool.config.process_memory,
                         revision=self.revision, staged=staged, environment=_isolated.environment())
        else:
            registry.add(key, spec, compute_type, replace, revision=self.revision, staged=staged)
        self._core[compute] = key  # first: the registry now has the key, whatever fails below
        kept = (self._main or self).kept.get(key)
        if kept is not None and not staged:
            registry.keep_alive(key, kept[1], pin=kept[0])
        return key

    def _remove_stray(self, key: str) -> None:
        """Remove a key that the core has and this entry lacks. Must hold the lock.

        A fork, or an interrupt of the thread, leaves such a key if it comes between a change of the core and the change
        of the entry that belongs to it.
        """
        registry = self.pool.registry
        if not (self._main or self).changing.locked() and any(row["key"] == key for row in registry.entries()):
            with contextlib.suppress(Timeout, UnknownModel):
                registry.remove(key, timeout=0.0)

    def _make_spec(self, weights: str, kv_dtype: str, fast: bool) -> Any:
        """Return the core's spec of the model."""
        description = self.describe()
        if self._adapters is None:
            self._adapters = self._read_adapters(self.loading)
        adapters = ((self._id_of(name, adapter), adapter) for name, adapter in self._adapters.items())
        spec = description.spec.with_adapters(adapters).to_core()
        if weights != "auto":
            spec.set("mpool.weights", weights)
        if kv_dtype != "auto" and description.generation is not None:
            spec.set("mpool.kv_dtype", kv_dtype)
        if fast:
            spec.set("mpool.float32_fast", True)
        if description.generation is not None:
            with _reading(self.key):
                self._set_tokens(spec, description)
        spec.note_files({path: stamp for stamps in self._all_stamps() for path, stamp in stamps.items()})
        self._require_unchanged()
        return spec

    def _set_tokens(self, spec: Any, description: ModelDescription) -> None:
        import numpy as np

        source = description.tokenizer
        if description.spec.tokens is not None:
            table = description.spec.tokens
        elif self._tokenizer is None and source is not None and source.gguf is not None:
            # building only the table is fast, so the core can load while the tokenizer is built
            from ..tokenizers.gguf_vocab import GGUFVocab

            self._vocab = GGUFVocab(source.gguf, file=source.config.get("file"))
            table = self._vocab.token_table
        else:
            table = self.tokenizer().token_table()
        ends = description.generation.eog_token_ids if description.generation is not None else ()
        spec.set_tokens(table.data, np.ascontiguousarray(table.offsets, dtype=np.int64), table.control,
                        sorted({*table.eog, *ends}))


def _space_of(source: TokenizerSource) -> int:
    """Return the address space that must be free while a tokenizer is built. The library takes 19 bytes for each byte
    of ``tokenizer.json`` (BPE, measured), and a token with its merge has 48 bytes there."""
    size = 48 * len(source.gguf.get("tokenizer.ggml.tokens", ())) if source.gguf is not None else 0
    with contextlib.suppress(OSError):
        size += os.path.getsize(source.json_path) if source.json_path is not None else 0
    return (32 << 20) + 24 * size


def _names_blas() -> bool:
    """Return True if MPOOL_BLAS has a value: a library, or "none"."""
    from .. import _core

    return any(name == "MPOOL_BLAS" and value for name, value, *_ in _core.options())


def _name_of(network: ModelDescription) -> str:
    """Return the name of a network of a model: its capability, with its task if it has one."""
    return f"{network.capability} ({network.task})" if network.task else network.capability


def wrong_capability(entry: Entry, actual: str, wanted: str | None, hint: str | None = None) -> WrongCapability:
    """Return the error for a model with another capability than the request needs."""
    error = WrongCapability(f"the model's capability is {actual}, not {wanted}", key=entry.key, hint=hint)
    error.wanted = wanted
    return error
