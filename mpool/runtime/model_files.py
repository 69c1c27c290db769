"""The contents of a model's files: its description, tokenizer and chat template, and the stamps of the files."""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import IntegrityError, InvalidArgument, MpoolError, WrongCapability
from ..host.address_space import require_if_limited
from ..models.describing import describe
from ..models.files import changed, expect, model_folders
from ..models.layout import missing_tokenizer
from ..tokenizers.gguf_vocab import GGUFVocab
from ..tokenizers.opening import open_tokenizer
from .overrides import override

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..conversation.template import ChatTemplate
    from ..models import ModelDescription
    from ..models.spec import TokenizerSource, TokenTable
    from ..tokenizers import Tokenizer


@contextmanager
def reading(key: str | None = None) -> Iterator[None]:
    """Mark errors that are raised while files are read. ``key``: key of the model for errors that have none."""
    try:
        yield
    except MpoolError as error:
        error.key, error._of_files = error.key or key, True
        raise


class ModelFiles:
    """The files of a model, each read once, on first use. Thread-safe.

    A thread holds ``lock``, the lock of the entry, while it reads a file or builds a tokenizer, which takes seconds for
    large ones: others that need the same wait for it. Looks at what was read (:attr:`known`, :meth:`changed`) take no
    lock.

    Attributes:
        key: name of the model in its pool.
        capability: capability of the model; None: the files, which decide it, are unread.
        was_read: the files have been read once.
        outdated: a request needs the files again, but they have changed since they were read: the next request must
            read them anew. See :func:`mpool.runtime.swapping.current`.
    """

    def __init__(self, config: PoolConfig, key: str, ref: str, lock: threading.RLock, capability: str | None = None,
                 overrides: Mapping[str, Any] | None = None) -> None:
        self.key, self.lock, self.capability = key, lock, capability
        self._config, self._ref, self._overrides = config, ref, overrides
        self._given_capability = capability
        self._description: ModelDescription | None = None
        self._stamps: Mapping[str, Any] | None = None  # in place of the description's, from adopt()
        self._tokenizer: Tokenizer | None = None
        self._vocab: GGUFVocab | None = None  # kept from token_table() until the tokenizer is built from it
        self._template: ChatTemplate | None = None
        self.was_read = self.outdated = False

    @property
    def known(self) -> ModelDescription | None:
        """The description of the files if they are read already; None: they are not, or are forgotten."""
        return self._description

    def describe(self, progress: bool | None = None) -> ModelDescription:
        """Return the description of the files with the overrides applied. Downloads missing files first."""
        if self._description is None:
            with self.lock:
                if self._description is None:
                    self._description = self._read(progress)
                    self.capability, self.was_read = self._description.capability, True
        return self._description

    def _read(self, progress: bool | None) -> ModelDescription:
        with reading(), model_folders(self._config.model_folders):
            found = describe(self._ref, self.key, offline=self._config.offline, progress=progress)
        if self._given_capability == "text_to_text" and found.capability == "vision":
            found = found.language_model  # a draft model
        if self._given_capability not in (None, found.capability):
            raise wrong_capability(self.key, found.capability, self._given_capability)
        return override(found, self._overrides) if self._overrides else found

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            with self.lock:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def _make_tokenizer(self) -> Tokenizer:
        description = self.describe()
        if description.tokenizer is None and description.embedding is not None:  # CLIP or SigLIP without the file
            raise missing_tokenizer(posixpath.dirname(description.spec.files[0]))
        if description.tokenizer is None:
            raise InvalidArgument("the model has no tokenizer", param="model", key=self.key,
                                  hint="Models that embed, classify or generate text have one")
        spec = description.spec
        require_if_limited(_space_of(description.tokenizer), "the tokenizer")
        with reading(self.key), expect(self._stamps or description.stamps):
            try:
                tokenizer = open_tokenizer(description.tokenizer, self._vocab)
            except MpoolError:
                self.require_unchanged()
                raise
            self.require_unchanged()
            rows = spec.kv.get(f"{spec.architecture}.vocab_size")
            if isinstance(rows, int):  # text encoders of image-generation pipelines have their own vocabulary sizes
                tokenizer.fit(rows, file=description.tokenizer.json_path)
        # drop the vocabulary of the file: tens of megabytes that are not needed again
        self._description, self._vocab = replace(description, tokenizer=None), None
        return tokenizer

    def has_tokenizer(self, chat: bool) -> bool:
        """Return True if the tokenizer is complete, and with ``chat`` the template is read. Takes no lock."""
        tokenizer = self._tokenizer
        return tokenizer is not None and tokenizer.complete and not (chat and self._template is None)

    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            Unsupported: the model has no chat template.
        """
        if self._template is None:
            from ..conversation.template import ChatTemplate

            with self.lock:
                if self._template is None:
                    self._template = ChatTemplate.for_model(self.describe().chat_template, self.tokenizer(),
                                                            key=self.key)
        return self._template

    def token_table(self) -> TokenTable:
        """Return the bytes of the tokens, for the core. Must hold ``lock``."""
        description = self.describe()
        source = description.tokenizer
        if description.spec.tokens is not None:
            return description.spec.tokens
        if self._tokenizer is None and source is not None and source.gguf is not None:
            # building only the table is fast, so the core can load while the tokenizer is built
            with reading(self.key):
                self._vocab = GGUFVocab(source.gguf, file=source.config.get("file"))
                return self._vocab.token_table
        return self.tokenizer().token_table()

    # ---- changes of the files --------------------------------------------------------------------------------------

    def stamps(self) -> list[Mapping[str, Any]]:
        """Return the stamps of the files that were read: one mapping, or none."""
        description = self._description
        return [] if description is None else [self._stamps or description.stamps]

    def changed(self, folders: bool = False) -> str | None:
        """Return the first file that changed since it was read; None: none changed.

        Args:
            folders: also detect a folder in which files were added or removed.
        """
        return next(filter(None, (changed(stamps, folders) for stamps in self.stamps())), None)

    def require_unchanged(self, path: str | None = None) -> None:
        """Raise IntegrityError if a file changed since it was read: later reads would mix two versions.

        Args:
            path: another file that changed: of an adapter or of the draft model.
        """
        path = path or self.changed()
        if path is not None:
            self.mark_outdated()
            error = IntegrityError(f"{path} changed since it was read", hint="Repeat the request to read its files "
                                   "again", key=self.key)
            error._outdated = True
            raise error

    def mark_outdated(self) -> None:
        """Let the next request read the files again, if they have changed."""
        self.outdated = True

    def adopt(self, other: ModelFiles) -> None:
        """Take the stamps of the same files, as another object read them. Must hold ``lock``."""
        self._stamps, = other.stamps()

    def lost_weights(self) -> bool:
        """Return True if a file of the weights is missing at its path. A loaded model does not need the path."""
        description = self.describe()
        return not all(map(os.path.exists, (path for part in (description, *description.networks)
                                            for path in part.spec.files)))

    def forget(self) -> None:
        """Forget everything read. The next use reads it again. Must hold ``lock``."""
        self._description = self._tokenizer = self._vocab = self._template = self._stamps = None
        self.outdated = False
        self.capability = self._given_capability


class NetworkFiles(ModelFiles):
    """The files of one of a model's other networks, which are those of the model."""

    def __init__(self, main: ModelFiles, name: str, lock: threading.RLock) -> None:
        super().__init__(main._config, main.key, main._ref, lock, name.partition(" ")[0])
        self._main, self._name = main, name

    def describe(self, progress: bool | None = None) -> ModelDescription:
        """Return the description of the network. Reads the files of the model if they are unread."""
        if self._description is None:
            whole = self._main.describe(progress)
            found = next((one for one in whole.networks if name_of(one) == self._name), None)
            if found is None:  # the files have changed
                raise wrong_capability(self.key, whole.capability, self._name)
            with self.lock:
                if self._description is None:
                    self._description = found
        return self._description

    def mark_outdated(self) -> None:
        """Let the next request read the files of the model again, if they have changed."""
        self._main.mark_outdated()


def name_of(network: ModelDescription) -> str:
    """Return the name of a network of a model: its capability, with its task if it has one."""
    return f"{network.capability} ({network.task})" if network.task else network.capability


def wrong_capability(key: str, actual: str, wanted: str | None, hint: str | None = None) -> WrongCapability:
    """Return the error for a model with another capability than the request needs."""
    error = WrongCapability(f"the model's capability is {actual}, not {wanted}", key=key, hint=hint)
    error.wanted = wanted
    return error


def _space_of(source: TokenizerSource) -> int:
    """Return the address space that must be free while a tokenizer is built. The library takes 19 bytes for each byte
    of ``tokenizer.json`` (BPE, measured), and a token with its merge has 48 bytes there."""
    size = 48 * len(source.gguf.get("tokenizer.ggml.tokens", ())) if source.gguf is not None else 0
    with contextlib.suppress(OSError):
        size += os.path.getsize(source.json_path) if source.json_path is not None else 0
    return (32 << 20) + 24 * size


__all__ = ["ModelFiles", "NetworkFiles", "name_of", "reading", "wrong_capability"]
