"""Descriptions of models in Ollama's format, and the download of models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..conversation import tool_formats
from ..conversation.template import ChatTemplate
from ..conversation.tool_templates import tool_support
from ..errors import DownloadError, IntegrityError, LimitError, MpoolError, OfflineError
from ..host.resources import start_thread
from ..models.catalogue import load as load_catalogue
from ..models.describing import is_offline, resolve
from ..models.sources import downloads_disabled
from ..records import logger
from . import thinking
from .errors import Refusal
from .models import Download

if TYPE_CHECKING:
    from .models import ServedModel
    from .state import State

log = logger("mpool.server")

#: Seconds between two reports of the progress of a download.
_REPORT = 0.5
#: Capability of mpool -> capability of Ollama.
_CAPABILITIES = {"text_embedding": "embedding", "text_to_text": "completion", "vision": "vision",
                 "image_embedding": "embedding", "text_to_image": "image"}
#: Option of the library -> its name in a Modelfile, where it differs.
PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict", "context_length": "num_ctx"}


@dataclass(frozen=True, slots=True)
class OllamaDescription:
    """Description of a model in Ollama's format.

    Attributes:
        size: Size of the model files in bytes.
        digest: SHA-256 of the names, sizes and modification times of the files, not of their contents.
        modified_at: Time of the last modification in ISO 8601.
        details: Fields of :class:`mpool.server.ollama_structs.Details`.
        info: ``model_info`` of ``/api/show``.
        capabilities: Ollama's names of the capabilities of the model.
        license: License of the model, or "".
        defaults: Default sampling options under the library's names.
        context_length: Maximum number of tokens, or None.
    """

    size: int
    digest: str
    modified_at: str
    details: dict[str, Any]
    info: dict[str, Any]
    capabilities: list[str]
    license: str
    defaults: Mapping[str, Any]
    context_length: int | None


def describe(served: ServedModel) -> OllamaDescription:
    """Describe a model whose files are on this machine. Reads the metadata in its files if it was not read before."""
    model = served.model
    description = model.description
    parts = (description, *description.networks)
    tensors = [tensor for part in parts for tensor in part.spec.tensors]
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.dtype] += tensor.nbytes
    paths = sorted({path for part in parts for path in part.spec.files})
    stats = [os.stat(path) for path in paths]
    digest = hashlib.sha256(repr([(os.path.basename(path), stat.st_size, stat.st_mtime_ns)
                                  for path, stat in zip(paths, stats)]).encode()).hexdigest()
    architecture = description.spec.architecture
    generation, embedding = description.generation, description.embedding
    context = generation.context_length if generation is not None \
        else embedding.max_tokens if embedding is not None else None
    info: dict[str, Any] = {"general.architecture": architecture, "general.parameter_count": count}
    if context is not None:
        info[f"{architecture}.context_length"] = context
    if embedding is not None:
        info[f"{architecture}.embedding_length"] = embedding.output_size
    defaults = generation.defaults if generation is not None else {}
    return OllamaDescription(
        size=sum(stat.st_size for stat in stats), digest=digest,
        modified_at=datetime.fromtimestamp(max((stat.st_mtime for stat in stats), default=0.0), timezone.utc)
        .isoformat().replace("+00:00", "Z"),
        details={"format": "gguf" if paths and paths[0].lower().endswith(".gguf") else "safetensors",
                 "family": architecture, "families": [architecture],
                 "parameter_size": parameter_size(count),
                 "quantization_level": description.file_type or (weights.most_common(1)[0][0] if weights
                                                                 else "unknown")},
        info=info, capabilities=sorted({_CAPABILITIES[name] for name in served.capabilities if name in _CAPABILITIES}),
        license=description.license or "", context_length=context, defaults=defaults)


def parameter_size(count: int) -> str:
    """Return a number of parameters as Ollama writes it."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def parameters(options: Mapping[str, Any]) -> str:
    """Return sampling options as Ollama lists a model's parameters: one per line, and one for each stop string."""
    lines = []
    for name, given in sorted((PARAMETERS.get(name, name), value) for name, value in options.items()):
        for value in given if isinstance(given, (list, tuple)) else (given,):
            shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value
            lines.append(f"{name:<30} {shown}")
    return "\n".join(lines)


def template_capabilities(served: ServedModel) -> list[str]:
    """Return the capabilities that the chat template and the vocabulary of a model provide: ``tools``, ``thinking`` and
    ``insert``, or fewer."""
    found = _tools(served) + ["thinking"] * thinking.model_options(served).thinks
    if "text_to_text" in served.capabilities and served.model.tokenizer.fill_in_tokens() is not None:
        found.append("insert")
    return found


def _tools(served: ServedModel) -> list[str]:
    source = served.model.description.chat_template
    if not source or tool_formats.of_template(source) is None:
        return []
    try:
        support = tool_support(ChatTemplate(source, special={"bos_token": "", "eos_token": ""}))
    except MpoolError:  # an invalid template fails when it is used
        return []
    return [] if support.tools is None else ["tools"]


def _reason(error: MpoolError) -> str:
    """Return why a download failed, without paths and addresses."""
    if isinstance(error, OfflineError):
        return _sentence(downloads_disabled())
    if isinstance(error, DownloadError) and error._reason:
        return _sentence(error._reason)
    if isinstance(error, IntegrityError):
        return "The files are not those that the catalogue states."
    if isinstance(error, LimitError):
        return "The disk has too little free space."
    return "The server's log has the details."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def pull_refusal(state: State) -> str | None:
    """Return why clients cannot download models; None: they can."""
    if not state.models.catalogue:
        return "The server does not serve the models of the catalogue."
    return _sentence(downloads_disabled()) if is_offline(state.pool.config.offline) else None


def digest_of(name: str) -> str:
    """Return the digest that stands for a download in its progress: clients of Ollama show one bar per digest."""
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


async def fetch(name: str, state: State) -> None:
    """Download a model of the catalogue. Requests for the same model wait for one download, which goes on if all of
    their clients disconnect.

    Args:
        name: Name of a served model, or key or alias of the catalogue.
        state: State of the server. The configuration of its pool decides whether downloads are allowed.

    Raises:
        Refusal: The download failed, or the files are still missing. The message says why.
    """
    async for _ in progress(name, state):
        pass


async def progress(name: str, state: State) -> AsyncIterator[Download]:
    """As :func:`fetch`; yields the download whenever its bytes have changed."""
    models = state.models
    if name in models.names():
        return
    key = load_catalogue().require(name).key
    found = models.downloads.get(key)
    if found is None or found.ended.get_loop() is not asyncio.get_running_loop():  # another loop may have stopped
        found = models.downloads[key] = _start_download(key, state)
    seen, ended = -1, False
    while not ended:
        if found.done != seen:
            seen = found.done
            yield found
        # unlike shield(), reports no error of a download whose clients have disconnected
        ended = bool((await asyncio.wait({found.ended}, timeout=_REPORT))[0])
    try:
        found.ended.result()
    except MpoolError as error:
        log.warning("the download of %s failed: %s", name, error)
        raise Refusal("download_failed", _reason(error)) from error
    await models.find(name)


def _start_download(key: str, state: State) -> Download:
    """Download a model on a daemon thread, so that the download does not delay the server's shutdown."""
    loop = asyncio.get_running_loop()
    found = Download(loop.create_future())

    def end(error: BaseException | None) -> None:
        if state.models.downloads.get(key) is found:
            del state.models.downloads[key]
        if isinstance(error, MpoolError):
            state.events.add("download_failed", key, _reason(error), error.name)
        elif error is None:
            state.events.add("download", key, "")
        if found.ended.done():
            return
        if error is None:
            found.ended.set_result(None)
        else:
            found.ended.set_exception(error)
            found.ended.exception()  # mark it as retrieved: all clients may have disconnected

    def work() -> None:
        error: BaseException | None = None
        try:
            resolve(key, offline=state.pool.config.offline, progress=found.report)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(end, error)
        except RuntimeError:
            pass  # the loop is closed: the server has stopped

    start_thread(work, "mpool-server-pull")
    return found


__all__ = ["OllamaDescription", "describe", "digest_of", "fetch", "parameter_size", "progress",
           "pull_refusal", "template_capabilities"]
