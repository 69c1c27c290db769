"""Defaults of keys that a ``config.json`` lacks: those of the configuration classes of transformers."""

import dataclasses
import os
import math
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

from mpool import errors  # noqa: E402
from mpool.models import architectures  # noqa: E402
from mpool.models.fields import Fields  # noqa: E402
from mpool.models.formats import hf_config  # noqa: E402

NAMES = [name for name in sorted(architectures.IN_CONFIG) if name in transformers.CONFIG_MAPPING]
#: Settings that mpool requires of an architecture whose class has other defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
                   "norm_rel_ebd": "layer_norm", "position_buckets": 256, "position_biased_input": False},
    "deepseek_v3": {"num_key_value_heads": 128},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_hidden_layers": 4,
                         "num_local_experts": 0, "position_embedding_type": "rope"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
#: Sizes under which no default of a size is right by chance: 96 is no class's default of hidden_size / heads.
SIZES: list[dict[str, Any]] = [{}, {"hidden_size": 1152, "num_attention_heads": 12}, {"dim": 1152, "n_heads": 12}]


def _read(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    row, found = hf_config.read_config(Fields(values, file="config.json"))
    kv = dict(found.kv)
    heads, width = kv[f"{row.name}.attention.head_count"], kv[f"{row.name}.embedding_length"]
    for key in ("key_length", "value_length"):  # optional: the core divides
        kv.setdefault(f"{row.name}.attention.{key}", width // heads)
    return row.name, {**dataclasses.asdict(found), "kv": kv}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_missing_has_the_default_of_its_class(name: str) -> None:
    """For each key: without it, the configuration is read as the one that transformers makes of it. A key may be
    required."""
    made = transformers.CONFIG_MAPPING[name]
    compared, wrong = 0, []
    for sizes in SIZES:
        base = made(**NEEDED.get(name, {})).to_dict()
        if not set(sizes) <= set(base) or sizes and "mamba_n_heads" in base:  # Mamba's sizes depend on the width
            continue
        base.update(sizes)
        for key in sorted(set(base) - {"model_type", *NEEDED.get(name, {})}):
            given = {other: value for other, value in base.items() if other != key}
            try:
                found = _read(given)
            except errors.MpoolError:  # required, or the family needs other sizes
                continue
            compared += 1
            if found != _read(made.from_dict(given).to_dict()):
                wrong.append((key, sizes))
    assert compared > 15 and not wrong


#: Keys of sizes, in the spellings of all families.
SIZES_OF = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings", "num_key_value_heads", "head_dim", "n_embd", "n_head", "n_layer", "n_positions",
            "n_inner", "dim", "n_heads", "n_layers", "hidden_dim", "num_experts", "moe_intermediate_size",
            "type_vocab_size")
#: The configuration of nomic-embed-text-v1.5, whose class is not part of transformers.
NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert", "n_positions": 8192, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072,
    "vocab_size": 30528, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0, "type_vocab_size": 2, "prenorm": False, "qkv_proj_bias": False,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "causal": False, "use_rms_norm": False}
#: Family -> keys that it does not read, or of which 0 is an allowed value.
ZERO = {"deepseek_v2": {"head_dim"}, "deepseek_v3": {"head_dim"}, "granitemoehybrid": {"intermediate_size"},
        "gte": {"type_vocab_size"}}


@pytest.mark.parametrize("name", [*NAMES, "old nomic_bert"])
def test_sizes_of_zero_are_refused(name: str) -> None:
    """The error names the key."""
    base = NOMIC if name.startswith("old ") else transformers.CONFIG_MAPPING[name](**NEEDED.get(name, {})).to_dict()
    _read(base)
    accepted = set()
    for key in SIZES_OF:
        if type(base.get(key)) is not int or not base[key]:
            continue
        for bad in (0, -1):
            try:
                _read({**base, key: bad})
            except errors.MpoolError as error:
                assert key in str(error), (key, bad)
            else:
                accepted.add(key)
    assert accepted == ZERO.get(name, set())


@pytest.mark.parametrize("buckets, read", [(-1, 10), (0, 10), (2, 2), (17, 17), (1, None), (18, None), (-2, None)])
def test_limits_of_debertas_buckets(buckets: int, read: int | None) -> None:
    """The farthest of 10 distances allows 2 to 17 buckets; without buckets, each distance has a row."""
    base = transformers.CONFIG_MAPPING["deberta-v2"](**NEEDED["deberta-v2"]).to_dict()
    base |= {"max_relative_positions": 10, "position_buckets": buckets}
    if read is None:
        with pytest.raises(errors.FormatError, match="position_buckets"):
            _read(base)
        return
    found = _read(base)[1]
    assert found["sizes"]["r"] == 2 * read
    assert found["kv"].get("mpool.relative_buckets", read) == read


@pytest.mark.parametrize("change, error", [
    ({"layer_types": ["mamba"] * 4}, errors.Unsupported), ({"layer_types": ["mamba", "attention"]}, errors.FormatError),
    ({"layer_types": ["rwkv"] * 4}, errors.FormatError)])
def test_layer_types_of_granite_that_are_refused(change: dict[str, Any], error: type[errors.MpoolError]) -> None:
    base = transformers.CONFIG_MAPPING["granitemoehybrid"](**NEEDED["granitemoehybrid"]).to_dict()
    with pytest.raises(error, match="config.json: layer_types"):
        _read(base | change)


@pytest.mark.parametrize("high", [{"__float__": "Infinity"}, math.inf, None])
def test_limits_of_steps(high: Any) -> None:
    """Configurations write the usual upper limit as Infinity, or as transformers does now."""
    base = transformers.CONFIG_MAPPING["granitemoehybrid"](
        layer_types=["mamba", "attention"], num_hidden_layers=2, num_local_experts=0, num_experts_per_tok=0).to_dict()
    found = _read(base | {"time_step_limit": [0.25, high or 0.5]})[1]["kv"]
    assert (found["mpool.step_low"], found.get("mpool.step_high")) == (0.25, None if high else 0.5)
    for bad in ([0.5, 0.25], [-1, 2], [0.5], [math.inf, math.inf], "x"):
        with pytest.raises(errors.FormatError, match="time_step_limit"):
            _read(base | {"time_step_limit": bad})


def test_a_huge_scale_of_yarn_is_refused() -> None:
    sizes = {"attention.key_length": 64, "attention.value_length": 64, "attention.kv_lora_rank": 16,
             "attention.head_count": 4, "block_count": 2, "expert_feed_forward_length": 32, "expert_count": 8}
    yarn = {"type": "yarn", "factor": 40.0, "yarn_log_multiplier": 1e200}
    table = {**sizes, **{f"rope.scaling.{key}": value for key, value in yarn.items()}}
    complete = architectures.IN_GGUF["deepseek2"][0].complete
    assert complete is not None
    with pytest.raises(errors.FormatError, match=r"yarn_log_multiplier is 1e.200, allowed: .* at most 1000"):
        complete(Fields({f"deepseek2.{key}": value for key, value in table.items()}, file="m.gguf"), "deepseek2", {})
