"""Parts that the readers of all vision models share: their result, the decoder's configuration, common keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported
from ..fields import Fields, describe
from ..files import Folder
from ..spec import Value, VisionSettings
from .image_networks import NetworkSpec

#: Defaults of transformers' configuration classes, by ``model_type``, for keys that ``text_config`` leaves out.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}
#: Maximum number of tiles of one image.
MAX_TILES = 64
#: Maximum number of patches of an image of any size, as in the C core. Larger images are downscaled.
MAX_PATCHES = 16384
PROJECTOR_ACTS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")


@dataclass
class VisionModel:
    """A vision model as a family's reader finds it in ``config.json``.

    Attributes:
        name: name of the model's row in ``csrc/models/archs.def``.
        text: configuration of the decoder.
        encoder: image encoder, up to the layer whose hidden states are used.
        projector: the projector; only the tensors of this spec are used.
        kv: hyper-parameters of the whole model.
        read_settings: function that reads the image processor's configuration from the model folder and returns the
            image settings and the processor's hyper-parameters.
    """

    name: str
    text: Fields
    encoder: NetworkSpec
    projector: NetworkSpec
    kv: dict[str, Value]
    read_settings: Callable[[Folder], tuple[VisionSettings, dict[str, Value]]]


def text_of(config: Fields, defaults: Mapping[str, dict[str, Any]] = _TEXT_DEFAULTS,
            tied: bool | None = None) -> Fields:
    """Return the decoder's configuration with defaults filled in.

    Args:
        config: the model's ``config.json``. Its token ids apply where ``text_config`` has none.
        defaults: defaults of the class of each ``model_type``, from that of a ``text_config`` that states none.
        tied: default of ``tie_word_embeddings``, a key of the whole model; None: also a key of ``text_config``, and
            False by default.
    """
    section = config.section("text_config")
    kind = section.str("model_type", next(iter(defaults)))
    if kind not in defaults:
        section.fail("model_type", describe(kind), ", ".join(sorted(defaults)))
    values = {**defaults[kind], "model_type": kind,
              **{name: value for name, value in section.values.items() if value is not None}}
    values.pop("architectures", None)  # may name a class outside transformers, such as SmolVLM's VLlama3ForCausalLM
    values["tie_word_embeddings"] = config.bool("tie_word_embeddings", bool(tied)) \
        or tied is None and section.bool("tie_word_embeddings", False)
    add_ends(values, config)
    return Fields(values, file=config.file, at=section.at)


def add_ends(values: dict[str, Any], config: Fields) -> None:
    """Add the token ids that end and begin texts: those of the model's ``config.json``, if the decoder has none."""
    for name in ("eos_token_id", "bos_token_id"):
        if values.get(name) is None and config.get(name) is not None:
            values[name] = config.get(name)


def used_layers(config: Fields, layers: int, default: int = -2) -> int:
    """Return the number of image-encoder layers to compute for ``vision_feature_layer``, an index into the encoder's
    hidden states. ``default``: that of the model's class."""
    value = config.get("vision_feature_layer")
    if isinstance(value, list):
        raise Unsupported(f"{config.file}: vision_feature_layer is {describe(value)}; mpool supports a single layer")
    index = config.int("vision_feature_layer", default)
    used = index if index >= 0 else layers + 1 + index
    if not 1 <= used <= layers:
        config.fail("vision_feature_layer", index, f"1 to {layers}, or -{layers} to -1")
    return used


def two_layers(inputs: int, inner: int, outputs: int, *, bias: bool = True, norm: bool = False) -> NetworkSpec:
    """Return a projector of two linear layers. ``norm``: a norm of their inputs comes first."""
    projector = NetworkSpec("projector", {})
    for end in ("weight", "bias") if norm else ():
        projector.add(f"layer_norm.{end}", f"mm.input_norm.{end}", inputs)
    projector.linear("linear_1", "mm.0", inner, inputs, bias)
    projector.linear("linear_2", "mm.2", outputs, inner, bias)
    return projector


def image_token_key(config: Fields) -> str:
    """Return the key of the image placeholder token."""
    older = "image_token_index" in config and "image_token_id" not in config
    return "image_token_index" if older else "image_token_id"


def image_token(config: Fields, default: int) -> int:
    """Return the id of the image placeholder token."""
    return config.int(image_token_key(config), default, low=0)
