"""Settings that replace those of a model's files: the arguments of :meth:`mpool.Pool.register`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks import integer
from .load_options import refused

if TYPE_CHECKING:
    from ..models import ModelDescription


def override(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """Return a description with some settings replaced.

    Raises:
        InvalidArgument: the model does not support a setting, or a value is not allowed.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if "chat_template" in settings:
        if found.generation is None or not isinstance(settings["chat_template"], str):
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
        prompts = settings["prompts"]
        if not isinstance(prompts, Mapping) or not all(isinstance(x, str) for pair in prompts.items() for x in pair):
            raise refused(found, "prompts", settings, "a dict from prompt name to text")
        embedding = replace(embedding, prompts=dict(prompts), default_prompt_name=None)
    if "default_prompt_name" in settings:
        name = settings["default_prompt_name"]
        if not isinstance(name, str) or name not in embedding.prompts:
            raise refused(found, "default_prompt_name", settings, "a name in prompts")
        embedding = replace(embedding, default_prompt_name=name)
    if "pooling" in settings:
        modes = ("cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
        if not isinstance(settings["pooling"], str) or settings["pooling"] not in modes \
                or kv.get("mpool.dense_count"):
            raise refused(found, "pooling", settings,
                          "one of " + ", ".join(modes) + ", and the model must have no dense layers")
        embedding = replace(embedding, pooling=(settings["pooling"],), output_size=embedding.hidden_size)
        kv["mpool.pooling"] = [settings["pooling"]]
    if "normalize" in settings:
        if not isinstance(settings["normalize"], bool):
            raise refused(found, "normalize", settings, "True or False")
        embedding = replace(embedding, normalize=settings["normalize"])
        kv["mpool.normalize"] = settings["normalize"]
    if "max_length" in settings:
        length = integer(settings["max_length"])
        if embedding.padding:
            raise refused(found, "max_length", settings, "None: every text of this model is padded to one length")
        if length is None or not 4 <= length <= embedding.max_tokens:
            raise refused(found, "max_length", settings, f"an integer from 4 to {embedding.max_tokens}")
        embedding = replace(embedding, max_tokens=length)
    return replace(found, embedding=embedding, spec=replace(found.spec, kv=kv),
                   networks=tuple(override(network, settings) for network in found.networks))


def _override_image(found: ModelDescription, settings: Mapping[str, Any]) -> ModelDescription:
    """Apply ``normalize`` to all networks of the model, and other settings to its text networks."""
    texts = tuple(network for network in found.networks if network.embedding is not None)
    for name, value in settings.items():
        if name == "normalize" and not isinstance(value, bool):
            raise refused(found, name, settings, "True or False")
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


__all__ = ["override"]
