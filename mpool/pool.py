"""A pool of models and workers. The functions of the package use a process-wide pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core
from .api.methods import PoolVerbs
from .checks import is_same, known_keywords, one_of, refuse
from .config import PoolConfig
from .durations import seconds_of
from .errors import InvalidArgument, MemoryExhausted, MpoolError, SendError, ShuttingDown, UnknownModel
from .host.resources import typed
from .model import MissingModel, Model
from .models.describing import resolve
from .models.formats.adapters import check_places
from .models.references import LocalRef
from .models.references import parse as parse_reference
from .models.sources import offline_variables
from .names import COMPUTE
from .runtime import deadlines as _deadlines
from .runtime import events as _events
from .runtime import health as _health
from .runtime import hosts, overrides, swapping
from .runtime import logs as _logging
from .runtime import metrics as _metrics
from .runtime import prometheus as _prometheus
from .runtime.entry import Entry
from .runtime.health import CapabilityPools
from .runtime.history import PoolHistory, RequestRecord
from .runtime.load_options import LoadOptions
from .runtime.naming import Names, check_name
from .tasks import requests
from .tasks import text_to_text as generation
from .tasks.verbs import check_capability

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from . import _core
    from .debug import ModelTable
    from .runtime.events import Kind, PoolEvent
    from .runtime.health import CapabilityPools, Health, Pong
    from .tasks.options import Compute

#: Seconds for which :meth:`Pool.close` waits for callbacks.
EVENT_SECONDS = 1.0


class Pool(PoolVerbs):
    """Models and the workers that serve them, with their own limits.

    The functions of the package (:func:`mpool.embed` and so on) are methods of a process-wide pool, created on first
    use. Create another pool to use other limits, or to close it as a whole. Thread-safe. A pool pickles as its
    configuration.

    A :class:`mpool.Model` belongs to the pool that returned it: functions of the package and of :mod:`mpool.aio` that
    get it use that pool. A method of a pool uses this pool: it opens the files of another pool's model again.

    Args:
        config: options; None: all defaults.

    Raises:
        InvalidArgument: ``config`` is not a :class:`mpool.PoolConfig`.

    Example:
        >>> with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        ...     pool.embed("A sentence.").shape
        (384,)
    """

    @typed
    @known_keywords
    def __init__(self, config: PoolConfig | None = None, *, _identity: str | None = None) -> None:
        if config is not None and not isinstance(config, PoolConfig):
            refuse("config", config, "an mpool.PoolConfig or None")
        self.config = config or PoolConfig()
        offline_variables()  # an invalid environment variable is an error of every pool
        self._identity = _identity or os.urandom(16).hex()
        self._lock = threading.RLock()
        self._registry: _core.Registry | None = None
        self._closed = False
        self._history = PoolHistory()
        self._callbacks: tuple[tuple[str, Any], ...] = ()
        self._full_since: dict[str, float] = {}  # key -> monotonic time; see runtime/health.py
        self._worker_positions: dict[str, dict[int, int]] = {}  # key -> worker -> position; see runtime/metrics.py
        self._degraded: dict[str, str] = {}  # key -> problem, at the last check for events
        self._names = Names(self)
        hosts.register(self._identity, self)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    @typed
    def count_tokens(self, text: str, model: str | os.PathLike[str] | Model) -> int:
        """Count the tokens of a text, including the special tokens that the model adds.

        Args:
            text: 0 to 1,000,000 characters.
            model: as for :func:`embed`.

        Example:
            >>> mpool.count_tokens("A sentence.", "all-MiniLM-L6-v2")
            5
        """
        return len(self.tokenize(text, model))

    @typed
    def tokenize(self, text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True,
                 parse_special: bool = False) -> list[int]:
        """Convert a text to token ids.

        Args:
            text: 0 to 1,000,000 characters.
            model: as for :func:`embed`.
            add_special: add the special tokens that the model expects around a text.
            parse_special: convert the names of control tokens in the text (``"<|im_end|>"``) to those tokens.

        Raises:
            InvalidArgument: the text is not a str, is too long, or contains an unpaired surrogate.

        Example:
            >>> mpool.tokenize("A sentence.", "all-MiniLM-L6-v2")
            [101, 1037, 6251, 1012, 102]
        """
        with requests.before(self, model, None):
            generation.check_text(text, add_special, parse_special)
        return generation.tokenize(self._find(model), text, add_special, parse_special)

    @typed
    def detokenize(self, ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
                   skip_special: bool = True) -> str:
        """Convert token ids to text. Bytes of an incomplete character become U+FFFD.

        Args:
            ids: token ids, ``(n,)``.
            model: as for :func:`embed`.
            skip_special: omit control tokens; False: write them by name.

        Raises:
            InvalidArgument: an id is not in the vocabulary.

        Example:
            >>> mpool.detokenize(mpool.tokenize("Hello, world!", "SmolLM2-135M-Instruct"), "SmolLM2-135M-Instruct")
            'Hello, world!'
        """
        with requests.before(self, model, None):
            generation.check_ids(ids, skip_special)
        return generation.detokenize(self._find(model), ids, skip_special)

    # ---- models ----------------------------------------------------------------------------------------------------

    @typed
    def get(self, model: str | os.PathLike[str] | Model, capability: str | None = None) -> Model:
        """Return a handle of a model by name, without loading the model.

        Args:
            model: a key of the catalogue, a name from :func:`register` or :func:`load`, a path or a reference.
            capability: capability that the model must have; None: any.

        Raises:
            UnknownModel: no model has that name; the message suggests similar names.
            WrongCapability: the model has another capability; the message suggests a model that fits.
            InvalidArgument: ``model`` has the wrong type, or ``capability`` is unknown.

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
        entry = self._find(model, capability)
        return Model(entry.main, model._compute if isinstance(model, Model) else "auto")

    @typed
    @known_keywords
    def load(self, model: str | os.PathLike[str] | Model, *, name: str | None = None, pin: bool = False,
             keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
             timeout: float | None = None, isolation: Literal["thread", "process"] | None = None,
             weights: Literal["auto", "mapped", "packed"] | None = None,
             kv_dtype: Literal["auto", "int8"] | None = None,
             draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
             adapters: Mapping[str, str | os.PathLike[str]] | None = None) -> Model:
        """Load a model now, downloading missing files first, and wait until it can serve requests.

        Requests load their model by themselves. Call this to choose when the wait happens. If the model's files have
        changed since they were read, this reads them again; a running iterator of :func:`embed_iter` then raises
        SendError. A call that fails, also by its ``timeout``, leaves the pin, the keep-alive and the other options of
        the model as they were.

        Args:
            model: as for :func:`embed`.
            name: additional name of the model: 1 to 128 letters, digits and ``. _ + -``.
            pin: never unload the model, neither to make room for another nor because it is idle.
            keep_alive: how long the idle model stays loaded, instead of ``PoolConfig.keep_alive``: seconds or text such
                as ``"5m"``; 0: unload at once; below 0: forever.
            compute: as for :func:`embed`.
            progress: show a progress bar for downloads; None: if standard error is a terminal.
            timeout: seconds for loading, without downloads. After a timeout, loading continues in the background,
                unless it had not begun because the model was still being unloaded.
            isolation: where the model's workers run from now on, ``"thread"`` or ``"process"``; see
                ``PoolConfig.isolation``. None: unchanged. A loaded model keeps serving until the new one is loaded.
            weights: how the weights of a text model are used from now on, ``"auto"``, ``"mapped"`` or ``"packed"``; see
                ``PoolConfig.weights``. None: unchanged. As for ``isolation``, a loaded model is loaded again.
            kv_dtype: type of the keys and values of a language model in its KV cache. ``"auto"``: integers of 16 bits,
                or float32 if the model is computed in float32. ``"int8"``: about 53 % of the memory of 16 bits, and
                faster decoding after long prompts; the probabilities of tokens differ slightly. None: unchanged. A
                loaded model keeps serving until the new one is loaded.
            draft: a smaller text_to_text model with the same vocabulary, as ``model`` of :func:`embed`. It proposes
                tokens, and the model keeps those that it would have chosen itself: the results stay the same, byte for
                byte, and come faster where the draft model is much faster than the model. The pool measures both, and
                does not use the draft model where it does not help. It takes the memory of its weights and of a KV
                cache. False: no draft model from now on. None: unchanged. A loaded model keeps serving until the new
                one is loaded. Not available with ``isolation="process"``.
            adapters: low-rank adapters (LoRA) of a text_to_text or text_embedding model, at most 64: dict from name to
                path, of a folder of PEFT (``adapter_config.json``, ``adapter_model.safetensors``) or of a GGUF file of
                llama.cpp, or to a reference of the hub (``owner/name``), whose files are downloaded if necessary.
                Requests choose one with ``adapter=name``; requests of all adapters and without one are computed
                together. Adapters may update the linear layers of attention and of dense feed-forward networks, and
                take their memory in float32. ``{}``: no adapters from now on. None: unchanged. A loaded model keeps
                serving until the new one is loaded, and completes the requests that it has accepted.

        Raises:
            InvalidArgument: ``name`` is invalid or already used, the reference has an unknown format, ``kv_dtype`` is
                ``"int8"`` for a model without a KV cache, ``draft`` has another vocabulary or does not fit the model
                or its isolation, or the model cannot have ``adapters``.
            WrongCapability: ``draft`` is not a text_to_text model.
            UnknownModel, OfflineError, DownloadError, IntegrityError, FormatError, Unsupported, UnsafeFormat: the model
                cannot be found, downloaded or read.
            MemoryExhausted: the model does not fit into the pool's memory, even after unloading every model that can be
                unloaded. Models with active requests, pinned models, and models that are loading stay loaded. The hint
                lists the models that are pinned and idle: :func:`unload` frees them.
            SpawnFailed, SpawnTimeout, Timeout: the model could not be loaded.

        Example:
            >>> mpool.load("all-MiniLM-L6-v2", name="mini").key
            'all-MiniLM-L6-v2'
            >>> mpool.embed("A sentence.", "mini").shape
            (384,)
        """
        options = LoadOptions.checked(isolation, weights, kv_dtype, None, adapters)
        one_of("compute", compute, COMPUTE)
        if name is not None:
            check_name(name)
        kept = None if keep_alive is None else seconds_of(keep_alive, "keep_alive")
        if not isinstance(pin, bool):
            refuse("pin", pin, "True or False")
        if progress is not None and not isinstance(progress, bool):
            refuse("progress", progress, "True, False or None")
        deadline = _deadlines.deadline_of(timeout)
        check_places(options.adapters or (), self.config.model_folders)
        options = replaced(options, draft=self._draft_ref(draft))
        if isinstance(model, Model) and is_same(compute, "auto"):
            compute = model._compute  # type: ignore[assignment]
        old = self._names.named(_entry_of(model))
        if name is not None:
            self._names.check_free(name, old)
        entry = swapping.current(old)
        if entry is not old:
            swapping.wait_removed(self, old.core_keys(), deadline)
        try:
            entry.describe(progress)
        except BaseException:
            self._names.forget(entry)
            raise
        self._names.keep(entry)
        parts, key = entry.parts(), ""
        was = [part.setup.saved() for part in parts]
        rows: list[dict[str, Any]] = []
        try:
            entry.set_loading(options)
            keys = [part.core_key(compute) for part in parts]
            if kept is not None or pin and len(keys) > 1:  # the core itself restores the pin of the key that fails
                rows = [row for row in self.registry.entries() if row["key"] in keys]
            with suppress(MpoolError):  # the load below raises it
                self.registry.load(keys[0], timeout=0.0)  # while Python builds the tokenizer
            for part, key in zip(parts, keys):
                if part.describe().tokenizes and part.describe().tokenizer is not None:  # None: built, or no file
                    part.tokenizer()
                if kept is not None:
                    self.registry.keep_alive(key, kept)
            for key in keys:
                self.registry.load(key, pin=pin, timeout=_deadlines.remaining(deadline, entry.key))
        except BaseException as error:
            for part, before in zip(parts, was):  # the old workers may still serve, and the next attempt must retry
                part.setup.restore(before)
            for row in rows:
                with suppress(MpoolError):
                    self.registry.keep_alive(row["key"], row["keep_alive"],
                                             pin=False if pin and not row["pinned"] else None)
            if isinstance(error, (SendError, UnknownModel)) and entry.was_replaced():
                return self.load(entry.key, name=name, pin=pin, keep_alive=keep_alive, compute=compute,
                                 progress=progress, timeout=_deadlines.remaining(deadline, entry.key),
                                 isolation=isolation, weights=weights, kv_dtype=kv_dtype, draft=draft,
                                 adapters=adapters)
            if isinstance(error, MemoryExhausted):
                self._name_idle(error, key)
            raise
        if name is not None:
            entry = self._names.add_name(name, entry)
        return Model(entry, compute)

    def _draft_ref(self, draft: Any) -> str | Literal[False] | None:
        """Return the reference of a draft model. Reads no files.

        Raises:
            FileError: the reference is a path that does not exist.
        """
        if draft is None or draft is False:
            return draft  # type: ignore[no-any-return]
        if not isinstance(draft, (str, os.PathLike, Model)):
            refuse("draft", draft, "a key, a reference, a path, a Model, False or None")

        try:
            ref = self._find(draft).ref
        except MpoolError as error:
            error.rename({"model": "draft"})
            raise
        if isinstance(parse_reference(ref), LocalRef) and not os.path.exists(ref):
            resolve(ref)  # raises
        return ref

    def _name_idle(self, error: MemoryExhausted, key: str) -> None:
        """Add to the hint, once, which models could be unloaded to make room for another."""
        if "pinned and idle" in (error.hint or ""):
            return
        idle = [row.model for row in self.ps() if row.state == "ready" and row.pinned and row.model != key]
        if idle:
            error.hint = (f"{error.hint}. " if error.hint else "") \
                + "These models are pinned and idle, and unload() frees their memory: " + ", ".join(idle)

    @typed
    def check_free(self, name: str) -> None:
        """Check that :meth:`register` may give a name.

        Raises:
            InvalidArgument: the name is not valid, or is one of the catalogue or of another model of the pool.
        """
        self._names.check_free(name, None)

    @typed
    def unload(self, model: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> None:
        """Free a model's memory after its active requests have completed, even if the model is pinned.

        The names of the model stay valid: the next request loads it again.

        Args:
            model: any name of the model, or its handle.
            timeout: seconds to wait for active requests.

        Raises:
            UnknownModel: no model has that name.
            Timeout: requests are still active; the memory is freed when they have completed.
        """
        deadline = _deadlines.deadline_of(timeout)
        entry = self._names.named(_entry_of(model))
        if entry.changed(folders=True):
            swapping.renew(entry, deadline, pinned=False)
            return
        entry.replacement.kept.clear()
        for key in entry.core_keys():
            with suppress(UnknownModel):  # another thread has unloaded it, because its files changed
                self.registry.evict(key, timeout=_deadlines.remaining(deadline, key))

    @typed
    @known_keywords
    def register(self, name: str, model: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
                 default_prompt_name: str | None = None, pooling: str | None = None, normalize: bool | None = None,
                 max_length: int | None = None, chat_template: str | None = None,
                 isolation: Literal["thread", "process"] | None = None,
                 weights: Literal["auto", "mapped", "packed"] | None = None,
                 kv_dtype: Literal["auto", "int8"] | None = None,
                 draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
                 adapters: Mapping[str, str | os.PathLike[str]] | None = None, replace: bool = False) -> Model:
        """Add a model under a name, which can then be used like a key of the catalogue.

        Reads the model's files, downloading missing ones, but loads no weights. The settings below replace those of
        the files; None: keep the setting of the files. The same call again returns the same model.

        Args:
            name: name of the model: 1 to 128 letters, digits and ``. _ + -``. A key of the catalogue is refused, in
                upper and lower case. An alias of the catalogue is allowed, with a warning: it then names this model.
            model: a path or a reference.
            prompts: prompt name -> text that is put before an input.
            default_prompt_name: name of the prompt for inputs without a prompt name.
            pooling: ``"cls"``, ``"mean"``, ``"max"``, ``"mean_sqrt_len"``, ``"weightedmean"`` or ``"lasttoken"``.
            normalize: True: scale vectors to length 1.
            max_length: maximum tokens of a text, at most the limit in the files.
            chat_template: Jinja template for chats.
            isolation: where the model's workers run, ``"thread"`` or ``"process"``; None: ``PoolConfig.isolation``.
            weights: as for :func:`load`; None: ``PoolConfig.weights``.
            kv_dtype: as for :func:`load`; None: ``PoolConfig.kv_dtype``.
            draft: as for :func:`load`; None and False: no draft model.
            adapters: as for :func:`load`; None and ``{}``: no adapters.
            replace: if the name is already registered, give it to this model, with the settings of this call: those of
                the old model are dropped, except its pin and its keep-alive (:func:`swap` keeps all that it does not
                name). If the old model is loaded, this waits until the new one is loaded, as :func:`swap` does; if it
                is not, nothing is loaded.

        Raises:
            InvalidArgument: the name is invalid, or already used for another model or other settings, or the model does
                not support a setting.
            WrongCapability: ``replace``, and the model lacks a capability of the old one.
            FileError, UnknownModel, OfflineError: the reference cannot be found or read, as for :func:`load`.

        Example:
            >>> model = mpool.register("mini-with-prompts", "all-MiniLM-L6-v2", prompts={"query": "Search for: "})
            >>> bool((model.embed("cats", "query") == mpool.embed("Search for: cats")).all())
            True
        """
        options = LoadOptions.checked(isolation, weights, kv_dtype, None, adapters)
        settings = overrides.checked(prompts=prompts, default_prompt_name=default_prompt_name, pooling=pooling,
                                     normalize=normalize, max_length=max_length, chat_template=chat_template)
        if not isinstance(replace, bool):
            refuse("replace", replace, "True or False")
        check_name(name)
        check_places(options.adapters or (), self.config.model_folders)
        options = replaced(options, draft=self._draft_ref(draft))
        return Model(self._names.register(name, _ref_in("model", model), settings, options, replace))

    @typed
    @known_keywords
    def swap(self, model: str | Model, new: str | os.PathLike[str], *, timeout: float | None = None,
             prompts: Mapping[str, str] | None = None, default_prompt_name: str | None = None,
             pooling: str | None = None, normalize: bool | None = None, max_length: int | None = None,
             chat_template: str | None = None, isolation: Literal["thread", "process"] | None = None,
             weights: Literal["auto", "mapped", "packed"] | None = None,
             kv_dtype: Literal["auto", "int8"] | None = None,
             draft: str | os.PathLike[str] | Model | Literal[False] | None = None,
             adapters: Mapping[str, str | os.PathLike[str]] | None = None) -> Model:
        """Replace the model of a registered name by another, without failing a request.

        Reads the new model's files and loads its weights while the old model serves. Then all requests for the name
        go to the new model, also those of handles and of threads that use the old one: after this function returns, no
        request begins on the old model. Requests that the pool accepted before are completed by the old model, whose
        memory is freed after the last of them. A request is computed by one of the two models as a whole. Only an
        iterator of :func:`embed_iter` that is being read cannot continue: it raises SendError.

        If the new model cannot be read or loaded, this raises the error, and the old model goes on serving. Both models
        must fit into the pool's memory: the pool does not evict the old one for the new one. Every setting that the
        call does not name stays as the name has it: those below, the pin and the keep-alive.

        Args:
            model: a name from :func:`register`, or its handle.
            new: path or reference of the new model. It must have the capabilities of the old one. With the reference
                that the name has, its files are read again.
            timeout: seconds for loading, without downloads. After a timeout, the new model is dropped.
            prompts, default_prompt_name, pooling, normalize, max_length, chat_template: as for :func:`register`. None:
                as the name has it. :func:`register` with ``replace=True`` returns to the settings of the files.
            isolation, weights, kv_dtype: as for :func:`load`; None: as the name has it.
            draft: as for :func:`load`; None: as the name has it; False: no draft model.
            adapters: as for :func:`load`; None: as the name has them; ``{}``: no adapters.

        Returns:
            A handle of the name. Existing handles follow the name.

        Raises:
            UnknownModel: no model is registered under the name.
            InvalidArgument: the name is one of the catalogue or an alias of :func:`load`, or the new model does not
                support a setting, be it given or kept.
            WrongCapability: the new model lacks a capability of the old one.
            MemoryExhausted: the two models do not fit into the pool's memory together.
            Timeout: the new model was not loaded in time.
            SendError: the new model was removed before it took the name, because its files changed meanwhile.
            FileError, OfflineError, FormatError, SpawnFailed, ...: the new model cannot be read or loaded.

        Example:
            >>> model = mpool.register("search", "all-MiniLM-L6-v2", max_length=64)
            >>> mpool.swap("search", "all-MiniLM-L6-v2", max_length=128)
            mpool.Model('search')
            >>> model.context_length
            128
        """
        _deadlines.deadline_of(timeout)  # raises for an invalid timeout before files are downloaded
        options = LoadOptions.checked(isolation, weights, kv_dtype, None, adapters)
        settings = overrides.checked(prompts=prompts, default_prompt_name=default_prompt_name, pooling=pooling,
                                     normalize=normalize, max_length=max_length, chat_template=chat_template)
        found = _ref_in("new", new)
        check_places(options.adapters or (), self.config.model_folders)
        options = replaced(options, draft=self._draft_ref(draft))
        entry = self._names.swap(_entry_of(model), found, settings, options, timeout)
        return Model(entry, model._compute if isinstance(model, Model) else "auto")

    @typed
    def ps(self) -> ModelTable:
        """Return the state, memory and request counts of the models in use.

        Returns:
            Sequence of :class:`mpool.debug.ModelRow`, ordered by key. It is displayed as a table in a terminal and in a
            notebook.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> [row.capability for row in mpool.ps() if row.model == "all-MiniLM-L6-v2"]
            ['text_embedding']
        """
        from .debug import table  # HTML and tables, which few programs print

        entries = self._names.entries()
        isolated = {key for entry in entries if entry.setup.runs_in == "process" for key in entry.core_keys()}
        drafts = {key: entry.loading.draft for entry in entries if entry.loading.draft for key in entry.core_keys()}
        adapters = {key: entry.setup.adapter_names for entry in entries if entry.loading.adapters
                    for key in entry.core_keys()}
        rows = self._registry.entries() if self._registry is not None else ()
        counted = self._history.metrics.rows(row["key"] for row in rows)
        return table(rows, isolated, drafts, adapters, {key: one.prefix_tokens for key, one in counted.items()})

    # ---- state -----------------------------------------------------------------------------------------------------

    @overload
    def metrics(self, format: Literal["dict"] = "dict") -> dict[str, Any]: ...
    @overload
    def metrics(self, format: Literal["prometheus"]) -> str: ...
    @typed
    def metrics(self, format: Literal["dict", "prometheus"] = "dict") -> dict[str, Any] | str:
        """Return the counters and gauges of the pool.

        Args:
            format: ``"dict"``, or ``"prometheus"`` for the text format of Prometheus (version 0.0.4), with names that
                begin with ``mpool_``. Neither needs an extra.

        Returns:
            A dict, or the text. The dict has counters by name (``total_requests``, ``errors``, ``timeouts``,
            ``queue_full_rejections``, ...). ``units_in`` and ``units_out`` count the tokens and images that completed
            requests read and generated. ``memory_limit``, ``memory_used`` and ``bytes_by_kind`` are in bytes. Further
            keys are ``compute_threads``, ``compute_threads_leased`` and ``queue_depths`` (by capability). ``models``
            has for each key its state, counts and ``latency`` in seconds, with a histogram of (upper bound, count); the
            histograms ``request_seconds``, ``queue_seconds``, ``time_to_first_token_seconds`` and
            ``time_per_output_token_seconds``; and ``worker_deaths``, ``retries`` and ``evictions`` by reason, and
            ``failed`` by error. The other ``failed`` counts errors of requests whose model was not found.

        Raises:
            InvalidArgument: unknown format.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> mpool.metrics()["total_requests"] > 0
            True
        """
        one_of("format", format, ("dict", "prometheus"))
        if format == "dict":
            return _metrics.collect(self)

        return _prometheus.prometheus(self)

    def _stats(self) -> dict[str, Any]:
        return _metrics.stats(self)

    @typed
    def health(self) -> Health:
        """Return the health of the pool. Fast: never waits for requests.

        Returns:
            A :class:`mpool.Health` with a status. ``"degraded"``: a queue stays full, a worker is much slower than the
            other workers of its model or was abandoned, a model has failed, its breaker is not closed, memory is
            critical, or a kind of native calls is starved (``native_calls``). ``"unhealthy"``: the pool is closed or
            shutting down, or the workers of all models in use died again and again.

        Example:
            >>> mpool.health().status
            'healthy'
        """
        return _health.health(self)

    @typed
    def ping(self, model: str | os.PathLike[str] | Model | None = None) -> tuple[Pong, ...]:
        """Report the state of every worker. Never queues behind requests, loads nothing, and keeps no model alive.

        Args:
            model: a model; None: all models.

        Returns:
            One :class:`mpool.results.Pong` per worker; empty for a model that is not loaded.

        Raises:
            UnknownModel, InvalidArgument: no model has that name.

        Example:
            >>> _ = mpool.embed("A sentence.")
            >>> mpool.get("all-MiniLM-L6-v2").ping()[0].queue_depth
            0
        """
        return _health.pongs(self, model)

    @typed
    def check(self, model: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> float:
        """Check that a model computes, with one request of the highest priority. Loads the model if necessary.

        The request embeds a text or an image, generates one token (a vision model: about an image, so that the image
        encoder computes too), or generates the smallest image in one step.

        Args:
            model: the model.
            timeout: seconds; None: no limit.

        Returns:
            Duration of the check in seconds.

        Raises:
            ModelError, NumericError, Timeout: the model fails, as for the functions of its capability.

        Example:
            >>> mpool.get("all-MiniLM-L6-v2").check(timeout=60) < 60
            True
        """
        return _health.check(self, model, timeout)

    @typed
    def history(self) -> list[RequestRecord]:
        """Return the last 1,000 requests that ended, the oldest first. Fast: never waits for requests.

        A call of a function is one request, also for a list of inputs. Its stream or job ends with the computation, or
        when it is closed or dropped; it appears here once the program has seen its end. The records have no inputs and
        no results.

        Returns:
            List of :class:`mpool.results.RequestRecord`.

        Example:
            >>> model = mpool.get("all-MiniLM-L6-v2")
            >>> _ = model.embed("A sentence.")
            >>> [(past.verb, past.model, past.state) for past in model.pool.history()[-1:]]
            [('embed', 'all-MiniLM-L6-v2', 'completed')]
        """
        return [RequestRecord(*fields) for fields in self._history]

    @property
    def pools(self) -> CapabilityPools:
        """Mapping from a capability to a :class:`mpool.results.CapabilityPool` with its policy, workers, queue and
        models. Each look-up takes a new snapshot.

        Example:
            >>> mpool.get("all-MiniLM-L6-v2").pool.pools["text_embedding"].queue_depth
            0
        """
        return CapabilityPools(self)

    @typed
    def on(self, event: Kind, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Call a function on every event of a kind, for workers or requests of this pool.

        One thread of the process runs all callbacks in sequence, soon after the event. If the system cannot start it,
        the next request tries again. A callback may use mpool. If it raises, the logger ``mpool.pool`` logs the
        exception. While it blocks, up to a thousand further events are queued; the rest are dropped and counted
        (``events_dropped`` of :func:`mpool.metrics`). Requests never wait for callbacks.

        Args:
            event: ``"spawn"``, ``"ready"``, ``"evict"``, ``"fail"`` of workers; ``"request_start"``,
                ``"request_complete"``, ``"request_fail"`` of requests; ``"degraded"``, ``"recovered"`` of models, whose
                health is checked twice a second: :attr:`mpool.results.PoolEvent.reason` is the problem.
            callback: function with one parameter, a :class:`mpool.results.PoolEvent`.

        Returns:
            A function that removes the callback.

        Raises:
            InvalidArgument: unknown event, or ``callback`` is not callable.
            ShuttingDown: the pool is closed, or :meth:`begin_shutdown` was called.

        Example:
            >>> with mpool.Pool() as pool:
            ...     stop = pool.on("ready", lambda event: print(event.model))
            ...     stop()
        """
        return _events.subscribe(self, event, callback)

    @typed
    def init_maintenance(self) -> None:
        """Start the maintenance thread now, which checks deadlines, idle workers and memory. Idempotent.

        Without this call, the first load starts it.

        Raises:
            ShuttingDown: :func:`begin_shutdown` was called.
        """
        self.registry.maintain()

    # ---- for the other modules of the package ----------------------------------------------------------------------

    def _find(self, model: Any, capability: str | None = None) -> Entry:
        return self._names.find(_entry_of(model), capability)

    def _known(self, model: Any, capability: str | None) -> Entry | None:
        return None if isinstance(model, MissingModel) else self._names.known(_entry_of(model), capability)

    @typed
    def _restore(self, key: str, ref: str, overrides: Mapping[str, Any], compute: str,
                 options: LoadOptions) -> Model:
        """Return the handle of a pickled model, possibly of another process. An existing entry stays unchanged."""
        return Model(self._names.restore(key, ref, overrides, options), compute)

    # ---- lifetime --------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> _core.Registry:
        """The core's registry, created on first use.

        Raises:
            ShuttingDown: the pool is closed.
        """
        registry = self._registry
        if registry is None:
            from .api import functions
            with self._lock:
                if self._closed:
                    raise ShuttingDown("the pool is closed", hint="Create a new mpool.Pool")
                if self._registry is None:
                    functions.install()
                    _logging.update_level()
                    self._registry = _core.Registry(**self.config._registry_options())
                registry = self._registry
        _logging.start()
        return registry

    @typed
    def begin_shutdown(self) -> None:
        """Refuse new requests from now on (ShuttingDown). Requests in flight continue. Idempotent."""
        with self._lock:
            self._closed = True
            registry = self._registry
        if registry is not None:
            registry.begin_shutdown()

    @property
    def closed(self) -> bool:
        """True after :meth:`begin_shutdown` or :meth:`close`."""
        return self._closed

    @typed
    def close(self) -> None:
        """Refuse new requests, wait up to ``shutdown_grace`` seconds for those in flight, and free all memory.

        Requests that have not completed by then raise ShuttingDown. Callbacks of :meth:`on` get their last events
        before the method returns, unless they take longer than a second. Idempotent. Thread-safe.
        """
        self.begin_shutdown()
        registry = self._registry
        if registry is not None:
            registry.close()
            _logging.flush()
            if self._callbacks:
                _logging.wait_for_events(EVENT_SECONDS)
        for entry in self._names.entries():  # they and the pool refer to each other, and wait for a collection
            entry.forget(wait=False)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mpool.Pool of {len(self._names.by_key)} models{', closed' if self._closed else ''}>"

    def __reduce__(self) -> Any:
        return _restore_pool, (self.config, self._identity)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._names.renew_locks()
        if self._registry is not None:
            self._registry.after_fork()


def _restore_pool(config: PoolConfig, identity: str) -> Pool:
    """Return the pickled pool itself if it is open in this process, else a new one with the same configuration."""
    found: Pool | None = hosts.find(identity)
    return found if found is not None and not found._closed else Pool(config, _identity=identity)


def _entry_of(model: Any) -> Any:
    """Return the entry of a handle. Other ways to name a model (a name, a path, a reference) stay as they are."""
    return model._entry if isinstance(model, Model) else model


def _ref_in(param: str, ref: Any) -> str:
    """Return a reference in a form that is independent of the working directory."""
    try:
        return str(parse_reference(ref))
    except InvalidArgument as error:
        error.rename({"model": param})
        raise


def _after_fork_in_child() -> None:
    for pool in hosts.hosts():
        pool._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
__all__ = ["Pool"]
