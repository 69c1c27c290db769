"""Settings that replace those of a model's files: the arguments of :meth:`mpool.Pool.register`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks import integer, one_of, refuse, surrogate_of
from ..errors import FormatError, InvalidArgument, MpoolError
from .load_options import refused

if TYPE_CHECKING:
    from ..models import ModelDescription


_POOLING = ("cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
#: Minimum of ``max_length``: the special tokens around a text, and a token between them.
_MIN_LENGTH = 4


def checked(**settings: Any) -> dict[str, Any]:
    """Return the settings that a caller gave, checked as far as it goes without the files of the model."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given:
        check(given)
    return given


def check(settings: Mapping[str, Any]) -> None:
    """Check settings before the files of their model are read.

    Raises:
        InvalidArgument: a setting has a value that no model allows.
    """
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    if prompts is not None and not (isinstance(prompts, Mapping)
                                    and all(isinstance(text, str) for pair in prompts.items() for text in pair)):
        refuse("prompts", prompts, "a dict from prompt name to text")
    if name is not None and (not isinstance(name, str) or prompts is not None and name not in prompts):
        refuse("default_prompt_name", name, "a name in prompts")
    texts = [("default_prompt_name", name), ("chat_template", settings.get("chat_template")),
             *(("prompts", text) for pair in (prompts or {}).items() for text in pair)]
    for param, text in texts:
        if isinstance(text, str) and (fault := surrogate_of(text, param)) is not None:
            raise fault
    if (pooling := settings.get("pooling")) is not None:
        one_of("pooling", pooling, _POOLING)
    if (normalize := settings.get("normalize")) is not None and not isinstance(normalize, bool):
        refuse("normalize", normalize, "True or False")
    if (given := settings.get("max_length")) is not None:
        length = integer(given)
        if length is None or length < _MIN_LENGTH:
            refuse("max_length", given, f"an integer of {_MIN_LENGTH} or more, and at most the limit in the files")
    if (template := settings.get("chat_template")) is not None and not isinstance(template, str):
        refuse("chat_template", template, "the text of a Jinja template, for a language model")
    if template:
        _check_template(template)


def _check_template(template: str) -> None:
    """Compile a chat template, where it will be rendered."""
    from ..conversation.template import ChatTemplate

    try:
        ChatTemplate(template).variables()
    except FormatError as error:
        raise InvalidArgument(param="chat_template", got=str(error.got), allowed=str(error.allowed)) from None
    except MpoolError as error:
        error.param = error.param or "chat_template"
        raise


def override(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """Return a description with some settings replaced, which must have passed :func:`check`.

    Raises:
        InvalidArgument: the model does not support a setting, or not this value.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if "chat_template" in settings:
        if found.generation is None:
            raise refused(found, "chat_template", settings, "the text of a Jinja template, for a language model")
        found = replace(found, chat_template=settings.pop("chat_template"))
    if not settings:
        return found
    if found.image is not None:
        return _override_image(found, settings)
    embedding = found.embedding
    if embedding is None:
        raise refused(found, next(iter(settings)), settings, "None: the model computes no embeddings")
    kv: dict[str, Any] = dict(found.spec.kv)
    if "prompts" in settings:
        embedding = replace(embedding, prompts=dict(settings["prompts"]), default_prompt_name=None)
    if "default_prompt_name" in settings:
        name = settings["default_prompt_name"]
        if name not in embedding.prompts:
            raise refused(found, "default_prompt_name", settings, "a name in prompts")
        embedding = replace(embedding, default_prompt_name=name)
    if "pooling" in settings:
        if kv.get("mpool.dense_count"):
            raise refused(found, "pooling", settings, "None: the model has dense layers")
        embedding = replace(embedding, pooling=(settings["pooling"],), output_size=embedding.hidden_size)
        kv["mpool.pooling"] = [settings["pooling"]]
    if "normalize" in settings:
        embedding = replace(embedding, normalize=settings["normalize"])
        kv["mpool.normalize"] = settings["normalize"]
    if "max_length" in settings:
        length = operator.index(settings["max_length"])
        if embedding.padding:
            raise refused(found, "max_length", settings, "None: every text of this model is padded to one length")
        if length > embedding.max_tokens:
            raise refused(found, "max_length", settings, f"an integer from {_MIN_LENGTH} to {embedding.max_tokens}")
        embedding = replace(embedding, max_tokens=length)
    return replace(found, embedding=embedding, spec=replace(found.spec, kv=kv),
                   networks=tuple(override(network, settings) for network in found.networks))


def _override_image(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """Apply ``normalize`` to all networks of the model, and other settings to its text networks."""
    texts = tuple(network for network in found.networks if network.embedding is not None)
    for name in settings:
        if name != "normalize" and not texts:
            raise refused(found, name, settings, "None: the model embeds no texts")
    networks = tuple(override(network, settings) if network.embedding is not None else network
                     for network in found.networks)
    assert found.image is not None
    image, kv = found.image, dict(found.spec.kv)
    if "normalize" in settings:
        image = replace(image, normalize=settings["normalize"])
        kv["mpool.normalize"] = settings["normalize"]
    return replace(found, image=image, networks=networks, spec=replace(found.spec, kv=kv))


__all__ = ["check", "checked", "override"]
