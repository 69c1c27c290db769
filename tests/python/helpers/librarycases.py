"""Seeded models and adapters whose results of PEFT are recorded (tests/parity/libraries)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterfiles import digest_of as digest_of, matrices, save_peft
from rerankers import make_classifier
from retrievalmodels import TEXTS as TEXTS

LABELS = ("one", "two", "three")
_BERT, _MODERN = ("query", "key", "value", "dense"), ("Wqkv", "Wo", "Wi")
#: Name -> kind of the classifier, rank and targets of the adapter, and further keys of its adapter_config.json.
ADAPTERS: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("bert", 6, _BERT, {}),
    "bert_rslora": ("bert", 3, _BERT[:2], {"use_rslora": True}),
    "bert_alpha_pattern": ("bert", 4, _BERT, {"alpha_pattern": {"attention.self.query": 2.5}}),
    "modernbert": ("modern_bert_mean", 5, _MODERN, {})}


def write_adapted(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the classifier and the adapter of a case. Returns their folders."""
    kind, rank, targets, config = ADAPTERS[name]
    model = make_classifier(folder / "model", kind, LABELS)
    found = {key: pair for key, pair in matrices(model, rank, 11, targets).items() if ".layer" in key}
    return model, save_peft(folder / "adapter", found, 9.0, task_type="FEATURE_EXTRACTION", **config)
