"""Writes the corpora of malformed and sound safetensors files and model folders.

    python tests/corpus/make_safetensors.py [folder]

Every file is named after its case in the list of bad inputs. ``safetensors/expected.json`` says what each rejected file
must get: the class of the error and its field. A folder case is one JSON file: edits to a small sound folder (file name
-> text, null to remove it, or ``{"tensors": ...}`` for a safetensors file) and the expected error. The output is the
same on every run; a test compares it with what is committed. Huge and sparse files are made by the tests themselves.
"""

import json
import os
import random
import struct
import sys
from typing import Any

BITS = {"F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U8": 8, "BOOL": 8, "F64": 64, "F4": 4, "F6_E2M3": 6, "F8_E4M3": 8}


def header(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Header of tensors that follow each other, as an object."""
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        bits = BITS[dtype]
        for size in shape:
            bits *= size
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bits // 8]}
        at += bits // 8
    return table


def pack(table: Any, data: bytes | int = 0, *, seed: int = 0, pad: int = 8) -> bytes:
    """A file from a header (an object, or its text) and data (or how many bytes of it)."""
    text = table if isinstance(table, bytes) else json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % pad)
    if isinstance(data, int):
        data = random.Random(seed).randbytes(data)
    return struct.pack("<Q", len(text)) + text + data


def build(tensors: dict[str, tuple[str, list[int]]], *, seed: int = 0, metadata: dict[str, str] | None = None) -> bytes:
    """A sound file with random contents."""
    table = header(tensors, metadata)
    end = max([entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"], default=0)
    data = bytearray(random.Random(seed).randbytes(end))
    for name, entry in table.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            # small finite numbers, so that a network of them can be run
            begin, stop = entry["data_offsets"]
            rng, count = random.Random(f"{seed}/{name}"), (stop - begin) // 4
            data[begin:stop] = struct.pack(f"<{count}f", *(rng.gauss(0, 0.2) for _ in range(count)))
    return pack(table, bytes(data))


TWO = {"a": ("F32", [2, 3]), "b": ("F16", [4])}


def valid() -> dict[str, bytes]:
    return {
        "two_tensors": build(TWO),
        "no_tensors": pack({}),
        "metadata": build(TWO, metadata={"format": "pt", "note": "äöü 漢字"}),
        "scalar_and_empty": build({"scalar": ("F32", []), "empty": ("F32", [0, 5]), "rest": ("I64", [2])}),
        "four_bit": build({"x": ("F4", [3, 2]), "y": ("F6_E2M3", [4])}),
        "unordered_header": pack({"b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
                                  "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 5),
        "names_with_unicode": build({"gewicht.ä": ("F32", [1]), "重み": ("F32", [1])}),
    }


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape,
            "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets, **more}


def reject() -> dict[str, tuple[bytes, str, str]]:
    """Name -> (file, class of the error, its field)."""
    f = "FormatError"
    good = json.dumps(header(TWO)).encode()
    big = 1 << 62
    return {
        "case43_empty": (b"", f, "file size"),
        "case43_seven_bytes": (b"\x02\0\0\0\0\0\0", f, "file size"),
        "case44_header_longer_than_file": (struct.pack("<Q", 1000) + b"{}", f, "header length"),
        "case44_header_over_100_mb": (struct.pack("<Q", 100_000_001) + b"{}", f, "header length"),
        "case44_header_length_overflows": (struct.pack("<Q", (1 << 64) - 1) + b"{}", f, "header length"),
        "case44_header_length_sign": (struct.pack("<Q", 1 << 63) + b"{}", f, "header length"),
        "case45_not_utf8": (pack(b'{"a\xff":{}}'), f, "JSON"),
        "case45_truncated_utf8": (pack(b'{"\xe6\xbc":1}'), f, "JSON"),
        "case45_not_an_object": (pack(b"[]"), f, "header"),
        "case45_leading_space": (pack(b" {}"), f, "header"),
        "case45_byte_order_mark": (pack(b"\xef\xbb\xbf{}"), f, "header"),
        "case45_empty_header": (struct.pack("<Q", 0), f, "header"),
        "case45_junk_padding": (pack(b"{}\0\0\0\0\0\0"), f, "header padding"),
        "case45_newline_padding": (pack(b"{}\n"), f, "header padding"),
        "case45_text_after_object": (pack(b"{}{}"), f, "JSON"),
        "case46_duplicate_tensor": (pack(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), 8), f, "a"),
        "case46_duplicate_field": (pack(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8), f,
                                   "a.dtype"),
        "case46_duplicate_metadata": (pack(b'{"__metadata__":{},"__metadata__":{}}'), f, "__metadata__"),
        "case47_too_deep": (pack({"a": entry(shape=[[2]])}, 8), f, "a.shape[0]"),
        "case47_depth_100000": (pack(b'{"a":' + b"[" * 100_000 + b"}"), f, "a[0][0]"),
        "case47_huge_integer": (pack(b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,8]}}' % (b"9" * 5000), 8),
                                f, "a.shape[0]"),
        "case47_integer_beyond_64_bits": (pack({"a": entry(offsets=(0, 1 << 64))}, 8), f, "a.data_offsets[1]"),
        "case47_integer_beyond_63_bits": (pack({"a": entry(offsets=(0, 1 << 63))}, 8), f, "a.data_offsets[1]"),
        "case47_fraction": (pack({"a": entry(shape=[2.0])}, 8), f, "a.shape[0]"),
        "case47_exponent": (pack(b'{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', 8), f, "a.shape[0]"),
        "case47_boolean": (pack({"a": entry(shape=[True, 2])}, 8), f, "a.shape[0]"),
        "case47_negative": (pack({"a": entry(shape=[-2])}, 8), f, "a.shape[0]"),
        "case47_nan": (pack(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8), f, "a.shape[0]"),
        "case48_begin_after_end": (pack({"a": entry(offsets=(8, 0))}, 8), f, "a.data_offsets"),
        "case48_overlap": (pack({"a": entry(), "b": entry(offsets=(4, 12))}, 12), f, "b.data_offsets"),
        "case48_same_bytes_twice": (pack({"a": entry(), "b": entry()}, 8), f, "b.data_offsets"),
        "case48_hole": (pack({"a": entry(), "b": entry(offsets=(12, 20))}, 20), f, "b.data_offsets"),
        "case48_hole_at_start": (pack({"a": entry(offsets=(4, 12))}, 12), f, "a.data_offsets"),
        "case48_data_missing": (pack({"a": entry()}, 7), f, "data_offsets"),
        "case48_trailing_bytes": (pack({"a": entry()}, 9), f, "data_offsets"),
        "case48_three_offsets": (pack({"a": entry(offsets=(0, 4, 8))}, 8), f, "a.data_offsets"),
        "case49_span_too_short": (pack({"a": entry(offsets=(0, 4))}, 4), f, "a.data_offsets"),
        "case49_span_too_long": (pack({"a": entry(offsets=(0, 12))}, 12), f, "a.data_offsets"),
        "case49_product_overflows": (pack({"a": entry(shape=[big, big])}, 8), f, "a.shape"),
        "case49_product_wraps_to_span": (pack({"a": entry(shape=[1 << 32, 1 << 32, 2])}, 8), f, "a.shape"),
        "case49_overflow_hidden_by_zero": (pack({"a": entry(shape=[big, big, 0], offsets=(0, 0))}, 0), f, "a.shape"),
        "case49_too_many_dimensions": (pack({"a": entry(shape=[1] * 1000, offsets=(0, 4))}, 4), f, "a.shape"),
        "case50_unknown_dtype": (pack({"a": entry(dtype="F128")}, 8), f, "a.dtype"),
        "case50_dtype_in_lower_case": (pack({"a": entry(dtype="f32")}, 8), f, "a.dtype"),
        "case50_dtype_not_text": (pack({"a": entry(dtype=4)}, 8), f, "a.dtype"),
        "case50_four_bits_misaligned": (pack({"a": entry(dtype="F4", shape=[3], offsets=(0, 1))}, 1), f, "a.shape"),
        "case50_six_bits_misaligned": (pack({"a": entry(dtype="F6_E2M3", shape=[2], offsets=(0, 1))}, 1), f, "a.shape"),
        "case51_metadata_number": (pack({"__metadata__": {"format": 1}}), f, "__metadata__.format"),
        "case51_metadata_list": (pack({"__metadata__": ["pt"]}), f, "__metadata__"),
        "case51_metadata_null": (pack({"__metadata__": {"format": None}}), f, "__metadata__.format"),
        "case51_metadata_nested": (pack({"__metadata__": {"format": {"a": "b"}}}), f, "__metadata__.format"),
        "tensor_not_an_object": (pack({"a": 1}), f, "a"),
        "tensor_field_missing": (pack({"a": {"dtype": "F32", "shape": [2]}}, 8), f, "a"),
        "tensor_field_surplus": (pack({"a": entry(strides=[1])}, 8), f, "a"),
        "tensor_name_empty": (pack({"": entry()}, 8), f, "tensor name"),
        "tensor_name_with_nul": (pack({"a\0b": entry()}, 8), f, "tensor name"),
        "tensor_name_half_surrogate": (pack(b'{"\\ud800":1}'), f, "JSON"),
        "truncated_header": (pack(good[:40]), f, "header padding"),
        "truncated_in_string": (pack(b'{"abc}'), f, "JSON"),
    }


#: A sound BERT of two layers with the smallest sizes that tell every dimension apart.
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 6, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 10, "max_position_embeddings": 16, "type_vocab_size": 2,
    "vocab_size": 9, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "absolute"}


def bert_tensors(config: dict[str, Any] = CONFIG, prefix: str = "") -> dict[str, tuple[str, list[int]]]:
    """Names, types and shapes of a BERT's tensors, as transformers writes them."""
    d, f = config["hidden_size"], config["intermediate_size"]
    names: dict[str, list[int]] = {
        "embeddings.word_embeddings.weight": [config["vocab_size"], d],
        "embeddings.position_embeddings.weight": [config["max_position_embeddings"], d],
        "embeddings.token_type_embeddings.weight": [config["type_vocab_size"], d],
        "embeddings.LayerNorm.weight": [d], "embeddings.LayerNorm.bias": [d]}
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for part, out, size in (("attention.self.query", d, d), ("attention.self.key", d, d),
                                ("attention.self.value", d, d), ("attention.output.dense", d, d),
                                ("intermediate.dense", f, d), ("output.dense", d, f)):
            names[f"{layer}.{part}.weight"], names[f"{layer}.{part}.bias"] = [out, size], [out]
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            names[f"{layer}.{part}.weight"], names[f"{layer}.{part}.bias"] = [d], [d]
    names["pooler.dense.weight"], names["pooler.dense.bias"] = [d, d], [d]
    return {prefix + name: ("F32", shape) for name, shape in names.items()}


MODULES: list[dict[str, Any]] = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"),
                                      ("3_Normalize", "Normalize")))]
POOLING = {"word_embedding_dimension": 6, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True,
           "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
DENSE = {"in_features": 12, "out_features": 5, "bias": True,
         "activation_function": "torch.nn.modules.activation.Tanh"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "."]
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [
        {"id": i, "content": WORDS[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for i in range(4)],
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                   "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100, "vocab": {word: i for i, word in enumerate(WORDS)}}}


def base() -> dict[str, Any]:
    """Files of the sound folder."""
    return {
        "config.json": CONFIG, "modules.json": MODULES, "1_Pooling/config.json": POOLING,
        "2_Dense/config.json": DENSE, "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": None,
                                              "similarity_fn_name": "cosine"},
        "tokenizer.json": TOKENIZER, "tokenizer_config.json": {"model_max_length": 512, "unk_token": "[UNK]"},
        "model.safetensors": {"tensors": bert_tensors()},
        "2_Dense/model.safetensors": {"tensors": {"linear.weight": ("F32", [5, 12]), "linear.bias": ("F32", [5])}},
    }


def write_folder(folder: str, files: dict[str, Any]) -> None:
    """Writes files: an object or list as JSON, text as it stands, ``{"tensors": ...}`` as safetensors, null not."""
    for name, value in files.items():
        if value is None:
            continue
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if isinstance(value, dict) and set(value) == {"tensors"}:
            data = build({key: (dtype, shape) for key, (dtype, shape) in value["tensors"].items()})
        else:
            data = (value if isinstance(value, str) else json.dumps(value, indent=1)).encode("utf-8", "surrogatepass")
        with open(path, "wb") as file:
            file.write(data)


def _without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _modules(**changes: Any) -> list[dict[str, Any]]:
    """The module list with one module's keys changed: ``at=i`` and the keys."""
    at = changes.pop("at")
    return [{**module, **changes} if i == at else module for i, module in enumerate(MODULES)]


def _shards(**changes: Any) -> dict[str, Any]:
    """The sound folder as two shards with an index, some files changed."""
    tensors = bert_tensors()
    names = sorted(tensors)
    split = {name: f"model-0000{1 + (i >= 20)}-of-00002.safetensors" for i, name in enumerate(names)}
    files: dict[str, Any] = {"model.safetensors": None, "model.safetensors.index.json": {
        "metadata": {"total_size": 4 * 1000}, "weight_map": split}}
    for shard in sorted(set(split.values())):
        files[shard] = {"tensors": {name: tensors[name] for name in names if split[name] == shard}}
    return {**files, **changes}


def folders() -> dict[str, dict[str, Any]]:
    """Folder cases: name -> edits and what they must get (``error`` null: accepted)."""
    f, u, x = "FormatError", "Unsupported", "UnsafeFormat"
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = _shards()
    index = shards["model.safetensors.index.json"]
    names = sorted(index["weight_map"])
    tensors = bert_tensors()
    cases: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
        "valid/as_it_is": ({}, None, None),
        "valid/shards": (shards, None, None),
        "valid/prefix_bert": ({"model.safetensors": {"tensors": bert_tensors(prefix="bert.")}}, None, None),
        "valid/old_norm_names": ({"model.safetensors": {"tensors": {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()}}}, None, None),
        "valid/no_modules": ({"modules.json": None}, None, None),
        "valid/new_spelling": ({
            "modules.json": [{**module, "type": name} for module, name in zip(MODULES, (
                "sentence_transformers.base.modules.transformer.Transformer",
                "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
                "sentence_transformers.base.modules.dense.Dense",
                "sentence_transformers.base.modules.normalize.Normalize"))],
            "1_Pooling/config.json": {
                "embedding_dimension": 6, "pooling_mode": ["cls", "mean"], "include_prompt": True},
        }, None, None),
        "reject/case32_config_is_a_folder": ({"config.json": None, "config.json/x": "y"}, f, "file type"),
        "reject/case33_key_missing": ({"config.json": _without(CONFIG, "hidden_size")}, f, "hidden_size"),
        "reject/case33_key_null": ({"config.json": {**CONFIG, "hidden_size": None}}, f, "hidden_size"),
        "reject/case33_key_text": ({"config.json": {**CONFIG, "hidden_size": "6"}}, f, "hidden_size"),
        "reject/case33_key_fraction": ({"config.json": {**CONFIG, "hidden_size": 6.0}}, f, "hidden_size"),
        "reject/case33_key_boolean": ({"config.json": {**CONFIG, "num_hidden_layers": True}}, f, "num_hidden_layers"),
        "reject/case34_layers": ({"config.json": {**CONFIG, "num_hidden_layers": 1_000_000}}, "LimitError", None),
        "reject/case35_heads_zero": ({"config.json": {**CONFIG, "num_attention_heads": 0}}, f, "num_attention_heads"),
        "reject/case36_width_not_divisible": ({"config.json": {**CONFIG, "num_attention_heads": 4}}, f,
                                              "num_attention_heads"),
        "reject/case38_shape": ({"config.json": {**CONFIG, "intermediate_size": 11}}, f,
                                "shape of encoder.layer.0.intermediate.dense.weight"),
        "reject/case38_vocabulary": ({"config.json": {**CONFIG, "vocab_size": 10}}, f,
                                     "shape of embeddings.word_embeddings.weight"),
        "reject/case39_epsilon_zero": ({"config.json": {**CONFIG, "layer_norm_eps": 0.0}}, f, "layer_norm_eps"),
        "reject/case39_epsilon_negative": ({"config.json": {**CONFIG, "layer_norm_eps": -1e-12}}, f, "layer_norm_eps"),
        "reject/case39_epsilon_nan": ({"config.json": json.dumps({**CONFIG, "layer_norm_eps": float("nan")})}, f,
                                      "layer_norm_eps"),
        "reject/case39_epsilon_infinite": ({"config.json": json.dumps(CONFIG).replace("1e-12", "1e999")}, f,
                                           "layer_norm_eps"),
        "reject/case40_context": ({"config.json": {**CONFIG, "max_position_embeddings": (1 << 32) - 1}}, "LimitError",
                                  None),
        "reject/case42_architecture": ({"config.json": {**CONFIG, "model_type": "perceiver"}}, f, "model_type"),
        "reject/case42_head": ({"config.json": {**CONFIG, "architectures": ["BertLMHeadModel"]}}, f, "architectures"),
        "reject/case42_no_model_type": ({"config.json": _without(CONFIG, "model_type", "architectures")}, f,
                                        "model_type"),
        "reject/config_duplicate_key": ({"config.json": json.dumps(CONFIG)[:-1] + ', "hidden_size": 6}'}, f,
                                        "hidden_size"),
        "reject/config_not_an_object": ({"config.json": "[]"}, f, "JSON"),
        "reject/config_empty": ({"config.json": ""}, f, "JSON"),
        "reject/config_missing": ({"config.json": None}, f, "config.json"),
        "reject/config_relative_positions": ({"config.json": {
            **CONFIG, "position_embedding_type": "relative_key"}}, u, None),
        "reject/config_activation": ({"config.json": {**CONFIG, "hidden_act": "xielu"}}, f, "hidden_act"),
        "reject/config_decoder": ({"config.json": {**CONFIG, "is_decoder": True}}, u, None),
        "reject/config_cross_attention": ({"config.json": {**CONFIG, "add_cross_attention": True}}, u, None),
        "reject/config_pruned_heads": ({"config.json": {**CONFIG, "pruned_heads": {"0": [1]}}}, u, None),
        "reject/config_quantised": ({"config.json": {**CONFIG, "quantization_config": {"bits": 4}}}, u, None),
        "reject/remote_code": ({"config.json": {**CONFIG, "auto_map": {"AutoModel": "modeling.X"}}}, x, None),
        "reject/remote_code_tokenizer": ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["t.T", None]}}}, x,
                                         None),
        "reject/pickle_only": ({"model.safetensors": None, "pytorch_model.bin": "PK"}, x, None),
        "reject/pickle_index_only": ({"model.safetensors": None, "pytorch_model.bin.index.json": "{}"}, x, None),
        "reject/pickle_checkpoint": ({"model.safetensors": None, "model.ckpt": "x"}, x, None),
        "reject/pickle_dense": ({"2_Dense/model.safetensors": None, "2_Dense/pytorch_model.bin": "PK"}, x, None),
        "reject/weights_missing": ({"model.safetensors": None}, f, "weights"),
        "reject/weights_integer": ({"model.safetensors": {"tensors": {
            **tensors, "embeddings.LayerNorm.bias": ("I64", [6])}}}, u, None),
        "reject/tensor_missing": ({"model.safetensors": {"tensors": _without(
            tensors, "encoder.layer.1.output.dense.bias")}}, f, "tensors"),
        "reject/tensor_surplus": ({"model.safetensors": {"tensors": {
            **tensors, "encoder.layer.0.attention.self.distance_embedding.weight": ("F32", [3, 3])}}}, f, "tensors"),
        "reject/tensor_layer_surplus": ({"config.json": {**CONFIG, "num_hidden_layers": 1}}, f, "tensors"),
        "reject/tensor_two_prefixes": ({"model.safetensors": {"tensors": {
            **tensors, **bert_tensors(prefix="bert.")}}}, f, "tensors"),
        "reject/tokenizer_missing": ({"tokenizer.json": None}, f, "tokenizer.json"),
        "reject/case52_shard_outside": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {**index["weight_map"], names[0]: "../model.safetensors"}}}), f, "weight_map"),
        "reject/case52_shard_absolute": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {name: "/etc/shard.safetensors" for name in names}}}), f, "weight_map"),
        "reject/case52_shard_pickle": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {**index["weight_map"], names[0]: "pytorch_model.bin"}}}), f, f"weight_map.{names[0]}"),
        "reject/case52_shard_missing": (_shards(**{second: None}), f, "weight_map"),
        "reject/case52_shard_not_text": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {**index["weight_map"], names[0]: 1}}}), f, f"weight_map.{names[0]}"),
        "reject/case52_map_missing": (_shards(**{"model.safetensors.index.json": {"metadata": {}}}), f, "weight_map"),
        "reject/case52_map_empty": (_shards(**{"model.safetensors.index.json": {"weight_map": {}}}), f, "weight_map"),
        "reject/case52_tensor_in_no_shard": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {**index["weight_map"], "extra.weight": first}}}), f, "weight_map.extra.weight"),
        "reject/case52_tensor_in_other_shard": (_shards(**{"model.safetensors.index.json": {
            "weight_map": {**index["weight_map"], names[0]: second}}}), f, f"weight_map.{names[0]}"),
        "reject/case52_tensor_twice": (_shards(**{second: {"tensors": {
            **shards[second]["tensors"], names[0]: tensors[names[0]]}}}), f, f"weight_map.{names[0]}"),
        "reject/case52_tensor_not_in_index": (_shards(**{"model.safetensors.index.json": {
            "weight_map": _without(index["weight_map"], names[0])}}), f, f"weight_map.{names[0]}"),
        "reject/case90_unknown_class": ({"modules.json": _modules(at=1, type="os.system")}, f, "[1].type"),
        "reject/case90_unknown_class_of_library": ({"modules.json": _modules(
            at=1, type="sentence_transformers.util.http_get")}, f, "[1].type"),
        "reject/case90_repository_class": ({"modules.json": _modules(at=0, type="modeling_custom.Transformer")}, f,
                                           "[0].type"),
        "reject/case90_class_not_computed": ({"modules.json": _modules(
            at=1, type="sentence_transformers.models.LSTM")}, u, None),
        "reject/case90_path_outside": ({"modules.json": _modules(at=1, path="../1_Pooling")}, f, "[1].path"),
        "reject/case90_path_absolute": ({"modules.json": _modules(at=1, path="/etc")}, f, "[1].path"),
        "reject/case90_path_backslash": ({"modules.json": _modules(at=1, path="..\\1_Pooling")}, f, "[1].path"),
        "reject/case90_path_drive": ({"modules.json": _modules(at=1, path="C:/pooling")}, f, "[1].path"),
        "reject/case90_path_hidden_dots": ({"modules.json": _modules(at=1, path="1_Pooling/../../x")}, f, "[1].path"),
        "reject/case90_path_nul": ({"modules.json": _modules(at=1, path="1_Pooling\0")}, f, "[1].path"),
        "reject/case90_path_number": ({"modules.json": _modules(at=1, path=1)}, f, "[1].path"),
        "reject/case90_cycle_to_root": ({"modules.json": _modules(at=1, path="")}, f, "[1].path"),
        "reject/case90_cycle_by_dot": ({"modules.json": _modules(at=1, path=".")}, f, "[1].path"),
        "reject/case90_folder_twice": ({"modules.json": _modules(at=2, path="1_Pooling")}, f, "[2].path"),
        "reject/case90_cycle_of_transformer": ({"modules.json": [
            {**MODULES[0], "path": "0_Transformer"}, {**MODULES[1], "path": "0_Transformer"}]}, f, "[1].path"),
        "reject/case90_order": ({"modules.json": [{**MODULES[i], "idx": n} for n, i in enumerate((0, 2, 1, 3))]}, f,
                                "[1].type"),
        "reject/case90_order_normalize_first": ({"modules.json": [
            {**MODULES[i], "idx": n} for n, i in enumerate((0, 1, 3, 2))]}, f, "[3].type"),
        "reject/case90_two_transformers": ({"modules.json": [
            MODULES[0], {**MODULES[0], "idx": 1, "path": "x"}, {**MODULES[1], "idx": 2}]}, f, "[1].type"),
        "reject/case90_no_pooling": ({"modules.json": [MODULES[0]]}, f, "JSON"),
        "reject/case90_no_transformer": ({"modules.json": [{**MODULES[1], "idx": 0}]}, f, "[0].type"),
        "reject/case90_index_wrong": ({"modules.json": _modules(at=1, idx=2)}, f, "[1].idx"),
        "reject/case90_modules_empty": ({"modules.json": []}, f, "JSON"),
        "reject/case90_modules_object": ({"modules.json": {}}, f, "JSON"),
        "reject/case90_modules_many": ({"modules.json": [MODULES[0]] * 1000}, f, "JSON"),
        "reject/case90_pooling_unknown_mode": ({"1_Pooling/config.json": {
            "embedding_dimension": 6, "pooling_mode": "attention"}}, f, "pooling_mode"),
        "reject/case90_pooling_no_mode": ({"1_Pooling/config.json": {
            "embedding_dimension": 6, "pooling_mode": []}}, f, "pooling_mode"),
        "reject/case90_pooling_unknown_key": ({"1_Pooling/config.json": {**POOLING, "temperature": 2}}, f,
                                              "temperature"),
        "reject/case90_pooling_old_not_boolean": ({"1_Pooling/config.json": {
            **POOLING, "pooling_mode_max_tokens": 1}}, f, "pooling_mode_max_tokens"),
        "reject/case90_pooling_dimension": ({"1_Pooling/config.json": {**POOLING, "word_embedding_dimension": 7}}, f,
                                            "word_embedding_dimension"),
        "reject/case90_pooling_missing": ({"1_Pooling/config.json": None}, "FileError", None),
        "reject/case90_dense_activation": ({"2_Dense/config.json": {
            **DENSE, "activation_function": "builtins.print"}}, f, "activation_function"),
        "reject/case90_dense_input": ({"2_Dense/config.json": {**DENSE, "in_features": 6}}, f, "in_features"),
        "reject/case90_dense_output_huge": ({"2_Dense/config.json": {**DENSE, "out_features": 1 << 40}}, f,
                                            "out_features"),
        "reject/case90_dense_shape": ({"2_Dense/config.json": {**DENSE, "out_features": 4}}, f,
                                      "shape of linear.weight"),
        "reject/case90_dense_bias_missing": ({"2_Dense/model.safetensors": {"tensors": {
            "linear.weight": ("F32", [5, 12])}}}, f, "tensors"),
        "reject/case90_dense_residual": ({"2_Dense/config.json": {**DENSE, "use_residual": True}}, f, "tensors"),
        "reject/case90_dense_on_tokens": ({"2_Dense/config.json": {
            **DENSE, "module_input_name": "token_embeddings"}}, u, None),
        "reject/case90_dense_unknown_key": ({"2_Dense/config.json": {**DENSE, "scale": 2}}, f, "scale"),
        "reject/case90_normalize_on_tokens": ({"3_Normalize/config.json": {
            "module_input_name": "token_embeddings"}}, u, None),
        "reject/case90_default_prompt": ({"config_sentence_transformers.json": {
            "prompts": {"query": "q"}, "default_prompt_name": "passage"}}, f, "default_prompt_name"),
        "reject/case90_prompt_not_text": ({"config_sentence_transformers.json": {"prompts": {"query": 1}}}, f,
                                          "prompts.query"),
        "reject/case90_similarity": ({"config_sentence_transformers.json": {"similarity_fn_name": "eval"}}, f,
                                     "similarity_fn_name"),
        "reject/case90_sparse_model": ({"config_sentence_transformers.json": {"model_type": "SparseEncoder"}}, u, None),
        "reject/case90_sequence_length": ({"sentence_bert_config.json": {"max_seq_length": 0}}, f, "max_seq_length"),
        "reject/case90_transformer_unknown_key": ({"sentence_bert_config.json": {"rope": 1}}, f, "rope"),
        "reject/case90_transformer_output": ({"sentence_bert_config.json": {
            "module_output_name": "sentence_embedding"}}, u, None),
        "reject/case90_transformer_task": ({"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, u, None),
        "reject/case90_query_expansion": ({"sentence_bert_config.json": {"query_expansion": {"length": 32}}}, u, None),
    }
    return {name: {"edit": edit, "error": error, "field": field} for name, (edit, error, field) in cases.items()}


def _plain(value: Any) -> Any:
    """Tuples as lists, so that a case reads back from JSON as it was."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_all(root: str) -> None:
    """Writes both corpora below ``root``."""
    expected: dict[str, dict[str, str]] = {}
    groups: dict[str, bytes] = {f"valid/{name}.safetensors": data for name, data in valid().items()}
    for name, (data, error, field) in reject().items():
        groups[f"reject/{name}.safetensors"] = data
        expected[f"{name}.safetensors"] = {"error": error, "field": field}
    for name, data in groups.items():
        path = os.path.join(root, "safetensors", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    with open(os.path.join(root, "safetensors", "expected.json"), "w", encoding="utf-8") as out:
        json.dump(expected, out, indent=1, sort_keys=True)
        out.write("\n")
    for name, case in folders().items():
        path = os.path.join(root, "folder", f"{name}.json")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            json.dump(_plain(case), out, indent=None, sort_keys=True)
            out.write("\n")


if __name__ == "__main__":
    write_all(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)))
