"""Bad values in every JSON file of model folders and adapters, and tensors that do not fit, with the whole text of each
error.

``bad_folders.json`` has the outcomes. This writes them again, after a reader or a text changed on purpose:

    PYTHONPATH=tests/python/helpers python tests/python/models/test_bad_folders.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import badvalues
import test_hf_embedding as encoders
from mpool.models.formats.adapters import read_adapter
from mpool.models.formats.hf_folder import describe_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))
import make_safetensors as make  # noqa: E402

_TOP = "config_sentence_transformers.json"
SNAPSHOT = Path(__file__).with_name("bad_folders.json")


# ---- kinds of folders ------------------------------------------------------------------------------------------------

def _vocabulary(rows: int) -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(rows - 2))]
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None, "decoder": None, "truncation": None, "padding": None,
            "model": {"type": "WordLevel", "unk_token": "[UNK]",
                      "vocab": {word: number for number, word in enumerate(words)}}}


def _model2vec() -> dict[str, Any]:
    """The files of a static embedding of model2vec with a table of rows and a factor for each token."""
    return {"config.json": {"model_type": "model2vec", "normalize": True, "max_length": 9},
            "tokenizer.json": _vocabulary(6), "model.safetensors": {"tensors": {
                "embeddings": ("F32", [4, 3]), "weights": ("F32", [6]), "mapping": ("I64", [6])}}}


def _static() -> dict[str, Any]:
    """The files of a static embedding of sentence-transformers."""
    kind = "sentence_transformers.models"
    return {"modules.json": [{"idx": 0, "name": "0", "path": "0_StaticEmbedding", "type": f"{kind}.StaticEmbedding"},
                             {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{kind}.Normalize"}],
            "0_StaticEmbedding/tokenizer.json": _vocabulary(6),
            "0_StaticEmbedding/model.safetensors": {"tensors": {"embedding.weight": ("F32", [6, 3])}}}


def _router() -> dict[str, Any]:
    """The files of a Router with an encoder for queries and one for documents, whose vectors have one size."""
    files: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "",
                          "type": "sentence_transformers.base.modules.router.Router"}],
        "router_config.json": {"types": {}, "structure": {}, "parameters": {"default_route": "document",
                                                                            "allow_empty_key": True}}}
    config = files["router_config.json"]
    for side in ("query", "document"):
        files |= encoders._encoder(f"{side}_0/") | {f"{side}_1/config.json": {
            "word_embedding_dimension": encoders.HIDDEN, "pooling_mode_mean_tokens": True}}
        config["structure"][side] = [f"{side}_0", f"{side}_1"]
        config["types"] |= {f"{side}_0": "sentence_transformers.models.Transformer",
                            f"{side}_1": "sentence_transformers.models.Pooling"}
    return files


def _bge_m3() -> dict[str, Any]:
    """The files of an encoder with BGE-M3's heads beside it."""
    return encoders._encoder("") | {
        "colbert_linear.safetensors": {"tensors": {"weight": ("F32", [6, encoders.HIDDEN]), "bias": ("F32", [6])}},
        "sparse_linear.safetensors": {"tensors": {"weight": ("F32", [1, encoders.HIDDEN]), "bias": ("F32", [1])}}}


def _classifier(kind: str) -> dict[str, Any]:
    """The files of a classifier of texts (``Sequence``) or tokens (``Token``) with three labels."""
    names = {str(number): f"label {number}" for number in range(3)}
    config = encoders.CONFIG | {"architectures": [f"BertFor{kind}Classification"], "id2label": names,
                                "label2id": {name: int(number) for number, name in names.items()},
                                "problem_type": "single_label_classification"}
    hidden = encoders.HIDDEN
    head = encoders._linear("classifier", 3, hidden)
    if kind == "Sequence":
        head |= encoders._linear("bert.pooler.dense", hidden, hidden)
    return encoders._encoder("") | {"config.json": config, "model.safetensors": {
        name: shape for name, shape in encoders.SHAPES.items() if not name.startswith("cls.")} | head}


def _adapter() -> dict[str, Any]:
    """The files of an adapter of PEFT for queries and keys. The queries have a rank and a factor of their own."""
    layer, hidden = "base_model.model.encoder.layer.0.attention.self", encoders.HIDDEN
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "use_rslora": False, "rank_pattern": {"query": 2},
              "alpha_pattern": {"query": 3}, "bias": "none", "target_modules": ["query", "key"]}
    return {"adapter_config.json": config, "adapter_model.safetensors": {"tensors": {
        f"{layer}.{name}.lora_{side}.weight": ("F32", [2, hidden] if side == "A" else [hidden, 2])
        for name in ("query", "key") for side in "AB"}}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": make.base, **encoders.KINDS, "model2vec": _model2vec, "static": _static, "router": _router,
    "bge_m3": _bge_m3, "classifier": lambda: _classifier("Sequence"), "token_classifier": lambda: _classifier("Token"),
    "adapter": _adapter}
#: Keys of config.json in the table of a kind; other tests have all of them (test_bad_values.py).
KEYS = {"model2vec": ("normalize", "max_length"), "classifier": ("id2label", "label2id", "problem_type", "num_labels"),
        "token_classifier": ("id2label", "label2id", "problem_type", "num_labels")}


def _files(kind: str) -> dict[str, Any]:
    """Return the files of a folder, with tensors as ``{"tensors": {name: (type, shape)}}``."""
    return json.loads(json.dumps({
        name: {"tensors": {tensor: ("F32", shape) for tensor, shape in value.items()}}
        if name.endswith(".safetensors") and "tensors" not in value else value
        for name, value in KINDS[kind]().items()}))


# ---- tables ----------------------------------------------------------------------------------------------------------

class Folder:
    """A folder of which one file at a time is changed."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.files, self.keys = path / "m", _files(kind), KEYS.get(kind, ())
        make.write_folder(str(self.path), self.files)
        self.describe: Callable[[], Any] = lambda: describe_folder(str(self.path), key="k", ref="r")
        if kind == "adapter":
            make.write_folder(str(path / "base"), encoders._encoder("") | {"model.safetensors": {"tensors": {
                name: ("F32", shape) for name, shape in encoders.SHAPES.items()}}})
            base = describe_folder(str(path / "base"), key="k", ref="r")
            self.describe = lambda: replace(read_adapter(self.path, base), stamps=())  # those of rewritten files differ

    def reader(self, name: str) -> Callable[[Any], Any]:
        """Return a function that describes the folder with another value in a file."""
        def read(value: Any) -> Any:
            try:
                make.write_folder(str(self.path), {name: value})
                return self.describe()
            finally:
                make.write_folder(str(self.path), {name: self.files[name]})
        return read

    def tables(self) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
        hidden = {f"{self.path}/": "", str(self.path): "folder"}
        for name, base in self.files.items():
            if name.endswith("tokenizer.json") or "model_type" in base and not self.keys and name != _TOP:
                continue  # other tests: test_bad_values.py, and those of tokenizers
            if name == "config.json":
                yield name, badvalues.table(self.reader(name), base, name=name, hidden=hidden,
                                            places=lambda where: where[0] in self.keys)
            elif name.endswith(".safetensors"):
                yield name, dict(_tensors(self.reader(name), base, hidden))
            else:  # in memory, a side of a Router is a list of modules
                yield name, badvalues.table(self.reader(name), base, name=name, hidden=hidden,
                                            places=lambda where: isinstance(base, list) or isinstance(where[0], str))


def _tensors(read: Callable[[Any], Any], base: Any, hidden: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the outcomes of a tensor that is missing, has another shape or type, or is not part of the model."""
    names = [name for name in base["tensors"] if "encoder.layer" not in name or "0.attention.self.query" in name]
    for name in [*names, "other.weight"]:
        dtype, shape = base["tensors"].get(name, ("F32", [2, 3]))
        changes: dict[str, Any] = {"longer": (dtype, [shape[0] + 1, *shape[1:]]), "deeper": (dtype, [*shape, 1]),
                                   "empty": (dtype, [0, *shape[1:]]), "I64": ("I64", shape), "F64": ("F64", shape)}
        row: dict[str, str] = {}
        for change, value in {"missing": None, **changes}.items():
            tensors = {**base["tensors"], name: value}
            if value is None:
                del tensors[name]
                if name == "other.weight":
                    continue
            row[change] = badvalues.outcome(read, {"tensors": tensors}, hidden)[0] or "accepted"
        yield name, row


def found(kind: str, path: Path) -> dict[str, Any]:
    return {f"{name}: {place}": row for name, rows in Folder(path, kind).tables() for place, row in rows.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_are_the_committed_ones(kind: str, tmp_path: Path) -> None:
    badvalues.compare(json.loads(SNAPSHOT.read_text("utf-8"))[kind], found(kind, tmp_path))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        SNAPSHOT.write_text(badvalues.written({kind: found(kind, Path(folder) / kind) for kind in KINDS}),
                            "utf-8")
