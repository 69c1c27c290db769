"""jina-embeddings-v5-text (arXiv:2602.15547): embedding models with one folder of PEFT per task.

``small`` is Qwen3 with causal attention, ``nano`` is EuroBERT. Both have the model type ``jina_embeddings_v5``, tensors
without a prefix, and the adapters ``adapters/<task>`` for the tasks in ``task_names``. The published code
(``modeling_jina_embeddings_v5.py`` and ``custom_st.py``) requires a task, reads the hidden state of the last token and
normalises it. vLLM (``vllm/model_executor/models/jina.py``) reads the same files; its default is ``retrieval``.
"""

from __future__ import annotations

from dataclasses import replace

from ..fields import Fields
from . import embedders
from .jina_v3 import read_task_names
from .rows import Architecture, Config, TaskAdapters

#: Keys that the published classes do not use, or whose value the rows below imply.
_OWN = ("auto_map", "is_decoder", "task_names", "jina_task")
_RETRIEVAL = "retrieval"


def _read(config: Fields, row: Architecture) -> Config:
    names = read_task_names(config, "task_names")
    if _RETRIEVAL not in names:
        config.fail("task_names", ", ".join(names) or "none", f"a list with {_RETRIEVAL}")
    plain = Fields({key: value for key, value in config.values.items() if key not in _OWN}, file=config.file)
    read = embedders.read_embedder if row.name == "qwen3_embedding" else embedders.read_eurobert
    found = read(plain, row)
    found.adapters = TaskAdapters(names, {}, {"query": _RETRIEVAL, "document": _RETRIEVAL}, default=_RETRIEVAL)
    found.module = "lasttoken"
    return found


def _row(base: Architecture, marker: str) -> Architecture:
    return replace(base, model_types=("jina_embeddings_v5",), gguf=(), classes=("JinaEmbeddingsV5Model",), read=_read,
                   complete=None, handled=frozenset(), head=None, remote=True, marker=(marker, ""))


ROWS = (
    _row(next(row for row in embedders.ROWS if row.name == "qwen3_embedding"), "layers.0.self_attn.q_norm.weight"),
    _row(next(row for row in embedders.ROWS if row.in_config == ("eurobert",)), ""),
)
