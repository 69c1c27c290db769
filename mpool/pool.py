"""A pool: models by name, calls to them, what is loaded. The module's functions use a process-wide one."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from .config import PoolConfig
from .debug import show
from .durations import seconds_of
from .errors import InvalidArgument, MemoryExhausted, ShuttingDown, WrongCapability
from .model import Model
from .runtime import hosts
from .runtime import logs as _logging
from .runtime import threads as _threads
from .runtime.entry import OVERRIDES, Entry
from .tasks import options as _options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from . import _core
    from .images import ImageInput
    from .results import Completion
    from .runtime.events import Kind, PoolEvent
    from .runtime.health import CapabilityPools, Health, Pong
    from .tasks.images_result import Pictures
    from .tasks.jobs import Job
    from .tasks.options import Call, Compute, EmbedOptions, ImageOptions, PictureOptions, RerankOptions, TextOptions
    from .tasks.rerank import Ranking
    from .tasks.streams import Stream
    from .tasks.text_embedding import EmbedIterator
    from .tasks.text_to_image import PictureStream
    from .tasks.text_to_image import Request as DrawRequest
    from .tasks.text_to_text import Request

#: What is asked of an image when nothing is.
DESCRIBE = "Describe the image."
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class Pool:
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

    # ---- embeddings ------------------------------------------------------------------------------------------------

    @_options.spelt_out
    def embed(self, inputs: str | Sequence[str], model: str | os.PathLike[str] | Model | None = None, *,
              task: Literal["query", "document"] | None = None, max_inputs: int | None = None,
              **options: Unpack[EmbedOptions]) -> NDArray[Any]:
        """See :func:`mpool.embed`."""
        from .tasks import text_embedding as embedding
        from .tasks import vectors

        passed: dict[str, Any] = dict(options)
        call, most = _options.begin(self.config, passed), self._most(max_inputs)
        progress = vectors.check_progress(passed.pop("progress", None))
        texts = None if isinstance(inputs, str) else embedding.texts_of(inputs, most)
        plan = self._plan(model, _options.embedding("embed", {"task": task, **passed}))
        if texts is None:
            return vectors.embed_one(embedding.TEXTS, plan, inputs, call)
        return vectors.embed_many(embedding.TEXTS, plan, list(embedding.slices(texts)), progress, call)

    @_options.spelt_out
    def embed_iter(self, iterable: Iterable[str], model: str | os.PathLike[str] | Model | None = None, *,
                   task: Literal["query", "document"] | None = None, batch_size: int | None = None,
                   **options: Unpack[EmbedOptions]) -> EmbedIterator:
        """See :func:`mpool.embed_iter`."""
        from .tasks import text_embedding as embedding
        from .tasks import vectors

        if isinstance(iterable, (str, bytes, Mapping)) or not hasattr(iterable, "__iter__"):
            raise InvalidArgument(f"iterable is {type(iterable).__name__}, allowed: an iterable of str")
        passed: dict[str, Any] = dict(options)
        call = _options.begin(self.config, passed)
        progress = vectors.check_progress(passed.pop("progress", None))
        chosen = _options.embedding("embed_iter", {"task": task, **passed})
        batch_size = embedding.check_streamable(chosen, batch_size)
        return embedding.EmbedIterator(self._plan(model, chosen), iterable, batch_size, progress, call)

    def rerank(self, query: str, documents: Sequence[str], model: str | os.PathLike[str] | Model, *,
               top_k: int | None = None, **options: Unpack[RerankOptions]) -> Ranking:
        """See :func:`mpool.rerank`."""
        from .tasks import rerank as reranking
        from .tasks import text_embedding as embedding
        from .tasks import vectors

        passed: dict[str, Any] = dict(options)
        call = _options.begin(self.config, passed)
        texts, count = reranking.check(query, documents, top_k, self.config.max_embed_inputs)
        plan = reranking.plan_of(self._plan(model, reranking.options(passed)), query)
        parts = list(embedding.slices(texts))
        return reranking.ranking(plan, texts, vectors.embed_many(embedding.TEXTS, plan, parts, False, call), count)

    def _most(self, max_inputs: int | None) -> int:
        if max_inputs is None:
            return self.config.max_embed_inputs
        from .checks import integer, shown

        most = integer(max_inputs)
        if most is None or most < 1:
            raise InvalidArgument(f"max_inputs is {shown(max_inputs)}, allowed: 1 or more")
        return most

    def _plan(self, model: Any, options: Any) -> Any:
        from dataclasses import replace

        from .tasks import text_embedding as embedding

        if model is None and options.scores:
            raise InvalidArgument("model is None, allowed: a cross-encoder", hint="No reranker is the default")
        entry = self._find(model, "text_embedding")
        if isinstance(model, Model) and _is_auto(options.compute) and model._compute != "auto":
            options = replace(options, compute=model._compute)
        return embedding.plan(entry, options)

    # ---- images ----------------------------------------------------------------------------------------------------

    @_options.spelt_out
    def embed_image(self, images: ImageInput | Sequence[ImageInput],
                    model: str | os.PathLike[str] | Model | None = None, *, max_inputs: int | None = None,
                    **options: Unpack[ImageOptions]) -> NDArray[Any]:
        """See :func:`mpool.embed_image`."""
        from .images import images_of
        from .tasks import image_embedding, vectors

        passed: dict[str, Any] = dict(options)
        call, most = _options.begin(self.config, passed), self._most(max_inputs)
        progress = vectors.check_progress(passed.pop("progress", None))
        found = images_of(images, most)
        plan = self._image_plan(model, _options.image_embedding(passed))
        if found is None:
            return vectors.embed_one(image_embedding.IMAGES, plan, images, call)
        return vectors.embed_many(image_embedding.IMAGES, plan, image_embedding.slices(found), progress, call)

    def _image_plan(self, model: Any, options: Any) -> Any:
        from dataclasses import replace

        from .tasks import image_embedding

        entry = self._find(model, "image_embedding")
        if isinstance(model, Model) and _is_auto(options.compute) and model._compute != "auto":
            options = replace(options, compute=model._compute)
        return image_embedding.plan(entry, options)

    # ---- text ------------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *,
                 stream: Literal[False] = False, **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def generate(self, prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *,
                 stream: Literal[True], **sampling: Unpack[TextOptions]) -> Stream: ...
    def generate(self, prompt: str | Sequence[int], model: str | os.PathLike[str] | Model | None = None, *,
                 stream: bool = False, **sampling: Any) -> Completion | Stream:
        """See :func:`mpool.generate`."""
        call = _options.begin(self.config, sampling)
        return self._text(self._prompt_request(prompt, model, sampling), stream, call)

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
             stream: Literal[False] = False, **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
             stream: Literal[True], **sampling: Unpack[TextOptions]) -> Stream: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], model: str | os.PathLike[str] | Model | None = None, *,
             stream: bool = False, **sampling: Any) -> Completion | Stream:
        """See :func:`mpool.chat`."""
        call = _options.begin(self.config, sampling)
        return self._text(self._chat_request(messages, model, sampling, call), stream, call)

    @overload
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str,
               model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[False] = False,
               **sampling: Unpack[TextOptions]) -> Completion: ...
    @overload
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str,
               model: str | os.PathLike[str] | Model | None = None, *, stream: Literal[True],
               **sampling: Unpack[TextOptions]) -> Stream: ...
    def vision(self, images: ImageInput | Sequence[ImageInput], prompt: str,
               model: str | os.PathLike[str] | Model | None = None, *, stream: bool = False,
               **sampling: Any) -> Completion | Stream:
        """See :func:`mpool.vision`."""
        call = _options.begin(self.config, sampling)
        return self._text(self._vision_request(images, prompt, model, sampling, call), stream, call)

    def describe_image(self, path: str | os.PathLike[str], query: str = DESCRIBE,
                       model: str | os.PathLike[str] | Model | None = None, **sampling: Unpack[TextOptions]) -> str:
        """See :func:`mpool.describe_image`."""
        return self.vision(self._described_path(path), query, model, **sampling).text

    def describe_url(self, url: str, query: str = DESCRIBE, model: str | os.PathLike[str] | Model | None = None,
                     **sampling: Unpack[TextOptions]) -> str:
        """See :func:`mpool.describe_url`."""
        sampling.setdefault("allow_urls", True)
        return self.vision(self._described_url(url), query, model, **sampling).text

    @staticmethod
    def _described_path(path: Any) -> Path:
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgument(f"path is {type(path).__name__}, allowed: a path", hint="vision takes other images")
        return Path(path)

    @staticmethod
    def _described_url(url: Any) -> str:
        from .checks import shown

        if not isinstance(url, str) or not url[:8].lower().startswith(("http:", "https:")):
            raise InvalidArgument(f"url is {shown(url)}, allowed: an http or https URL",
                                  hint="describe_image takes a path")
        return url

    def _text(self, request: Request, stream: bool, call: Call) -> Completion | Stream:
        from .tasks.streams import Stream

        if not isinstance(stream, bool):
            raise InvalidArgument(f"stream is {stream!r}, allowed: True or False")
        started = Stream(request, call)
        return started if stream else started.result()

    def _prompt_request(self, prompt: Any, model: Any, options: dict[str, Any]) -> Request:
        from .tasks import text_to_text as generation

        entry, compute = self._text_entry(model, options)
        for name in ("tools", "tool_choice", "parallel_tool_calls", "template_options", "allow_urls"):
            if options.pop(name, None) is not None:
                raise InvalidArgument(f"{name} is given for a raw prompt, allowed: in chat", key=entry.key)
        ids = generation.prompt_ids(entry, prompt, options.pop("parse_special", False))
        if entry.capability == "vision":
            from .tasks import vision as seeing

            seeing.check_raw(entry, ids)
        return generation.prepare(entry, ids, compute, options)

    def _chat_request(self, messages: Any, model: Any, options: dict[str, Any], call: Call | None = None,
                      capability: str = "text_to_text") -> Request:
        from .conversation import reasoning
        from .tasks import chat_prompt as chatting
        from .tasks import text_to_text as generation

        entry, compute = self._text_entry(model, options, capability)
        prompt, images, tools = chatting.prompt_of(entry, messages, options, call)
        splitter = reasoning.of_template(entry.template().source, prompt.text, tools is not None)
        return generation.prepare(entry, prompt.ids, compute, options, splitter, images, tools)

    def _vision_request(self, images: Any, prompt: Any, model: Any, options: dict[str, Any],
                        call: Call | None = None) -> Request:
        from .tasks import vision as seeing

        return self._chat_request(seeing.messages_of(images, prompt), model, options, call, "vision")

    def _text_entry(self, model: Any, options: dict[str, Any],
                    capability: str = "text_to_text") -> tuple[Entry, str]:
        entry = self._find(model, capability)
        compute = options.pop("compute", "auto")
        if isinstance(model, Model) and _is_auto(compute):
            compute = model._compute
        entry.core_key(compute)  # begins to load before the prompt is looked at
        return entry, compute

    # ---- pictures --------------------------------------------------------------------------------------------------

    @overload
    def generate_image(self, prompt: str, model: str | os.PathLike[str] | Model | None = None, *,
                       stream: Literal[False] = False, **options: Unpack[PictureOptions]) -> Pictures: ...
    @overload
    def generate_image(self, prompt: str, model: str | os.PathLike[str] | Model | None = None, *,
                       stream: Literal[True], **options: Unpack[PictureOptions]) -> PictureStream: ...
    def generate_image(self, prompt: str, model: str | os.PathLike[str] | Model | None = None, *,
                       stream: bool = False, **options: Any) -> Pictures | PictureStream:
        """See :func:`mpool.generate_image`."""
        from .tasks.text_to_image import PictureStream

        if not isinstance(stream, bool):
            raise InvalidArgument(f"stream is {stream!r}, allowed: True or False")
        call = _options.begin(self.config, options)
        started = PictureStream(self._draw_request(prompt, model, options, stream), call)
        return started if stream else started.result()

    def _draw_request(self, prompt: Any, model: Any, options: dict[str, Any], watched: bool = True) -> DrawRequest:
        """``watched``: somebody can see its steps."""
        from .tasks import text_to_image as drawing

        chosen = drawing.options_of(options)
        entry = self._find(model, "text_to_image")
        if isinstance(model, Model) and _is_auto(chosen.compute):
            chosen = replace(chosen, compute=model._compute)
        return drawing.prepare(entry, prompt, chosen, watched)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def count_tokens(self, text: str, model: str | os.PathLike[str] | Model) -> int:
        """See :func:`mpool.count_tokens`."""
        return len(self.tokenize(text, model))

    def tokenize(self, text: str, model: str | os.PathLike[str] | Model, *, add_special: bool = True,
                 parse_special: bool = False) -> list[int]:
        """See :func:`mpool.tokenize`."""
        from .tasks import text_to_text as generation

        return generation.tokenize(self._find(model), text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int] | NDArray[np.integer], model: str | os.PathLike[str] | Model, *,
                   skip_special: bool = True) -> str:
        """See :func:`mpool.detokenize`."""
        from .tasks import text_to_text as generation

        return generation.detokenize(self._find(model), ids, skip_special)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, capability: str, **request: Any) -> Job:
        """See :func:`mpool.submit`."""
        from .tasks import jobs

        return jobs.submit(self, capability, request)

    # ---- models ----------------------------------------------------------------------------------------------------

    def get(self, key: str | os.PathLike[str] | Model, capability: str | None = None) -> Model:
        """See :func:`mpool.get`."""
        if capability is not None:
            from .checks import nearest

            if not isinstance(capability, str) or capability not in _options.CAPABILITIES:
                from .checks import shown

                near = nearest(capability, list(_options.CAPABILITIES), 1) if isinstance(capability, str) else []
                raise InvalidArgument(f"capability is {shown(capability)}"
                                      + (f"; the nearest is {near[0]}" if near else "")
                                      + ", allowed: " + ", ".join(_options.CAPABILITIES))
        entry = self._find(key, capability)
        return Model(entry._main or entry, key._compute if isinstance(key, Model) else "auto")

    def load(self, ref: str | os.PathLike[str] | Model, *, alias: str | None = None, pin: bool = False,
             keep_alive: float | str | None = None, compute: Compute = "auto", progress: bool | None = None,
             timeout: float | None = None, isolation: Literal["thread", "process"] | None = None) -> Model:
        """See :func:`mpool.load`."""
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
        """See :func:`mpool.unload`."""
        deadline = _threads.deadline_of(timeout)
        entry = self._find(alias)
        if entry.changed(folders=True):
            self._forget_files(entry, deadline)
            return
        for key in entry.core_keys():
            self.registry.evict(key, timeout=_threads.remaining(deadline, key))

    def _forget_files(self, entry: Entry, deadline: float | None) -> None:
        """What was read of files that have changed goes, once its calls are over: the next use reads them anew."""
        for key in entry.forget():
            self.registry.remove(key, timeout=_threads.remaining(deadline, key))

    def register(self, key: str, ref: str | os.PathLike[str], *, prompts: Mapping[str, str] | None = None,
                 default_prompt_name: str | None = None, pooling: str | None = None, normalize: bool | None = None,
                 max_length: int | None = None, chat_template: str | None = None,
                 isolation: Literal["thread", "process"] | None = None) -> Model:
        """See :func:`mpool.register`."""
        _check_isolation(isolation)
        settings = {"prompts": prompts, "default_prompt_name": default_prompt_name, "pooling": pooling,
                    "normalize": normalize, "max_length": max_length, "chat_template": chat_template}
        if not isinstance(ref, (str, os.PathLike)):
            raise InvalidArgument(f"ref is {type(ref).__name__}, allowed: a key, a reference or a path")
        return self._register(key, os.fspath(ref), {name: value for name, value in settings.items()
                                                    if value is not None}, isolation)

    def ps(self) -> show.ModelTable:
        """See :func:`mpool.ps`."""
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
        """See :func:`mpool.metrics`."""
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
        """See :func:`mpool.health`."""
        from .runtime import health as _health

        return _health.health(self)

    def ping(self, key: str | os.PathLike[str] | Model | None = None) -> tuple[Pong, ...]:
        """See :func:`mpool.ping`."""
        from .runtime import health as _health

        return _health.pongs(self, key)

    def check(self, key: str | os.PathLike[str] | Model, *, timeout: float | None = None) -> float:
        """See :func:`mpool.check`."""
        from .runtime import health as _health

        return _health.check(self, key, timeout)

    @property
    def pools(self) -> CapabilityPools:
        """See :data:`mpool.pools`."""
        from .runtime.health import CapabilityPools

        return CapabilityPools(lambda: self)

    def on(self, event: Kind, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Calls a function whenever something happens to a worker or a call of this pool.

        One thread of the process calls all of them, one after the other, soon after the event. A callback may use mpool
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
        """See :func:`mpool.init_maintenance`."""
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
            from . import _core, _runtime

            with self._lock:
                if self._closed:
                    raise ShuttingDown("the pool is closed", hint="Make a new mpool.Pool")
                if self._registry is None:
                    _runtime.install()
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
