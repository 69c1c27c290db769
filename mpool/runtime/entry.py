"""A model of a pool: its name, its description, its tokenizer, and its entries in the core's registry.

Files are read once, on first use; the core gets a spec and loads from it without Python. Each compute type has its own
entry in the core, loaded when a request first asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks import one_of, shown
from ..errors import IntegrityError, InvalidArgument, MpoolError, WrongCapability
from ..names import COMPUTE as COMPUTE
from . import isolation as _isolated

if TYPE_CHECKING:
    from ..conversation.template import ChatTemplate
    from ..models import ModelDescription
    from ..tokenizers import Tokenizer
    from ..tokenizers.gguf_vocab import GGUFVocab
    from .hosts import Host

#: Maximum length of a key of the core, in bytes.
_MAX_KEY = 240


class Entry:
    """A model of a pool. Thread-safe.

    Attributes:
        key: its name in the pool.
        ref: the reference of its files.
        overrides: settings that replace those of the files (see :meth:`mpool.Pool.register`).
        isolation: ``"thread"`` or ``"process"``, where its workers run; None: the pool's setting.
        plans: cache of options of embedding requests -> their plan; see vectors.py.
    """

    def __init__(self, pool: Host, key: str, ref: str, capability: str | None = None,
                 overrides: Mapping[str, Any] | None = None, isolation: str | None = None) -> None:
        self.pool, self.key, self.ref, self.isolation = pool, key, ref, isolation
        self.overrides = dict(overrides or {})
        self.plans: dict[Any, Any] = {}
        self._capability = capability
        self._towers: dict[str, Entry] = {}  # the model's other networks, by capability; see tower()
        self._main: Entry | None = None  # the entry that this network belongs to
        self._lock = threading.RLock()
        self._description: ModelDescription | None = None
        self._tokenizer: Tokenizer | None = None
        self._vocab: GGUFVocab | None = None  # between the spec, which wants its table, and the tokenizer
        self._template: ChatTemplate | None = None
        self._core: dict[str, str] = {}
        self._table: tuple[bytes, Any] | None = None

    def renew_lock(self) -> None:
        """In the child of a fork: the thread that held the lock does not exist."""
        self._lock = threading.RLock()
        for tower in self._towers.values():
            tower.renew_lock()
        self.plans = {}  # the next request asks the pool for its registry, which restarts the child's threads

    def ready(self, compute: str, chat: bool = False) -> bool:
        """A request needs no file beyond those already read."""
        tokenizer = self._tokenizer
        if self._description is not None and self._description.image is not None:
            return compute in self._core
        return tokenizer is not None and tokenizer.complete and compute in self._core \
            and not (chat and self._template is None)

    @property
    def capability(self) -> str:
        """The model's capability; reads its files if nothing else states it."""
        if self._capability is None:
            self._capability = self.describe().capability
        return self._capability

    def describe(self, progress: bool | None = None) -> ModelDescription:
        """The description of the files with the overrides; fetches missing files first."""
        if self._description is None:
            from ..models import describe

            if self._main is not None:
                self._main._read_tower(self, progress)
                assert self._description is not None
                return self._description
            with self._lock:
                if self._description is None:
                    found = describe(self.ref, self.key, offline=self.pool.config.offline, progress=progress)
                    if self._capability not in (None, found.capability):
                        raise WrongCapability(f"is a model of {found.capability}, not {self._capability}", key=self.key)
                    self._description = override(found, self.overrides)
        return self._description

    def serving(self, capability: str) -> Entry | None:
        """The entry of the same model for a capability: itself, or one of its towers; None: it is not for that.

        Reads the files if they have to be asked.
        """
        if self._capability == capability or self.capability == capability:
            return self
        if self.capability == "vision" and capability == "text_to_text":
            return self  # a vision model also serves conversations without images
        if self.capability != "image_embedding":
            return None  # no others have towers: nothing is fetched to say so
        found = self._towers.get(capability)
        if found is None and any(tower.capability == capability for tower in self.describe().towers):
            with self._lock:
                if capability not in self._towers:
                    tower = Entry(self.pool, self.key, self.ref, capability, None, self.isolation)
                    tower._main = self
                    self._towers[capability] = tower
            found = self._towers[capability]
        return found

    def parts(self) -> list[Entry]:
        """Itself and its towers, one entry a capability that the model is for."""
        return [self, *(part for tower in self.describe().towers if (part := self.serving(tower.capability)))]

    def _read_tower(self, tower: Entry, progress: bool | None) -> None:
        """Gives one of the model's other networks its part of the description."""
        found = next((one for one in self.describe(progress).towers if one.capability == tower._capability), None)
        if found is None:  # the files have changed
            raise WrongCapability(f"is a model of {self.capability}, not {tower._capability}", key=self.key)
        with self._lock:
            if tower._description is None:
                tower._description = found

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def _make_tokenizer(self) -> Tokenizer:
        from ..tokenizers import open_tokenizer

        description = self.describe()
        if description.image is not None and (texts := self.serving("text_embedding")) is not None:
            return texts.tokenizer()
        if description.tokenizer is None:
            raise InvalidArgument("the model has no tokenizer", param="model", key=self.key)
        tokenizer = open_tokenizer(description.tokenizer, self._vocab)
        self._require_unchanged()
        spec = description.spec
        rows = spec.kv.get(f"{spec.architecture}.vocab_size")
        if isinstance(rows, int):  # text encoders of image-generation pipelines have their own vocabulary sizes
            tokenizer.fit(rows, file=description.tokenizer.json_path)
        # the vocabulary as the file has it: tens of megabytes that are not needed again
        self._description, self._vocab = replace(description, tokenizer=None), None
        return tokenizer

    def token_text(self, token: int) -> str:
        """Text of a token; incomplete UTF-8 characters appear as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token, which may be part of a UTF-8 character."""
        if self._table is None:
            table = self.tokenizer().token_table()
            self._table = (table.data, table.offsets)
        data, offsets = self._table
        return bytes(data[offsets[token]:offsets[token + 1]])

    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            Unsupported: it has none.
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
        """Key in the core's registry for a compute type; the first use adds it and starts loading."""
        key = self._core.get(compute) if isinstance(compute, str) else None
        if key is not None:
            return key
        if not isinstance(compute, str) or compute not in COMPUTE:
            one_of("compute", compute, COMPUTE, key=self.key)
        with self._lock:
            if compute not in self._core:
                self._core[compute] = self._same_arithmetic(compute) or self._add(compute)
        return self._core[compute]

    def changed(self, folders: bool = False) -> str | None:
        """The first file that changed since it was read, with ``folders`` also a folder whose names changed; None: none
        changed."""
        from ..models.files import changed

        description = self._description
        return None if description is None else changed(description.stamps, folders)

    def look_again(self) -> None:
        """Forgets changed files while nothing of them is loaded: the caller may write them until the first request."""
        if not self._core and self._description is not None and not self.core_keys() and self.changed():
            self.forget()

    def _require_unchanged(self) -> None:
        """Raises IntegrityError if a file changed: later reads would mix two versions."""
        path = self.changed()
        if path is not None:
            raise IntegrityError(f"{path} is another file than was described; unload the model to have it described "
                                 "anew", key=self.key)

    def forget(self) -> list[str]:
        """Forgets everything read from files; the next use reads them again.

        Returns:
            the keys in the core's registry that are now unused; the caller removes them.
        """
        with self._lock:
            keys = self.core_keys()
            for tower in self._towers.values():
                tower.forget()
            self._description = self._tokenizer = self._vocab = self._template = self._table = None
            self._core, self.plans = {}, {}
        return keys

    def core_keys(self) -> list[str]:
        """All keys in use in the core's registry, including those of the model's other networks."""
        return list(dict.fromkeys([*self._core.values(), *(key for tower in list(self._towers.values())
                                                          for key in tower.core_keys())]))

    def _same_arithmetic(self, compute: str) -> str | None:
        """The key of the automatic entry if it is loaded with this compute type."""
        auto = self._core.get("auto")
        if auto is not None:
            for row in self.pool.registry.entries():
                if row["key"] == auto and (row.get("facts") or {}).get("compute") == compute:
                    return auto
        return None

    @property
    def runs_in(self) -> str:
        """Isolation of its workers: ``"thread"`` or ``"process"``."""
        return self.isolation or self.pool.config.isolation

    def isolate(self, isolation: str) -> None:
        """Sets the isolation of its workers. Loaded workers keep serving until the model is loaded again."""
        with self._lock:
            before, was = self.runs_in, self.isolation
            self.isolation = isolation
            for tower in self._towers.values():
                tower.isolate(isolation)
            if before == isolation:
                return
            try:
                for compute, key in list(self._core.items()):
                    if compute == "auto" or key != self._core.get("auto"):
                        self._add(compute, replace=True)
            except BaseException:
                self.isolation = was  # the loaded workers still run there, and the next attempt must try again
                raise

    def _add(self, compute: str, replace: bool = False) -> str:
        from .. import _core
        description = self.describe()
        name = self.key if self._main is None else f"{self.key} {self._capability}"
        key = name if compute == "auto" else f"{name} ({compute})"
        if len(key.encode()) > _MAX_KEY:
            import hashlib

            key = "..." + hashlib.sha256(key.encode()).hexdigest()[:12] + key[-_MAX_KEY // 2:]
        spec = _core.Spec(description.spec.architecture)
        for path in description.spec.files:
            spec.add_file(path)
        for name, value in description.spec.kv.items():
            spec.set(name, value)
        for tensor in description.spec.tensors:
            spec.add_tensor(tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
        if description.generation is not None:
            self._set_tokens(spec, description)
        spec.note_files()
        self._require_unchanged()
        registry = self.pool.registry
        if self.runs_in == "process":
            registry.add(key, spec, compute, replace, _isolated.command(), self.pool.config.process_memory)
        else:
            registry.add(key, spec, compute, replace)
        try:
            # begins to load while Python builds the tokenizer; an error reaches the request that follows
            registry.load(key, timeout=0.0)
        except MpoolError:
            pass
        return key

    def _set_tokens(self, spec: Any, description: ModelDescription) -> None:
        import numpy as np

        source = description.tokenizer
        if description.spec.tokens is not None:
            table = description.spec.tokens
        elif self._tokenizer is None and source is not None and source.gguf is not None:
            # the table alone is quick to make, so the core can load while the tokenizer is built
            from ..tokenizers.gguf_vocab import GGUFVocab

            self._vocab = GGUFVocab(source.gguf, file=source.config.get("file"))
            table = self._vocab.token_table
        else:
            table = self.tokenizer().token_table()
        ends = description.generation.eog_token_ids if description.generation is not None else ()
        spec.set_tokens(table.data, np.ascontiguousarray(table.offsets, dtype=np.int64), table.control,
                        sorted({*table.eog, *ends}))


#: Settings that :meth:`mpool.Pool.register` can override.
OVERRIDES = ("prompts", "default_prompt_name", "pooling", "normalize", "max_length", "chat_template")


def override(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """A description with some settings replaced.

    Raises:
        InvalidArgument: a setting that the model does not have, or a value that is not allowed.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if "chat_template" in settings:
        if found.generation is None or not isinstance(settings["chat_template"], str):
            raise _refused(found, "chat_template", settings, "the text of a template, for a model that writes text")
        found = replace(found, chat_template=settings.pop("chat_template"))
    if not settings:
        return found
    if found.image is not None:
        return _override_image(found, settings)
    embedding = found.embedding
    if embedding is None:
        raise _refused(found, next(iter(settings)), settings, "chat_template, for a model that writes text")
    kv: dict[str, Any] = dict(found.spec.kv)
    if "prompts" in settings:
        prompts = settings["prompts"]
        if not isinstance(prompts, Mapping) or not all(isinstance(x, str) for pair in prompts.items() for x in pair):
            raise _refused(found, "prompts", settings, "a dict, name -> text")
        embedding = replace(embedding, prompts=dict(prompts), default_prompt_name=None)
    if "default_prompt_name" in settings:
        if settings["default_prompt_name"] not in embedding.prompts:
            raise _refused(found, "default_prompt_name", settings, "a name in prompts")
        embedding = replace(embedding, default_prompt_name=settings["default_prompt_name"])
    if "pooling" in settings:
        modes = ("cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
        if settings["pooling"] not in modes or kv.get("mpool.dense_count"):
            raise _refused(found, "pooling", settings, ", ".join(modes) + "; of a model without dense layers")
        embedding = replace(embedding, pooling=(settings["pooling"],), output_size=embedding.hidden_size)
        kv["mpool.pooling"] = [settings["pooling"]]
    if "normalize" in settings:
        if not isinstance(settings["normalize"], bool):
            raise _refused(found, "normalize", settings, "True or False")
        embedding = replace(embedding, normalize=settings["normalize"])
        kv["mpool.normalize"] = settings["normalize"]
    if "max_length" in settings:
        length = settings["max_length"]
        if embedding.padding:
            raise _refused(found, "max_length", settings, "nothing else, as every text of this model has one length")
        if isinstance(length, bool) or not isinstance(length, int) or not 4 <= length <= embedding.max_tokens:
            raise _refused(found, "max_length", settings, f"4 to {embedding.max_tokens} tokens")
        embedding = replace(embedding, max_tokens=length)
    return replace(found, embedding=embedding, spec=replace(found.spec, kv=kv))


def _override_image(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """Applies ``normalize`` to all networks of the model, and other settings to those that embed texts."""
    texts = tuple(tower for tower in found.towers if tower.embedding is not None)
    for name, value in settings.items():
        if name == "normalize" and not isinstance(value, bool):
            raise _refused(found, name, settings, "True or False")
        if name != "normalize" and not texts:
            raise _refused(found, name, settings, "normalize, for an image_embedding model")
    towers = tuple(override(tower, settings) if tower.embedding is not None else tower for tower in found.towers)
    assert found.image is not None
    image, kv = found.image, dict(found.spec.kv)
    if "normalize" in settings:
        image = replace(image, normalize=settings["normalize"])
        kv["mpool.normalize"] = settings["normalize"]
    return replace(found, image=image, towers=towers, spec=replace(found.spec, kv=kv))


def _refused(found: ModelDescription, name: str, settings: Mapping[str, Any], allowed: str) -> InvalidArgument:
    return InvalidArgument(param=name, got=shown(settings[name]), allowed=allowed, key=found.key)
