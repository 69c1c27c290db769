"""Configurations of language models with wrong numbers or types: each is read, or refused with an MpoolError.

The changes are seeded: the message of a failure has the name and the trial number that reproduce it.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from mpool.models import architectures
from mpool.models.formats import hf_config
from mpool.models.fields import Fields
from mpool.errors import FormatError, MpoolError

from paritymodels import DECODERS, LAYER_TYPES, find_class

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 64, 513, 10**6, 2**31, 2**62, 2**63, -2**63, 0.0, 1e-300,
                     0.5, 1.0, 1e300, 1e308, -1e308, "", "x", "silu", "yarn", "full_attention", [], [0], [None],
                     [2**62] * 3, ["full_attention"], [[]], {}, {"a": {}}, {"rope_type": "yarn"}]
#: Families whose code is not in transformers, by test name.
OTHERS: dict[str, dict[str, Any]] = {
    "gte": {"model_type": "new", "architectures": ["NewModel"], "vocab_size": 99, "hidden_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64,
            "position_embedding_type": "rope", "rope_theta": 1e4, "rope_scaling": {"type": "ntk", "factor": 2.0},
            "layer_norm_type": "layer_norm", "hidden_act": "gelu", "type_vocab_size": 2, "pack_qkv": True,
            "layer_norm_eps": 1e-12, "logn_attention_scale": False}}
#: Family, changes that malicious files could have, and the key and value that the error names; None if the change is
#: legal: null stands for a default, and ``no_rope_layers`` overrides the interval.
HOSTILE: list[tuple[str, dict[str, Any], str | None]] = [
    ("phi3_long", {"original_max_position_embeddings": 1, "max_position_embeddings": 2**20},
     "original_max_position_embeddings is 1, "),
    ("phi3_partial", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308, "),
    ("llama", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308, "),
    ("gte", {"num_attention_heads": 1000}, "num_attention_heads is 1000, "),
    ("qwen3moe", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99, "),
    ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, allowed: an integer from 1 to 5"),
    ("deepseek2", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99, "),
    ("deepseek2", {"q_lora_rank": -1}, "q_lora_rank is -1, "), ("deepseek2", {"n_group": 5}, "n_group is 5, "),
    ("deepseek2", {"topk_group": 99}, "topk_group is 99, "), ("deepseek2", {"kv_lora_rank": None}, None),
    ("gpt_oss", {"intermediate_size": 0}, "intermediate_size is 0, "),
    ("smollm3", {"no_rope_layer_interval": 0}, None)]


def config_of(name: str) -> dict[str, Any]:
    if name in OTHERS:
        return OTHERS[name]
    kind, model, extra = DECODERS[name]
    if name in LAYER_TYPES:
        extra = {**extra, "layer_types": LAYER_TYPES[name][:1] * 4}
    made = find_class(kind)(vocab_size=99, hidden_size=96, intermediate_size=160, num_hidden_layers=4,
                            **{"num_attention_heads": 6, "num_key_value_heads": 2,
                               "max_position_embeddings": 400, **extra})
    return json.loads(json.dumps({**made.to_dict(), "architectures": [model]}, default=str))


def read(values: dict[str, Any]) -> None:
    """Read a configuration, without weight files."""
    config = Fields(values, file="config.json")
    row, found = hf_config.read_config(config)
    size = architectures.sizes(row, found.kv, file="config.json", token_types=found.token_types) | found.sizes
    if size["layers"] * max(size["X"], 1) <= 4096:
        architectures.expected(row, size)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*DECODERS, *OTHERS])
def test_wrong_values(name: str) -> None:
    whole = config_of(name)
    read(whole)
    for trial in range(150):
        rng = random.Random(f"{name} {trial}")
        values = json.loads(json.dumps(whole))
        for _ in range(rng.choice((1, 1, 2))):
            inside = rng.choice([values, *(value for value in values.values() if isinstance(value, dict) and value)])
            key = rng.choice(list(inside))
            inside[key] = rng.choice(VALUES)
        try:
            read(values)
        except MpoolError as error:
            assert "config.json" in str(error) and "allowed" in str(error) or not isinstance(error, FormatError), error
        except Exception as error:
            changed = {key: value for key, value in values.items() if value != whole.get(key)}
            raise AssertionError(f"{name} {trial}: {changed}: {error!r}") from error


@pytest.mark.parametrize("name, change, words", HOSTILE)
def test_malicious_values(name: str, change: dict[str, Any], words: str | None) -> None:
    values = {**config_of(name), **change}
    for inside in (value for value in values.values() if isinstance(value, dict)):
        inside.update((key, value) for key, value in change.items() if key in inside)
    if words is None:
        read(values)
        return
    with pytest.raises(FormatError, match=re.escape(f"config.json: {words}")):
        read(values)
