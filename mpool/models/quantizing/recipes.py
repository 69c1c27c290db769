"""The types of the tensors of a quantised file: the recipes of llama.cpp (``src/llama-quant.cpp``), without importance
matrix.

A recipe stores most weights in one type, and those whose errors matter most in a more precise one. If the number of
inputs of a weight is not a multiple of a type's block, the type is replaced by a similar one with a smaller block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Values per block.
BLOCK = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "Q4_0": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "F16": 1, "BF16": 1,
         "F32": 1}
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
#: Parts of the names of weights that stay as they are.
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "token_types.weight", "position_embd.weight", "pos_embd.weight",
         "attn_rel_b.weight", "rope_freqs.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
#: Weights that project to values, alone or together with others.
VALUES = ("attn_v", "attn_qkv", "attn_kv_b")
#: Experts of the models for which llama.cpp stores keys and values as Q8_0 (Mixtral).
_MIXTRAL_EXPERTS = 8


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        number: value of ``general.file_type``.
        base: type of most weights.
    """

    number: int
    base: str


RECIPES = {"F32": Recipe(0, "F32"), "F16": Recipe(1, "F16"), "Q4_0": Recipe(2, "Q4_0"), "Q8_0": Recipe(7, "Q8_0"),
            "Q5_0": Recipe(8, "Q5_0"), "Q4_K_S": Recipe(14, "Q4_K"), "Q4_K_M": Recipe(15, "Q4_K"),
            "Q5_K_M": Recipe(17, "Q5_K"), "Q6_K": Recipe(18, "Q6_K"), "BF16": Recipe(32, "BF16")}


@dataclass(frozen=True)
class Model:
    """Facts of a model that decide about types.

    Attributes:
        layers: number of layers, with those for multi-token prediction.
        experts: number of experts; 0: none.
        tied: True if the token embedding is also the output layer.
        is_70b: True for the models that llama.cpp counts as 70B: Llama and Qwen2 with 80 layers, which share values
            between 8 or more heads.
        value_layers: layers with a weight of :data:`VALUES`, in ascending order. Hybrid models have layers without.
        down_layers: layers with ``ffn_down``, in ascending order.
    """

    layers: int
    experts: int
    tied: bool
    is_70b: bool
    value_layers: Sequence[int]
    down_layers: Sequence[int]


def type_of(recipe: str, model: Model, name: str, shape: tuple[int, ...]) -> str | None:
    """Return the type of a tensor.

    Args:
        recipe: key of :data:`RECIPES`.
        model: the model.
        name: GGUF's name of the tensor.
        shape: shape, outermost dimension first.

    Returns:
        the type; None if the tensor stays as it is.
    """
    base = RECIPES[recipe].base
    if len(shape) < 2 or not name.endswith("weight") or any(part in name for part in _KEPT):
        return None
    chosen = base if BLOCK[base] == 1 else _refined(recipe, base, model, name)
    inputs = shape[-1]
    if name == "output.weight" or model.tied and name == "token_embd.weight":
        if BLOCK[base] > 1 and inputs % 256:
            chosen = "Q8_0"
    elif inputs % BLOCK[chosen]:
        chosen = _FALLBACK.get(chosen, chosen)
    return chosen if inputs % BLOCK[chosen] == 0 else "F16"


def _refined(recipe: str, base: str, model: Model, name: str) -> str:
    """Return the type of a weight by its name and layer, assuming that its rows consist of whole blocks."""
    if name == "output.weight" or model.tied and name == "token_embd.weight":
        return base if base == "Q8_0" else "Q6_K"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        return base
    layer, part = int(match[1]), match[2]
    if part in VALUES:
        chosen, place = base, model.value_layers.index(layer)
        if recipe in ("Q4_K_M", "Q5_K_M") and uses_more_bits(place, len(model.value_layers)):
            chosen = "Q6_K"
        elif recipe == "Q4_K_S" and place < 4:
            chosen = "Q5_K"
        if model.is_70b and chosen == "Q4_K":
            chosen = "Q5_K"
        return "Q8_0" if model.experts == _MIXTRAL_EXPERTS else chosen
    if part == "attn_k" and model.experts == _MIXTRAL_EXPERTS:
        return "Q8_0"
    if part in ("ffn_down", "ffn_down_exps", "ffn_down_shexp"):
        place = layer if model.experts > 1 else model.down_layers.index(layer)
        if recipe in ("Q4_K_M", "Q5_K_M") and uses_more_bits(place, model.layers):
            return "Q6_K"
        if recipe == "Q4_K_S" and place < model.layers // 8:
            return "Q5_K"
    if part == "attn_output" and model.experts == _MIXTRAL_EXPERTS and recipe in ("Q4_K_S", "Q4_K_M"):
        return "Q5_K"
    return base


def uses_more_bits(layer: int, layers: int) -> bool:
    """Return True for the first and the last eighth of the layers, and every third layer between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
