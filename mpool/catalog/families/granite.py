"""IBM's Granite 3 (arXiv:2407.13739): Llama with factors on embeddings, residuals, scores and logits."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import decoder, finish, read_common, text_row
from .rows import Architecture, Config


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    kv["mpool.embedding_scale"] = config.number("embedding_multiplier", 1.0, above=0.0)
    kv["mpool.residual_scale"] = config.number("residual_multiplier", 1.0, above=0.0)
    kv["mpool.attention_scale"] = config.number("attention_multiplier", 1.0, above=0.0)
    kv["mpool.output_scale"] = 1.0 / config.number("logits_scaling", 1.0, above=0.0)
    return finish(config, kv, used | {"embedding_multiplier", "residual_multiplier", "attention_multiplier",
                                      "logits_scaling"})


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    for key, ours in (("embedding_scale", "embedding_scale"), ("residual_scale", "residual_scale"),
                      ("attention.scale", "attention_scale")):
        value = table.number(f"{name}.{key}", 0.0)
        if value:  # 0 says nothing, as in llama.cpp
            kv[f"mpool.{ours}"] = value
    kv["mpool.output_scale"] = 1.0 / (table.number(f"{name}.logit_scale", 1.0) or 1.0)


ROWS = (
    text_row("granite", ("GraniteForCausalLM",), decoder(), read=_read, complete=_complete,
             handled=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"})),
)
