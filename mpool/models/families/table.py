"""The table of architectures: the rows of all families."""

from __future__ import annotations

from . import (
    bamba,
    bert,
    bert_variants,
    cohere,
    deberta,
    deepseek,
    embedders,
    embedding_gemma2,
    ernie,
    exaone,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt_oss,
    granite,
    gte,
    jina,
    jina_v3,
    jina_v5,
    lfm,
    llama,
    mistral,
    modernbert,
    mpnet,
    nemotron,
    nomic,
    olmo,
    phi,
    qwen_moe,
    qwen_next,
    seed_oss,
    smollm,
)
from .rows import Architecture

#: Every row, in the order in which lists show them to users.
ROWS: tuple[Architecture, ...] = (*bert.ROWS, *bert_variants.ROWS, *nomic.ROWS, *mpnet.ROWS, *deberta.ROWS,
                                  *modernbert.ROWS, *gte.ROWS, *jina.ROWS, *jina_v3.ROWS, *jina_v5.ROWS,
                                  *embedders.ROWS, *llama.ROWS,
                                  *qwen_moe.ROWS, *qwen_next.ROWS, *gpt_oss.ROWS, *deepseek.ROWS, *smollm.ROWS,
                                  *granite.ROWS, *phi.ROWS, *gemma.ROWS, *gemma3n.ROWS, *gemma4.ROWS,
                                  *embedding_gemma2.ROWS,
                                  *olmo.ROWS, *cohere.ROWS, *lfm.ROWS, *nemotron.ROWS,
                                  *mistral.ROWS, *glm.ROWS, *ernie.ROWS, *exaone.ROWS, *seed_oss.ROWS,
                                  *falcon.ROWS, *bamba.ROWS)

__all__ = ["ROWS"]
