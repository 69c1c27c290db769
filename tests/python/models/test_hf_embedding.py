"""Hostile folders of sparse encoders and of models of token vectors: the error names the file and the field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

save_file = pytest.importorskip("safetensors.numpy").save_file

from mpool.errors import FormatError, Unsupported  # noqa: E402
from mpool.models.formats.hf_folder import describe_folder  # noqa: E402
from mpool.models.spec import EmbeddingSettings  # noqa: E402

HIDDEN, VOCAB, INNER, LENGTH = 8, 11, 12, 16
CONFIG: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": INNER, "max_position_embeddings": LENGTH,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
_SPARSE = "sentence_transformers.sparse_encoder.modules"
_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"


def _linear(name: str, out: int, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, size), f"{name}.bias": (out,)}


def _norm(name: str, size: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


_LAYER = "bert.encoder.layer.0"
SHAPES: dict[str, tuple[int, ...]] = {
    "bert.embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
    "bert.embeddings.position_embeddings.weight": (LENGTH, HIDDEN),
    "bert.embeddings.token_type_embeddings.weight": (2, HIDDEN), **_norm("bert.embeddings.LayerNorm"),
    **_linear(f"{_LAYER}.attention.self.query", HIDDEN, HIDDEN),
    **_linear(f"{_LAYER}.attention.self.key", HIDDEN, HIDDEN),
    **_linear(f"{_LAYER}.attention.self.value", HIDDEN, HIDDEN),
    **_linear(f"{_LAYER}.attention.output.dense", HIDDEN, HIDDEN), **_norm(f"{_LAYER}.attention.output.LayerNorm"),
    **_linear(f"{_LAYER}.intermediate.dense", INNER, HIDDEN), **_linear(f"{_LAYER}.output.dense", HIDDEN, INNER),
    **_norm(f"{_LAYER}.output.LayerNorm"), **_linear("cls.predictions.transform.dense", HIDDEN, HIDDEN),
    **_norm("cls.predictions.transform.LayerNorm"), "cls.predictions.bias": (VOCAB,)}


def write(path: Path, value: Any) -> None:
    """Write a file of a folder: JSON, or tensors given as shapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: np.zeros(shape, np.float32) for name, shape in value.items()}, str(path))
    else:
        path.write_text(json.dumps(value))


def _encoder(at: str) -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(VOCAB - 5))]
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
                 "post_processor": None, "decoder": None, "truncation": None, "padding": None,
                 "model": {"type": "WordLevel", "unk_token": "[UNK]",
                           "vocab": {word: number for number, word in enumerate(words)}}}
    return {f"{at}config.json": CONFIG, f"{at}model.safetensors": SHAPES, f"{at}tokenizer.json": tokenizer,
            f"{at}tokenizer_config.json": {"model_max_length": LENGTH, "mask_token": "[MASK]"}}


def splade() -> dict[str, Any]:
    """The files of a sparse encoder."""
    return _encoder("") | {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER},
                         {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{_SPARSE}.SpladePooling"}],
        "sentence_bert_config.json": {"max_seq_length": 9},
        "1_SpladePooling/config.json": {"pooling_strategy": "max", "activation_function": "relu"},
        "config_sentence_transformers.json": {"model_type": "SparseEncoder"}}


def routed() -> dict[str, Any]:
    """The files of a sparse encoder with a table of weights for queries."""
    return _encoder("document/") | {
        "modules.json": [{"idx": 0, "name": "0", "path": "",
                          "type": "sentence_transformers.base.modules.router.Router"}],
        "router_config.json": {
            "types": {"query": f"{_SPARSE}.SparseStaticEmbedding", "document": _TRANSFORMER,
                      "pooling": f"{_SPARSE}.SpladePooling"},
            "structure": {"query": ["query"], "document": ["document", "pooling"]}, "parameters": {}},
        "pooling/config.json": {}, "query/config.json": {"frozen": False},
        "query/model.safetensors": {"weight": (VOCAB,)},
        "config_sentence_transformers.json": {"model_type": "SparseEncoder"}}


def pylate() -> dict[str, Any]:
    """The files of a model of PyLate."""
    return _encoder("") | {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                         {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}],
        "1_Dense/config.json": {"in_features": HIDDEN, "out_features": 4, "bias": False,
                                "activation_function": "torch.nn.modules.linear.Identity"},
        "1_Dense/model.safetensors": {"linear.weight": (4, HIDDEN)},
        "config_sentence_transformers.json": {"model_type": "ColBERT"}}


def stanford() -> dict[str, Any]:
    """The files of Stanford's ColBERT."""
    files = _encoder("") | {"artifact.metadata": {"query_maxlen": 12}}
    return files | {"config.json": CONFIG | {"architectures": ["HF_ColBERT"]},
                    "model.safetensors": SHAPES | {"linear.weight": (4, HIDDEN)}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {"splade": splade, "routed": routed, "pylate": pylate,
                                                  "stanford": stanford}


def settings_of(folder: Path, files: dict[str, Any]) -> EmbeddingSettings:
    """Write a folder and return its settings."""
    for name, value in files.items():
        if value is not None:
            write(folder / name, value)
    found = describe_folder(str(folder), key="k", ref="r").embedding
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_valid_folders(tmp_path: Path, kind: str) -> None:
    found = settings_of(tmp_path, KINDS[kind]())
    assert found.embeddings == (("sparse",) if kind in ("splade", "routed") else ("tokens",))
    assert (found.query_weights is not None) == (kind == "routed")


def test_defaults_of_pylate(tmp_path: Path) -> None:
    for at, config in enumerate(({}, {"query_prefix": None, "document_prefix": None, "document_length": None})):
        tokens = settings_of(tmp_path / str(at), pylate() | {
            "config_sentence_transformers.json": {"model_type": "ColBERT", **config}}).tokens
        assert tokens is not None
        assert (tokens.query_marker, tokens.document_marker) == ("[Q] ", "[D] ")
        assert (tokens.query_length, tokens.document_length) == (32, 180)
        assert tokens.expansion == "" and tokens.attend is False
    tokens = settings_of(tmp_path / "empty", pylate() | {"config_sentence_transformers.json": {
        "model_type": "ColBERT", "query_prefix": "", "do_query_expansion": False,
        "attend_to_expansion_tokens": True}}).tokens
    assert tokens is not None and (tokens.query_marker, tokens.expansion, tokens.attend) == ("", None, False)
    tokens = settings_of(tmp_path / "stanford", stanford()).tokens
    assert tokens is not None and (tokens.query_length, tokens.document_length) == (12, 220)


def test_default_prompt(tmp_path: Path) -> None:
    for kind, model in (("splade", "SparseEncoder"), ("pylate", "ColBERT")):
        found = settings_of(tmp_path / kind, KINDS[kind]() | {"config_sentence_transformers.json": {
            "model_type": model, "prompts": {"search": "w1 "}, "default_prompt_name": "search"}})
        assert found.default_prompt_name == "search" and found.prompts == {"search": "w1 "}


@pytest.mark.parametrize("kind", ["splade", "pylate"])
def test_the_number_of_prompts_is_limited(tmp_path: Path, kind: str) -> None:
    prompts = {f"p{number}": f"{number}: " for number in range(257)}
    files = KINDS[kind]()
    top = files["config_sentence_transformers.json"]
    with pytest.raises(FormatError, match="sentence_transformers.json: prompts is 257 prompts, allowed: at most 256"):
        settings_of(tmp_path / "many", files | {"config_sentence_transformers.json": {**top, "prompts": prompts}})
    del prompts["p0"]
    files["config_sentence_transformers.json"] = {**top, "prompts": prompts}
    assert settings_of(tmp_path / "most", files).prompts == prompts


_MODULES = "modules.json"
_TOP = "config_sentence_transformers.json"
def broken(kind: str, file: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the files of a folder with one value changed, or removed if it is None."""
    files: dict[str, Any] = json.loads(json.dumps(KINDS[kind]()))
    if not path:
        files[file] = value
        return files
    at = files[file]
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return files


@pytest.mark.parametrize(("value", "got"), [
    (None, "missing"), ("SentenceTransformer", "'SentenceTransformer'"), ("CrossEncoder", "'CrossEncoder'"),
    (7, "7"), (["SparseEncoder"], "a list")])
def test_a_query_table_needs_the_type_of_the_model(tmp_path: Path, value: Any, got: str) -> None:
    """The error names the file, the key, its value, what is allowed, and what to do."""
    folder = tmp_path / "model"
    with pytest.raises(FormatError) as caught:
        settings_of(folder, broken("routed", _TOP, ("model_type",), value))
    error = caught.value
    assert (error.file, error.field, error.got) == (str(folder / _TOP), "model_type", got)
    assert error.allowed == f"'SparseEncoder', because {folder / 'router_config.json'} has a query table"
    assert f'set "model_type": "SparseEncoder" in {_TOP}' in str(error.hint)


@pytest.mark.parametrize("kind, file, path, value, named", [
    ("splade", "config.json", ("hidden_act",), "quick_gelu", "hidden_act"),
    ("splade", "sentence_bert_config.json", ("tokenizer_args",), {"a": 1}, "tokenizer_args"),
    ("splade", "sentence_bert_config.json", ("model_args",), {"num_labels": 2}, "model_args.num_labels"),
    ("splade", _MODULES, (1, "type"), "sentence_transformers.models.Pooling", "[1].type"),
    ("routed", "router_config.json", ("structure", "query"), ["document"], "structure"),
    ("pylate", "1_Dense/config.json", ("module_input_name",), "sentence_embedding", "module_input_name")])
def test_unsupported_folders(tmp_path: Path, kind: str, file: str, path: tuple[Any, ...], value: Any,
                             named: str) -> None:
    with pytest.raises(Unsupported) as caught:
        settings_of(tmp_path / "model", broken(kind, file, path, value))
    assert named in str(caught.value) and file.rpartition("/")[2] in str(caught.value)
