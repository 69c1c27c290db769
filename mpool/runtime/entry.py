"""A model of a pool, or one of its networks: it owns its files, its setup, its keys in the core and its replacement.

Files are read once, on first use; the core gets a spec and loads from it without Python. Each compute type has its own
key in the core, loaded when a request first asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..models.files import of_files
from .core_keys import CoreKeys
from .load_options import AS_CONFIGURED, LoadOptions, refused
from .model_files import ModelFiles, NetworkFiles, name_of
from .replacement import Replacement
from .setup import Setup

if TYPE_CHECKING:
    from ..conversation.template import ChatTemplate
    from ..models import ModelDescription
    from ..models.spec import Adapter
    from ..tokenizers import Tokenizer
    from .hosts import Host

#: Maximum number of plans that are cached per model.
MAX_PLANS = 64
_revisions = itertools.count(1)


class Entry:
    """A model of a pool, or one of its other networks. Thread-safe.

    ``lock`` guards the entry and its parts, of which each says what it does with it. A thread that holds it may wait
    for files and for the core, so nothing that must end soon may wait for it: see :meth:`forget`.

    Attributes:
        pool: pool of the model.
        key: name of the model in the pool.
        ref: reference of the model's files.
        overrides: settings that replace those of the files (see :meth:`mpool.Pool.register`).
        main: the entry of the model; itself, unless it is one of the model's other networks.
        files: what is read from the model's files.
        setup: how the model is loaded; see :meth:`set_loading`.
        keys: the model in the core.
        replacement: what leads to the model that takes over the name; all networks of a model share it.
        plans: cache of embedding options -> their plan; see tasks/vectors.py.

    Args:
        main: the entry of the model, for one of its other networks.
        network: name of this network; see :func:`mpool.runtime.model_files.name_of`.
    """

    def __init__(self, pool: Host, key: str, ref: str, capability: str | None = None,
                 overrides: Mapping[str, Any] | None = None, loading: LoadOptions = AS_CONFIGURED,
                 main: Entry | None = None, network: str = "") -> None:
        self.pool, self.key, self.ref = pool, key, ref
        self.overrides = dict(overrides or {})
        self.lock = lock = threading.RLock()
        self._main, self._network = main, network
        self._networks: dict[str, Entry] = {}  # the model's other networks, by name; see serving() and for_task()
        self._given_capability = capability  # None: the files decide
        self.plans: dict[Any, Any] = {}
        if main is None:
            self.files = ModelFiles(pool.config, key, ref, lock, capability, self.overrides)
            self.replacement, revision, name = Replacement(), next(_revisions), key
        else:
            self.files = NetworkFiles(main.files, network, lock)
            self.replacement, revision, name = main.replacement, main.revision, f"{key} {network}"
        self.setup = Setup(pool.config, self.files, loading, lock)
        self.keys = CoreKeys(pool, name, self.files, self.setup, self.replacement, revision, lock)

    def renew_lock(self) -> None:
        """Replace the locks in a forked child, where the thread that held them does not exist."""
        self.lock = self.files.lock = self.setup.lock = self.keys.lock = threading.RLock()
        self.replacement.renew_locks()
        if self.setup.draft is not None:
            self.setup.draft.lock = threading.RLock()
        for network in self._networks.values():
            network.renew_lock()
        self.plans = {}  # the next request asks the pool for its registry, which restarts the child's threads

    # ---- used by requests ------------------------------------------------------------------------------------------

    @property
    def main(self) -> Entry:
        """The entry of the model, if this is one of its other networks, else itself."""
        return self._main or self

    @property
    def loading(self) -> LoadOptions:
        """The load options; see :meth:`set_loading`."""
        return self.setup.options

    @property
    def revision(self) -> int:
        """Number of the model in the core. A request that was prepared for one revision never runs on another."""
        return self.keys.revision

    def ready(self, compute: str, chat: bool = False) -> bool:
        """Return True if a request needs no file beyond those already read."""
        description = self.files.known
        if description is not None:
            if not description.tokenizes:
                return compute in self.keys
            sides = (self._networks.get(name_of(part)) for part in description.networks if part.task)
            if not all(side is not None and side.ready(compute) for side in sides):
                return False
        return self.files.has_tokenizer(chat) and compute in self.keys

    @property
    def renders(self) -> bool:
        """True for rerankers that render each pair with the chat template; False while the files are unread."""
        description = self.files.known
        settings = None if description is None else description.embedding
        return settings is not None and settings.answering is not None

    @property
    def capability(self) -> str:
        """Capability of the model; reads its files if the capability is not known yet."""
        return self.files.capability or self.describe().capability

    def describe(self, progress: bool | None = None) -> ModelDescription:
        """Return the description of the files with the overrides applied. Downloads missing files first."""
        found = self.files.known
        if found is None:
            found = self.files.describe(progress)
            with self.lock:
                names = {name_of(part) for part in found.networks}
                self._networks = {name: part for name, part in self._networks.items() if name in names}
        return found

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        texts = self.serving("text_embedding") if self.describe().image is not None else None
        return self.files.tokenizer() if texts is None else texts.tokenizer()

    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            Unsupported: the model has no chat template.
        """
        return self.files.template()

    def core_key(self, compute: str = "auto") -> str:
        """Return the key in the core's registry for a compute type. The first use adds the key, and loads nothing."""
        return self.keys.key_for(compute)

    def keep_plan(self, key: Any, plan: Any) -> None:
        """Cache a plan, unless another model has the name by now. A full cache is emptied first."""
        with self.lock:
            if self.replacement.successor is None:
                if len(self.plans) >= MAX_PLANS:
                    self.plans.clear()
                self.plans[key] = plan

    # ---- networks --------------------------------------------------------------------------------------------------

    def known_network(self, capability: str | None) -> Entry:
        """Return the entry of a capability as far as it is known without reading files, else this one."""
        if self.files.capability in (None, capability):
            return self
        return self._networks.get(capability or "", self)

    def serving(self, capability: str) -> Entry | None:
        """Return the model's entry for a capability: itself or one of its other networks; None: it has none.

        Reads the model's files if its capability is not known yet.
        """
        if self.files.capability == capability or self.capability == capability:
            return self
        if self.capability == "vision" and capability == "text_to_text":
            return self  # a vision model also serves conversations without images
        if self.capability != "image_embedding":  # only these have further networks: no file needs to be read
            known = self.files.known
            return self if known is not None and capability in known.capabilities else None
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
        return self if part is None else self._by_name(name_of(part))

    def _by_name(self, name: str) -> Entry:
        """Return the entry of one of the model's other networks."""
        found = self._networks.get(name)
        if found is None:
            with self.lock:
                if name not in self._networks:
                    network = Entry(self.pool, self.key, self.ref, loading=self.loading, main=self, network=name)
                    if self.replacement.successor is not None:
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
        return [self, *(self._by_name(name_of(part)) for part in self.describe().networks)]

    def known_parts(self) -> list[Entry]:
        """Return itself and the entries of its other networks that were used."""
        return [self, *list(self._networks.values())]

    def core_keys(self) -> list[str]:
        """Return all keys in use in the core's registry, including those of the model's other networks."""
        return list(dict.fromkeys(key for part in self.known_parts() for key in part.keys.all()))

    # ---- load options ----------------------------------------------------------------------------------------------

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
        setup = self.setup
        found = options.over(setup.options)
        draft, adapters = setup.open_draft(options, found), setup.read_adapters(found)
        with self.replacement.changing, self.lock:
            self.replacement.require_current(self.key)
            if options.over(setup.options) != found:
                return False
            self._load_with(found, draft, adapters)
        return True

    def _load_with(self, options: LoadOptions, draft: ModelFiles | None, adapters: dict[str, Adapter]) -> None:
        """Load the model and its other networks with these options. Must hold ``replacement.changing``."""
        setup = self.setup
        with self.lock:
            before, saved = setup.settings(), setup.saved()
            setup.set(options, draft, adapters)
            for network in self._networks.values():  # they have no KV cache, no draft model and no adapters
                network._load_with(replace(network.loading, isolation=options.isolation, weights=options.weights),
                                   None, {})
            if before == setup.settings():
                setup.draft = None
                return
            try:
                self.remember()
                self.keys.replace_all()
            except BaseException:
                # The workers still run with the former settings: a repeated call must not find the new ones and return.
                setup.restore(saved)
                raise

    # ---- replacement -----------------------------------------------------------------------------------------------

    def latest(self) -> Entry:
        """Return the entry that has the name now."""
        found = self
        while found.replacement.successor is not None:
            found = found.replacement.successor
        return found

    def retire(self, successor: Entry) -> None:
        """Lose the name to another entry. Must hold the locks of the entry and of all its networks.

        Nothing leads to this entry from then on but requests that were prepared for it, and nothing that it holds leads
        back to it: it is freed with the last of these requests. A cycle would keep the tokenizer until a garbage
        collection, and so would the handle of a caller that makes no further request.
        """
        self.replacement.successor = successor
        for part in self.known_parts():
            part.plans = {}
        self._networks = {}
        for handle in list(self.replacement.handles.values()):
            handle._hold(successor)

    def was_replaced(self) -> bool:
        """Return True if another model has the name by now. Waits while the name is being given to it."""
        with self.lock:
            return self.replacement.successor is not None

    def unread(self) -> Entry:
        """Return an entry of the same model that has read no file yet, with the same pins and keep-alives."""
        self.remember()
        found = Entry(self.pool, self.key, self.ref, self._given_capability, self.overrides, self.loading)
        found.replacement.kept, found.replacement.former = dict(self.replacement.kept), self.replacement.former
        found.files.was_read = self.files.was_read
        return found

    def remember(self) -> None:
        """Remember pin and keep-alive of the keys in the core, before another version of the model gets them."""
        self.keys.remember(set(self.core_keys()))

    def changed(self, folders: bool = False) -> str | None:
        """Return the first file that changed since it was read, of the model, of its draft model or of its adapters;
        None: none changed.

        Args:
            folders: also detect a folder in which files were added or removed.
        """
        if self.files.known is None:
            return None
        return self.files.changed(folders) or self.setup.changed(folders)

    def read(self) -> None:
        """Read all files of an entry that no request uses yet, also those of its adapters and of its draft model."""
        self.describe()
        self.setup.read()

    def adopt_stamps(self, other: Entry) -> bool:
        """Take the stamps of an entry of the same model that has read its files. Returns False, and changes nothing, if
        one of these files has changed.

        Files that do not belong to the model may have been added to its folder.
        """
        theirs = [of_files(one) for one in other.files.stamps()]
        with self.lock:
            if [of_files(one) for one in self.files.stamps()] != theirs or not self.setup.matches(other.setup):
                return False
            self.files.adopt(other.files)
            self.setup.adopt(other.setup)
        return True

    def forget_unless_added(self) -> bool:
        """Forget what was read from files if the core has no key of the model. Returns False if it has one."""
        with contextlib.ExitStack() as held:
            for part in self.known_parts():
                held.enter_context(part.lock)
            if self.core_keys():
                return False
            self.forget()
            return True

    def forget(self, wait: bool = True) -> None:
        """Forget everything read from files. The next use reads them again. The core must not have the model.

        Without ``wait``, an entry whose files another thread reads is left as it is: the read may never return.
        """
        if not self.lock.acquire(wait):
            return
        try:
            for network in self._networks.values():
                network.forget(wait)
            self.files.forget()
            self.setup.forget()
            self.plans = {}
        finally:
            self.lock.release()


__all__ = ["MAX_PLANS", "Entry"]
