"""The names of a pool's models: which entry each name, path and reference leads to.

A :class:`Names` adds entries on first use and by :func:`mpool.register`, gives names to other entries (aliases, swaps),
and forgets entries whose files could never be read. The handles of models are in a higher tier: a pool passes the entry
of a handle in its place.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..checks import caller_stacklevel, nearest, refuse, shown
from ..errors import InvalidArgument, MpoolError, UnknownModel
from ..models.catalogue import load as load_catalogue
from ..models.catalogue import suggestion, unknown
from ..models.references import KeyRef, LocalRef
from ..models.references import parse as parse_reference
from . import deadlines as _deadlines
from . import swapping
from .entry import Entry
from .load_options import AS_CONFIGURED, LoadOptions
from .model_files import wrong_capability

if TYPE_CHECKING:
    from .hosts import Host

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class Names:
    """The names and entries of a pool. Thread-safe.

    Attributes:
        pool: the pool.
        by_key: entries by their key.
        by_name: entries by every name in use, str and os.PathLike.
        defaults: entries of default models, by capability.
        forgotten: entries that :meth:`forget` removed and other threads still use, by their key.
        lock: held while these tables change.
    """

    def __init__(self, pool: Host) -> None:
        self.pool = pool
        self.lock = threading.RLock()
        self.by_key: dict[str, Entry] = {}
        self.by_name: dict[Any, Entry] = {}
        self.defaults: dict[str, Entry] = {}
        self.forgotten: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()

    def entries(self) -> list[Entry]:
        """Return all entries."""
        with self.lock:
            return list(self.by_key.values())

    def renew_locks(self) -> None:
        """Replace all locks in a forked child, where the threads that held them do not exist."""
        self.lock = threading.RLock()
        for entry in [*self.by_key.values(), *self.forgotten.values()]:
            entry.renew_lock()

    # ---- names that callers give -----------------------------------------------------------------------------------

    def register(self, key: str, ref: str, overrides: Mapping[str, Any], options: LoadOptions,
                 replace: bool = False) -> Entry:
        """Add a model under a name, with its files read. See :meth:`mpool.Pool.register`."""
        old = self.holder(key)
        if old is not None and not replace:
            same = old.latest()
            if (same.ref, same.overrides, same.loading) == (_absolute(ref), dict(overrides), options):
                return same  # the same call again, as when a cell of a notebook runs twice
            old = None
        if old is None:
            self.check_free(key, None, replaceable=True)
        entry = self.new_entry(key, ref, overrides, options)
        if old is None:
            with self.lock:
                old = self.holder(key) if replace else None
                if old is None:
                    self.check_free(key, None, replaceable=True)
                    self.by_key[key] = self.by_name[key] = entry
            if old is None:
                _warn_of_alias(key, entry)
        if old is not None:
            swapping.swap(old, entry, False, None)
        return entry.latest()

    def swap(self, key: Any, ref: str, overrides: Mapping[str, Any], options: LoadOptions,
             timeout: float | None) -> Entry:
        """Give a registered name to another model, which keeps what the call does not name. See :func:`mpool.swap`."""
        while True:
            old = self.registered(key.latest() if isinstance(key, Entry) else key)
            loading = old.loading
            given = {*overrides, *(name for name, value in asdict(options).items() if value is not None)}
            kept = [name for name, value in {**old.overrides, **asdict(loading)}.items() if value and name not in given]
            try:
                new = self.new_entry(old.key, ref, {**old.overrides, **overrides}, options.over(loading), kept)
            except MpoolError as error:
                error.rename({"model": "new"})
                raise
            if swapping.swap(old, new, True, _deadlines.deadline_of(timeout), loading):
                return new

    def new_entry(self, key: str, ref: str, overrides: Mapping[str, Any], options: LoadOptions,
                  kept: Sequence[str] = ()) -> Entry:
        """Return an entry that no name leads to, with its files read.

        Args:
            kept: names of the settings and options that are those of the name's old model. If the new one is refused
                for one of them, the error says so.
        """
        entry = Entry(self.pool, key, _absolute(ref), None, overrides)
        reading = True
        try:
            entry.describe()
            reading = False
            entry.set_loading(options)
        except MpoolError as error:
            concerned = [name for name in kept if name == error.param or not reading and name in ("adapters", "draft")]
            if concerned:
                _name_kept(error, concerned)
            raise
        return entry

    def holder(self, key: Any) -> Entry | None:
        """Return the entry that :meth:`register` added under a name; None: it added none."""
        entry = self.by_name.get(key) if isinstance(key, str) else None
        registered = entry is not None and entry.key == key and key not in _catalogue().rows \
            and _KEY.fullmatch(key) is not None
        return entry if registered else None

    def registered(self, key: Any) -> Entry:
        """Return the entry of a name from :meth:`register`, or ``key`` itself if it is such an entry.

        Raises:
            InvalidArgument: the name is one of the catalogue or an alias.
            UnknownModel: the name is unknown; the message suggests similar names.
        """
        name = key.key if isinstance(key, Entry) else key
        if not isinstance(name, str):
            refuse("model", key, "a name from register(), or its handle")
        found = self.holder(name)
        if found is not None and (not isinstance(key, Entry) or key is found):
            return found
        if name in self.by_name or _catalogue().get(name) is not None or isinstance(key, Entry):
            raise InvalidArgument("only names that register() made can be swapped", param="model", got=shown(name),
                                  allowed="a name from register()",
                                  hint="Register the model under a name of its own, and use that name in requests")
        with self.lock:
            near = nearest(name, [one for one in self.by_name if self.holder(one) is not None], 3)
        raise UnknownModel("no model is registered under this name", key=name,
                           hint="Did you mean " + " or ".join(near) + "?" if near else "register() adds it")

    def restore(self, key: str, ref: str, overrides: Mapping[str, Any], options: LoadOptions) -> Entry:
        """Return the entry of a model of another pool or process. An existing entry stays unchanged."""
        with self.lock:
            entry = self.by_name.get(key)
            if entry is None or ref not in (entry.ref, *entry.replacement.former):
                entry = None
        if entry is None and (overrides or key != ref):
            return self.register(key, ref, overrides, options)
        if entry is None:
            entry = self.find(ref)
            if entry.loading == AS_CONFIGURED and not entry.core_keys():
                entry.set_loading(options)
        return entry

    def add_name(self, name: str, entry: Entry) -> Entry:
        """Give a model a further name. Returns the entry that got the name: after a swap, that of the new model."""
        with self.lock:
            entry = entry.latest()
            self.check_free(name, entry)
            self.by_name[name] = entry
        _warn_of_alias(name, entry)
        return entry

    def hand_over(self, old: Entry, new: Entry) -> None:
        """Give all names of an entry to another. Must hold ``lock``."""
        for table in (self.by_name, self.by_key, self.defaults):
            for name in [name for name, entry in table.items() if entry is old]:
                table[name] = new

    def check_free(self, name: Any, entry: Entry | None, replaceable: bool = False) -> None:
        """Raise InvalidArgument unless the name is valid and unused, or already a name of ``entry``.

        Keys of the catalogue are reserved, in upper and lower case, because :meth:`find` ignores case. Its aliases are
        not reserved: a new alias must break no program. ``replaceable``: the caller has the option ``replace``.
        """
        check_name(name)
        held, row = self.by_name.get(name), _catalogue().get(name)
        if entry is not None and (held is entry or held is None and row is not None and row.key == entry.key):
            return
        if held is not None or row is not None and name.lower() == row.key.lower():
            user = held.ref if held else f"{row.key}, a model of the catalogue"
            raise InvalidArgument(f"`name` must be an unused name, but {name} is a name of {user}", param="name",
                                  got=shown(name), allowed="an unused name", hint="Choose another name" + (
                                      ", or replace the model with replace=True" if held and replaceable else ""))

    # ---- entries of models -----------------------------------------------------------------------------------------

    def find(self, model: Any, capability: str | None = None) -> Entry:
        """Return the entry of a model, creating it if necessary. Reads files only to check ``capability``, and if they
        changed since they were read (:func:`mpool.runtime.swapping.current`).

        Args:
            model: a name, a path, a reference, or an entry; None: the default model of ``capability``. An entry of
                another pool is opened again in this one.
            capability: capability that the model must have; None: any.

        Raises:
            UnknownModel: no model has the name; the message suggests similar names.
            WrongCapability: see :meth:`require`.
            MpoolError: the model's files changed and cannot be read.
        """
        entry = self.named(model, capability)
        main = entry.main
        if swapping.current(main, isinstance(model, Entry)) is not main:
            entry = self.named(model, capability)
        if capability is not None and entry.files.capability != capability:
            return self.require(entry, capability)
        return entry

    def named(self, model: Any, capability: str | None = None) -> Entry:
        """Return the entry of a model, as :meth:`find` does, without a look at its files."""
        return self.known(model, capability) or self._make_entry(model, capability)

    def known(self, model: Any, capability: str | None) -> Entry | None:
        """Return the existing entry of a model, or None."""
        if model is None:
            return self.defaults.get(capability or "")
        if isinstance(model, Entry):
            found = model if model.pool is self.pool else None
        else:
            found = self.by_name.get(model) \
                if isinstance(model, (str, os.PathLike)) and model.__hash__ is not None else None
        if found is not None and found.replacement.successor is not None:
            found = found.latest()
        return found if found is None else found.known_network(capability)

    def _make_entry(self, model: Any, capability: str | None) -> Entry:
        """Create the entry of a model, or of the default model of a capability (``model`` None)."""
        if model is None:
            if capability is None:
                refuse("model", None, "a key, a reference, a path or a Model")
            with self.lock:
                default = self.defaults[capability] = self._adopt(load_catalogue().default(capability).key, None,
                                                                  capability)
            return default
        if isinstance(model, Entry):  # another pool's
            return self.restore(model.key, model.ref, model.overrides, model.loading)
        if not isinstance(model, (str, os.PathLike)):
            refuse("model", model, "a key, a reference, a path or a Model")
        reference = parse_reference(model)
        found = self.by_name.get(reference.key) if isinstance(reference, KeyRef) else None
        if found is not None:
            return found
        row = None if isinstance(reference, LocalRef) else load_catalogue().find(reference)
        if row is None and isinstance(model, str):
            self._refuse_adapter(model)
        if row is not None:  # all spellings of a model share the entry of its key
            return self._adopt(row.key, model if model in row.aliases else None, row.capability)
        if not isinstance(reference, KeyRef):
            # a relative path depends on the working directory, so it is not stored as a name
            lasting = not isinstance(reference, LocalRef) or os.path.isabs(os.fspath(model))
            return self._adopt(str(reference), model if lasting else None, None)
        with self.lock:
            known = {**load_catalogue().names(), **{name: name for name in self.by_name if isinstance(name, str)}}
        raise unknown(reference.key, known)

    def _refuse_adapter(self, name: str) -> None:
        """Raise UnknownModel for ``MODEL:ADAPTER``, the name of a model with an adapter for clients of the server."""
        base, _, adapter = name.rpartition(":")
        with self.lock:
            entry = self.by_name.get(base)
        if entry is None and base and (row := _catalogue().get(base)) is not None:
            entry = self.by_key.get(row.key)
        if entry is not None and adapter in entry.setup.adapter_names and not os.path.exists(name):
            raise UnknownModel(f"model {shown(name)} not found: {adapter} is an adapter of {base}", key=name,
                               hint=f"Pass model={base!r}, adapter={adapter!r}; MODEL:ADAPTER is a name for clients of "
                                    "the server")

    def _adopt(self, key: str, name: Any, capability: str | None) -> Entry:
        with self.lock:
            entry = self.by_key.get(key)
            if entry is None:
                # A thread that looked the name up before another one forgot it may add the entry to the core: a second
                # entry of the same key would replace its model there, and each would refuse the other's requests.
                entry = self.forgotten.pop(key, None) or Entry(self.pool, key, key, capability)
                self.by_key[key] = self.by_name[key] = entry
            if name is not None:
                self.by_name[name] = entry
            return entry

    def require(self, entry: Entry, capability: str) -> Entry:
        """Return the model's entry for a capability. Reads the model's files if its capability is unknown.

        Raises:
            WrongCapability: the model does not have the capability; the message suggests a model that does.
        """
        try:
            actual = entry.capability
            found = entry if actual == capability else entry.serving(capability)
        except BaseException:
            self.forget(entry)
            raise
        self.keep(entry)
        if found is None:
            with self.lock:
                used = [key for key, other in self.by_key.items() if other.files.capability == capability]
            raise wrong_capability(entry.key, actual, capability, suggestion(entry.key, actual, capability, used))
        return found

    def forget(self, entry: Entry) -> None:
        """Remove an entry whose files could never be read, such as one of a wrong path.

        An entry whose files were read keeps its names: the files may be in the middle of a change.
        """
        with self.lock:
            if not entry.files.was_read and self.by_key.get(entry.key) is entry:
                for table in (self.by_key, self.by_name, self.defaults):
                    for name in [name for name, other in table.items() if other is entry]:
                        del table[name]
                self.forgotten[entry.key] = entry

    def keep(self, entry: Entry) -> None:
        """Give an entry whose files were read its name back, if another thread could not read them and forgot it."""
        if entry.key in self.forgotten:
            self._adopt(entry.key, None, None)


def check_name(name: Any) -> None:
    """Raise InvalidArgument unless a name has the form of those that :meth:`Names.check_free` allows."""
    if not isinstance(name, str) or not _KEY.fullmatch(name):
        refuse("name", name, "1 to 128 letters, digits and . _ + -, starting with a letter or digit")


def check_row(model: Any, capability: str | None) -> None:
    """Raise WrongCapability if the catalogue says that a model lacks a capability: nothing is read or downloaded."""
    reference = parse_reference(model) if isinstance(model, str) else None
    row = None if reference is None or isinstance(reference, LocalRef) else load_catalogue().find(reference)
    if row is not None and capability is not None and not row.may_serve(capability):
        raise wrong_capability(row.key, row.capability, capability,
                               suggestion(row.key, row.capability, capability))


def _catalogue() -> Any:
    return load_catalogue()


def _warn_of_alias(name: str, entry: Entry) -> None:
    """Warn if a name that now leads to another model is an alias of the catalogue."""
    row = _catalogue().get(name)
    if row is not None and row.key != entry.key:
        warnings.warn(f"in this pool, {name!r} now names {entry.ref}; in the catalogue, {name!r} is an alias of "
                      f"{row.key}", stacklevel=caller_stacklevel())


def _name_kept(error: MpoolError, kept: Sequence[str]) -> None:
    """Add to the hint for which settings of the name's old model the new one is refused."""
    error._kept = tuple(kept)
    error.hint = (f"{error.hint}. " if error.hint else "") + (
        f"The name has {' and '.join(f'`{name}`' for name in kept)} from its old model: pass another value, or "
        "register(..., replace=True), which keeps no setting")


def _absolute(ref: str) -> str:
    """Return a reference that is independent of the working directory."""
    return str(parse_reference(ref))


__all__ = ["Names", "check_name"]
