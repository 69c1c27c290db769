"""Readers of Hugging Face folders: the corpus of malformed and valid folders, and settings of encoders and decoders."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import errors
from mpool.conversation.template import ChatTemplate
from mpool.models import files
from mpool.models.fields import Fields
from mpool.models.formats import hf_parts, sentence_folder
from mpool.models.families import reading
from mpool.models.describing import describe
from mpool.models.formats.hf_folder import describe_folder
from mpool.models.spec import ModelDescription

CORPUS = Path(__file__).resolve().parent.parent.parent / "corpus"
sys.path.insert(0, str(CORPUS))
import make_safetensors as make  # noqa: E402

CASES = {f"{p.parent.name}/{p.stem}": p for p in sorted((CORPUS / "folder").rglob("*.json"))}


def folder(tmp_path: Path, edit: dict[str, Any] | None = None) -> str:
    """Write the corpus's base folder with the files of ``edit`` replaced (None removes a file); return its path."""
    path = tmp_path / "model"
    make.write_folder(str(path), {**make.base(), **(edit or {})})
    return str(path)


def tensor_bytes(described: ModelDescription) -> dict[str, bytes]:
    """Return the stored bytes of every tensor by its name in the core."""
    found = {}
    for tensor in described.spec.tensors:
        with open(described.spec.files[tensor.file], "rb") as file:
            file.seek(tensor.offset)
            found[tensor.name] = file.read(tensor.nbytes)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("reject/")])
def test_rejected(tmp_path: Path, name: str) -> None:
    case = json.loads(CASES[name].read_text())
    path = folder(tmp_path, case["edit"])
    with pytest.raises(errors.MpoolError) as caught:
        describe_folder(path, key="k", ref=path)
    error = caught.value
    assert type(error).__name__ == case["error"]
    if case["field"] is not None:
        assert isinstance(error, errors.FormatError)
        assert error.field == case["field"]
        assert error.file is not None and error.file.startswith(path) and error.allowed
    assert path in str(error) and len(str(error)) < 1500
    if case["error"] == "UnsafeFormat":
        assert "safetensors" in str(error)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("valid/")])
def test_accepted(tmp_path: Path, name: str) -> None:
    case = json.loads(CASES[name].read_text())
    described = describe_folder(folder(tmp_path, case["edit"]), key="k", ref="r")
    embedding = described.embedding
    assert embedding is not None and described.capability == "text_embedding"
    if name == "valid/no_modules":
        assert (embedding.pooling, embedding.normalize, embedding.output_size) == (("mean",), False, 6)
        return
    assert (embedding.pooling, embedding.normalize) == (("cls", "mean"), True)
    assert (embedding.output_size, embedding.max_tokens) == (5, 12)
    assert embedding.prompts == {"query": "query: "}
    kv = described.spec.kv
    assert kv["mpool.pooling"] == ["cls", "mean"] and kv["mpool.normalize"] is True
    assert kv["mpool.dense_count"] == 1 and kv["mpool.dense.0.activation"] == "tanh"
    shapes = {tensor.name: tensor.shape for tensor in described.spec.tensors}
    assert shapes["dense.0.weight"] == (5, 12) and shapes["dense.0.bias"] == (5,)
    assert shapes["token_embd.weight"] == (9, 6) and shapes["blk.1.ffn_up.weight"] == (10, 6)
    assert len(shapes) == 5 + 2 * 16 + 2


def test_shards_give_the_same_tensors_as_a_single_file(tmp_path: Path) -> None:
    names = {name: value for name, value in make.bert_tensors().items()}
    one = describe_folder(folder(tmp_path / "one"), key="k", ref="r")
    two = describe_folder(folder(tmp_path / "two", json.loads(CASES["valid/shards"].read_text())["edit"]), key="k",
                          ref="r")
    assert len(two.spec.files) == 3 and len(names) > 30
    assert {t.name: (t.dtype, t.shape) for t in one.spec.tensors} == {t.name: (t.dtype, t.shape)
                                                                     for t in two.spec.tensors}
    assert tensor_bytes(one) == tensor_bytes(two)


def test_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    edit = json.loads(CASES["valid/shards"].read_text())["edit"]
    path = folder(tmp_path, {**edit, "model.safetensors": make.base()["model.safetensors"]})
    assert [os.path.basename(f) for f in describe_folder(path, key="k", ref="r").spec.files][0] == "model.safetensors"


@pytest.mark.parametrize("modes", [["cls"], ["max"], ["mean"], ["mean_sqrt_len_tokens"], ["weightedmean"],
                                   ["lasttoken"], ["lasttoken", "cls"], ["mean", "max", "cls"]])
def test_pooling_in_both_spellings(tmp_path: Path, modes: list[str]) -> None:
    old = {"word_embedding_dimension": 6, **{key: mode in modes for key, mode in {
        "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken"}.items()}}
    new = {"embedding_dimension": 6, "pooling_mode": modes if len(modes) > 1 else modes[0], "include_prompt": False}
    no_dense = [make.MODULES[0], make.MODULES[1]]
    found = {}
    for spelling, config in (("old", old), ("new", new)):
        path = folder(tmp_path / spelling, {"modules.json": no_dense, "1_Pooling/config.json": config})
        embedding = describe_folder(path, key="k", ref="r").embedding
        assert embedding is not None and embedding.output_size == 6 * len(modes) and not embedding.normalize
        assert embedding.include_prompt is (spelling == "old")
        found[spelling] = embedding.pooling
    expected = [mode.replace("mean_sqrt_len_tokens", "mean_sqrt_len") for mode in modes]
    assert list(found["new"]) == expected
    # the boolean keys have no order: sentence-transformers concatenates their outputs in this one
    order = ["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
    assert list(found["old"]) == sorted(expected, key=order.index)


def test_default_pooling_is_mean_and_new_key_takes_precedence(tmp_path: Path) -> None:
    modules = {"modules.json": make.MODULES[:2]}
    for config, wanted in (({"word_embedding_dimension": 6}, ("mean",)), ({}, ("mean",)),
                           ({"pooling_mode_cls_token": False}, ("mean",)),
                           ({"pooling_mode": "max", "pooling_mode_cls_token": True}, ("max",))):
        path = folder(tmp_path / str(len(str(config))), {**modules, "1_Pooling/config.json": config})
        embedding = describe_folder(path, key="k", ref="r").embedding
        assert embedding is not None and embedding.pooling == wanted


def test_encoder_in_a_subfolder(tmp_path: Path) -> None:
    base = make.base()
    own = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json")
    moved: dict[str, Any] = {name: None for name in own} | {f"0_Transformer/{name}": base[name] for name in own}
    modules = [{**make.MODULES[0], "path": "0_Transformer"}, *make.MODULES[1:]]
    path = folder(tmp_path, {**moved, "modules.json": modules})
    described = describe_folder(path, key="k", ref="r")
    assert described.embedding is not None and described.embedding.max_tokens == 12
    assert described.tokenizer is not None and "0_Transformer" in str(described.tokenizer.json_path)


def test_module_folder_may_not_link_outside(tmp_path: Path) -> None:
    path = folder(tmp_path)
    outside = tmp_path / "pooling"
    os.rename(os.path.join(path, "1_Pooling"), outside)
    os.symlink(outside, os.path.join(path, "1_Pooling"))
    with pytest.raises(errors.FormatError, match=r"\[1\]\.path"):
        describe_folder(path, key="k", ref="r")
    os.unlink(os.path.join(path, "1_Pooling"))
    os.rename(outside, os.path.join(path, "pooling"))
    os.symlink("pooling", os.path.join(path, "1_Pooling"))
    assert describe_folder(path, key="k", ref="r").embedding is not None


def test_where_links_of_a_folder_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder, the hub's cache, and folders of the setting; never in another place or a special file."""
    cache, stored = tmp_path / "cache", tmp_path / "stored"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("MPOOL_MODEL_FOLDERS", raising=False)
    path = Path(folder(tmp_path))
    for place in (stored, cache / "models--org--name" / "snapshots" / "main", cache / "models--org--name" / "blobs"):
        place.mkdir(parents=True)
        shutil.copy(path / "config.json", place / "config.json")
        (path / "config.json").unlink()
        (path / "config.json").symlink_to(place / "config.json")
        if place == stored:
            with pytest.raises(errors.FormatError) as caught:
                describe_folder(str(path), key="k", ref="r")
            assert "MPOOL_MODEL_FOLDERS" in (caught.value.hint or "") and "model_folders" in (caught.value.hint or "")
            monkeypatch.setenv("MPOOL_MODEL_FOLDERS", os.pathsep.join(["", str(tmp_path / "none"), str(stored)]))
        assert describe_folder(str(path), key="k", ref="r").embedding is not None
    os.mkfifo(stored / "fifo")
    for target in ("/etc/passwd", cache / "config.json", stored / "fifo", tmp_path / "storedx", stored / ".." / "x"):
        (tmp_path / "x").write_bytes((stored / "config.json").read_bytes())
        shutil.copy(stored / "config.json", tmp_path / "storedx")
        shutil.copy(stored / "config.json", cache / "config.json")
        (path / "config.json").unlink()
        (path / "config.json").symlink_to(target)
        with pytest.raises(errors.FormatError):
            describe_folder(str(path), key="k", ref="r")


def test_a_snapshot_may_not_link_to_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MPOOL_MODEL_FOLDERS", str(tmp_path))
    other, blobs = tmp_path / "models--org--other" / "blobs", tmp_path / "models--org--name" / "blobs"
    place = tmp_path / "models--org--name" / "snapshots" / "main"
    shutil.move(folder(tmp_path / "made"), place)
    for target, allowed in ((blobs, True), (other, False)):
        target.mkdir(parents=True)
        shutil.copy(place / "config.json", target / "config")
        (place / "config.json").unlink()
        (place / "config.json").symlink_to(target / "config")
        if allowed:
            assert describe_folder(str(place), key="k", ref="r").embedding is not None
            continue
        with pytest.raises(errors.FormatError):
            describe_folder(str(place), key="k", ref="r")


def test_a_link_that_changes_after_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path)
    (tmp_path / "secret").write_text("{}")
    checked = files.Folder.path_of

    def changed(self: files.Folder, name: str, **more: Any) -> str:
        found = checked(self, name, **more)
        if name == "config.json" and not os.path.islink(found):
            os.rename(found, found + ".kept")
            os.symlink(tmp_path / "secret", found)
        return found

    monkeypatch.setattr(files.Folder, "path_of", changed)
    with pytest.raises((errors.FormatError, errors.FileError)):
        describe_folder(path, key="k", ref="r")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_to_a_file_that_is_read_later_changes_after_its_check(
        bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A link leads into the folder when it is checked and out of it when the file is opened: a file outside is never
    read."""
    path, outside = tmp_path / "model", tmp_path / "outside"
    shutil.copytree(bert, path)
    os.rename(path / name, path / f"{name}.own")
    os.symlink(f"{name}.own", path / name)
    shutil.copy(path / f"{name}.own", outside)  # the same bytes: only its place is wrong
    stamp, noted = files.stamp, files.note

    def switch(target: str) -> None:
        os.symlink(target, tmp_path / "link")
        os.replace(tmp_path / "link", path / name)

    def note(which: str) -> None:  # between the check of the path and the open: the stamp is that of the other file
        if os.path.basename(which) == name:
            switch(str(outside))
        noted(which)

    monkeypatch.setattr(files, "note", note)
    with mpool.Pool() as pool, pytest.raises((errors.FileError, errors.IntegrityError, errors.FormatError)):
        pool.embed("x", str(path))
    monkeypatch.setattr(files, "note", noted)
    assert stamp(str(path / name)) == stamp(str(outside))
    switch(f"{name}.own")
    with mpool.Pool() as pool:  # another file while the weights or the tokenizer are opened, and not before or after
        entry = pool.get(str(path), "text_embedding")._entry
        switch(str(outside))
        monkeypatch.setattr(type(entry.files), "require_unchanged", lambda *_: None)
        with pytest.raises(errors.IntegrityError):
            entry.tokenizer()
            pool.registry.load(entry.keys.add_cold("auto"), timeout=60.0)


def test_links_of_the_parts_of_a_split_file(tmp_path: Path) -> None:
    """The first part, which the folder was asked for, names the others."""
    (tmp_path / "outside").write_bytes(b"")
    path = tmp_path / "model"
    path.mkdir()
    parts = [str(path / f"m-0000{at}-of-00002.gguf") for at in (1, 2)]
    for target, allowed in (("own", True), ("../outside", False)):
        (path / "own").write_bytes(b"")
        os.symlink(target, parts[1])
        with files.check_links():
            assert files.Folder(str(path)).path_of("m-00001-of-00002.gguf") == parts[0]
            if allowed:
                files.check_siblings(parts[0], parts)
            else:
                with pytest.raises(errors.FormatError):
                    files.check_siblings(parts[0], parts)
        os.unlink(parts[1])


def test_config_as_a_fifo_does_not_hang(tmp_path: Path) -> None:
    path = folder(tmp_path, {"config.json": None})
    os.mkfifo(os.path.join(path, "config.json"))
    with pytest.raises(errors.FormatError, match="FIFO"):
        describe_folder(path, key="k", ref="r")


@pytest.mark.parametrize("place, made, hint", [
    ("a", [], "mpool needs config.json with model.safetensors "),
    ("a", ["model.onnx"], "mpool does not read model.onnx. Use model.safetensors "),
    ("a", ["x/config.json", "y/config.json", "z/notes.txt"], "These folders inside have config.json, .*: x, y$"),
    ("models--org--a--b", ["snapshots/1/config.json"], "This folder is a part of the hub's cache: pass org/a--b$"),
    ("models--org--a", ["x/config.json"], "These folders inside have config.json, .*: x$")])
def test_a_folder_without_a_model(pool: mpool.Pool, tmp_path: Path, place: str, made: list[str], hint: str) -> None:
    """The error says what to pass instead."""
    for name in made:
        (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_bytes(b"")
    (tmp_path / place).mkdir(exist_ok=True)
    message = r": the folder holds no model: it has neither config.json, .* nor a .gguf file"
    with pytest.raises(errors.FormatError, match=message) as caught:
        pool.load(tmp_path / place)
    assert re.match(hint, caught.value.hint or "")


def test_a_file_for_another_engine_is_named(pool: mpool.Pool, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")
    with pytest.raises(errors.FormatError, match="expected 47475546 .*mpool does not read model.onnx. Use "):
        pool.load(tmp_path / "model.onnx")


def test_maximum_input_length(tmp_path: Path) -> None:
    def longest(name: str, **edit: Any) -> int:
        embedding = describe_folder(folder(tmp_path / name, edit), key="k", ref="r").embedding
        assert embedding is not None
        return embedding.max_tokens

    bert, tokenizer = "sentence_bert_config.json", "tokenizer_config.json"
    assert longest("a") == 12
    assert longest("b", **{bert: None}) == 16
    assert longest("c", **{bert: {}, tokenizer: {"model_max_length": 7}}) == 7
    assert longest("d", **{bert: {"max_seq_length": 9}, tokenizer: {"model_max_length": 7}}) == 9
    assert longest("e", **{bert: {"max_seq_length": None}, tokenizer: {"model_max_length": int(1e30)}}) == 16
    assert longest("f", **{bert: {"max_seq_length": 4000}}) == 16
    assert longest("g", **{bert: None, tokenizer: None}) == 16


def test_prompts_similarity_truncation_and_lower_case(tmp_path: Path) -> None:
    path = folder(tmp_path, {
        "config_sentence_transformers.json": {"prompts": {"passage": "p: "}, "default_prompt_name": "query",
                                              "similarity_fn_name": "dot", "truncate_dim": 3},
        "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": True},
        "special_tokens_map.json": {"mask_token": {"content": "[MASK]", "lstrip": True}},
        "config.json": {**make.CONFIG, "matryoshka_dimensions": [4, 2]}})
    described = describe_folder(path, key="k", ref="r")
    embedding = described.embedding
    assert embedding is not None and described.tokenizer is not None
    assert embedding.prompts == {"passage": "p: ", "query": ""} and embedding.default_prompt_name == "query"
    assert (embedding.similarity, embedding.truncate_dim, embedding.dimensions) == ("dot", 3, (2, 4))
    assert described.tokenizer.config["mask_token"] == "[MASK]"
    # with do_lower_case, the folder is refused unless its tokenizer converts texts to lower case
    for number, (normalizer, lowers) in enumerate((
            ({"type": "Lowercase"}, True), (None, False), ({"type": "NFC"}, False),
            ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, True),
            ({"type": "Sequence", "normalizers": 3}, False),
            ({**make.TOKENIZER["normalizer"], "lowercase": False}, False))):
        files = {"sentence_bert_config.json": {"do_lower_case": True},
                 "tokenizer.json": {**make.TOKENIZER, "normalizer": normalizer}}
        if lowers:
            assert describe_folder(folder(tmp_path / str(number), files), key="k", ref="r").tokenizer is not None
        else:
            with pytest.raises(errors.Unsupported, match="do_lower_case"):
                describe_folder(folder(tmp_path / str(number), files), key="k", ref="r")


@pytest.mark.parametrize("name, expected", sorted(sentence_folder.DENSE_ACTIVATIONS.items()))
def test_dense_activations(tmp_path: Path, name: str, expected: str) -> None:
    path = folder(tmp_path, {"2_Dense/config.json": {**make.DENSE, "activation_function": name}})
    assert describe_folder(path, key="k", ref="r").spec.kv["mpool.dense.0.activation"] == expected


def test_several_dense_modules_and_no_bias(tmp_path: Path) -> None:
    modules = [*make.MODULES[:3], {"idx": 3, "name": "3", "path": "3_Dense",
                                   "type": "sentence_transformers.models.Dense"}]
    path = folder(tmp_path, {
        "modules.json": modules, "3_Dense/config.json": {"in_features": 5, "out_features": 4, "bias": False},
        "3_Dense/model.safetensors": {"tensors": {"linear.weight": ("F32", [4, 5])}}})
    described = describe_folder(path, key="k", ref="r")
    shapes = {t.name: t.shape for t in described.spec.tensors}
    assert described.spec.kv["mpool.dense_count"] == 2 and described.spec.kv["mpool.dense.1.activation"] == "tanh"
    assert shapes["dense.1.weight"] == (4, 5) and "dense.1.bias" not in shapes
    assert described.embedding is not None and described.embedding.output_size == 4
    assert len(described.spec.files) == 3


@pytest.mark.parametrize("value", [["task"], "task", {"a": 1}, 7])
@pytest.mark.parametrize("at", range(3))
def test_arguments_of_modules_are_refused(tmp_path: Path, at: int, value: Any) -> None:
    modules = [{**module, "kwargs": value} if n == at else module for n, module in enumerate(make.MODULES[:3])]
    with pytest.raises(errors.FormatError) as caught:
        describe_folder(folder(tmp_path, {"modules.json": modules}), key="k", ref="r")
    assert caught.value.field == f"[{at}].kwargs"


@pytest.mark.parametrize("name, expected", sorted(reading.ACTIVATIONS.items()))
def test_encoder_activations(tmp_path: Path, name: str, expected: str) -> None:
    path = folder(tmp_path, {"config.json": {**make.CONFIG, "hidden_act": name}})
    assert describe_folder(path, key="k", ref="r").spec.kv["mpool.activation"] == expected


DECODER = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64,
           "vocab_size": 9, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
           "rope_theta": 10000.0, "eos_token_id": 2, "bos_token_id": 1}


def decoder_tensors(config: dict[str, Any], bias: bool = False) -> dict[str, tuple[str, list[int]]]:
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    q, k = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    names: dict[str, list[int]] = {"model.embed_tokens.weight": [v, d], "model.norm.weight": [d]}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        names |= {f"{at}.input_layernorm.weight": [d], f"{at}.post_attention_layernorm.weight": [d],
                  f"{at}.self_attn.q_proj.weight": [q, d], f"{at}.self_attn.k_proj.weight": [k, d],
                  f"{at}.self_attn.v_proj.weight": [k, d], f"{at}.self_attn.o_proj.weight": [d, q],
                  f"{at}.mlp.gate_proj.weight": [f, d], f"{at}.mlp.up_proj.weight": [f, d],
                  f"{at}.mlp.down_proj.weight": [d, f]}
        if bias:
            names |= {f"{at}.self_attn.{p}_proj.bias": [q if p == "q" else k] for p in "qkv"}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = [v, d]
    return {name: ("F32", shape) for name, shape in names.items()}


def decoder(tmp_path: Path, tensors: dict[str, Any] | None = None, files: dict[str, Any] | None = None,
            **changes: Any) -> ModelDescription:
    config = {**DECODER, **changes}
    path = str(tmp_path / "decoder")
    bias = config["model_type"] == "qwen2"
    make.write_folder(path, {"config.json": {k: v for k, v in config.items() if v != "absent"},
                             "tokenizer.json": make.TOKENIZER,
                             "model.safetensors": {"tensors": tensors or decoder_tensors(config, bias)},
                             **(files or {})})
    return describe_folder(path, key="k", ref="r")


def test_decoder_hyper_parameters(tmp_path: Path) -> None:
    described = decoder(tmp_path)
    assert described.capability == "text_to_text" and described.embedding is None
    assert dict(described.spec.kv) == {
        "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 8,
        "llama.feed_forward_length": 12, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 2, "llama.vocab_size": 9, "mpool.rope_neox": True, "mpool.activation": "silu"}
    assert {t.name for t in described.spec.tensors} == {
        "token_embd.weight", "output_norm.weight", "output.weight", *(f"blk.0.{n}.weight" for n in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"))}
    assert described.generation is not None
    assert (described.generation.eog_token_ids, described.generation.bos_token_id) == ((2,), 1)


def test_explicit_head_size(tmp_path: Path) -> None:
    kv = decoder(tmp_path, head_dim=6).spec.kv
    assert (kv["llama.attention.key_length"], kv["llama.attention.value_length"]) == (6, 6)
    assert kv["llama.rope.dimension_count"] == 6


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


@pytest.mark.parametrize("changes, wanted", [
    ({"rope_scaling": LLAMA3}, {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_context_length": 32}),
    ({"rope_theta": "absent", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, {"type": "llama3", "factor": 8.0,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 32}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"type": "linear", "factor": 2.0}),
    ({"rope_scaling": None}, {}), ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
])
def test_rope(tmp_path: Path, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    kv = decoder(tmp_path, **changes).spec.kv
    assert {k.removeprefix("llama.rope.scaling."): v for k, v in kv.items() if ".rope.scaling." in k} == wanted
    assert kv["llama.rope.freq_base"] == (5e5 if "rope_parameters" in changes else 10000.0)


QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize("changes, windowed", [
    ({}, []), ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, []),
    ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, [1]),
    ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, []),
    ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"]}, []),
    ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"]}, [1]),
    ({"layer_types": ["sliding_attention"]}, None), ({"layer_types": ["linear_attention"]}, None),
    ({"layer_types": ["full_attention"] * 2}, None),
])
def test_sliding_window(tmp_path: Path, changes: dict[str, Any], windowed: list[int] | None) -> None:
    if windowed is not None:
        described = decoder(tmp_path, **QWEN, **changes)
        assert described.spec.kv.get("mpool.window_layers", []) == windowed
        assert described.spec.kv.get("qwen2.attention.sliding_window", 16) == 16
        assert described.spec.architecture == "qwen2" and described.spec.kv["mpool.rope_neox"] is True
        assert {f"blk.0.attn_{x}.bias" for x in "qkv"} <= {t.name for t in described.spec.tensors}
    else:
        with pytest.raises((errors.Unsupported, errors.FormatError)):
            decoder(tmp_path, **QWEN, **changes)


def test_output_layer_tied_or_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def names(path: str, tensors: dict[str, Any], tied: bool) -> set[str]:
        return {t.name for t in decoder(tmp_path / path, tensors, tie_word_embeddings=tied).spec.tensors}

    tied = decoder_tensors({**DECODER, "tie_word_embeddings": True})
    both = decoder_tensors(DECODER)
    assert "output.weight" not in names("a", tied, True)
    assert "output.weight" in names("b", both, False)
    with pytest.raises(errors.FormatError, match="lm_head.weight missing"):
        names("c", tied, False)
    # the configuration ties the layers, but the file has two different tensors: transformers warns and uses both
    assert "output.weight" in names("d", both, True) and "differ" in caplog.text
    # only the output layer is stored
    swapped = {("lm_head.weight" if name == "model.embed_tokens.weight" else name): v for name, v in tied.items()}
    assert {"token_embd.weight"} == names("e", swapped, True) & {"token_embd.weight", "output.weight"}
    # both are stored and equal: the output layer is omitted
    described = decoder(tmp_path / "f", both, tie_word_embeddings=False)
    path = described.spec.files[0]
    by_name = {t.name: t for t in described.spec.tensors}
    with open(path, "r+b") as file:
        file.seek(by_name["token_embd.weight"].offset)
        data = file.read(by_name["token_embd.weight"].nbytes)
        file.seek(by_name["output.weight"].offset)
        file.write(data)
    config = Path(path).with_name("config.json")
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    again = describe_folder(os.path.dirname(path), key="k", ref="r")
    assert "output.weight" not in {t.name for t in again.spec.tensors}


def test_generation_settings_and_templates(tmp_path: Path) -> None:
    described = decoder(tmp_path / "a", files={
        "generation_config.json": {"eos_token_id": [3, 4], "bos_token_id": 0, "do_sample": True, "temperature": 0.7,
                                   "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        "tokenizer_config.json": {"add_bos_token": True, "chat_template": "old", "eos_token": {"content": "</s>"}},
        "chat_template.jinja": "{{ messages }}"})
    generation = described.generation
    assert generation is not None and described.tokenizer is not None
    assert generation.eog_token_ids == (2, 3, 4) and generation.bos_token_id == 0 and generation.add_bos
    assert generation.defaults == {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert described.chat_template == "{{ messages }}"
    assert described.tokenizer.config["eos_token"] == "</s>" and "chat_template" not in described.tokenizer.config
    assert described.tokenizer.config["eos_token_id"] == [2, 3, 4]
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    both = decoder(tmp_path / "b", files={"tokenizer_config.json": {"chat_template": named}}).chat_template
    for tools, text in (([{}], "t"), (None, "d")):  # transformers renders chats with tools with the former
        assert both is not None and ChatTemplate(both).render([{"role": "user"}], tools=tools) == text
    files = {"chat_template.jinja": "d\n", "additional_chat_templates/tool_use.jinja": "t\n"}
    assert decoder(tmp_path / "h", files=files).chat_template == both
    assert decoder(tmp_path / "c", files={"tokenizer_config.json": {"chat_template": named[:1]}}).chat_template == "t"
    assert decoder(tmp_path / "d").chat_template is None
    with pytest.raises(errors.LimitError, match="chat_template"):
        decoder(tmp_path / "e", files={"tokenizer_config.json": {"chat_template": "x" * (1 << 21)}})
    with pytest.raises(errors.FormatError, match="chat_template"):
        decoder(tmp_path / "f", files={"tokenizer_config.json": {"chat_template": 3}})
    with pytest.raises(errors.FormatError, match="eos_token_id"):
        decoder(tmp_path / "g", files={"generation_config.json": {"eos_token_id": 100}})


def test_modules_make_an_embedding_model_of_a_decoder(tmp_path: Path) -> None:
    """``modules.json`` makes an embedding model of a decoder; without it, the decoder generates text."""
    pooling = {**make.POOLING, "word_embedding_dimension": 8}
    found = decoder(tmp_path / "a", files={"modules.json": make.MODULES[:2], "1_Pooling/config.json": pooling})
    assert found.capability == "text_embedding" and found.spec.architecture == "llama_embedding"
    assert found.spec.kv["llama_embedding.attention.causal"] is True and found.embedding.output_size == 16
    assert not any(tensor.name == "output.weight" for tensor in found.spec.tensors)
    assert decoder(tmp_path / "b").capability == "text_to_text"


def test_end_tokens_of_harmony_are_those_with_ids_of_the_vocabulary() -> None:
    """The keys of ``added_tokens_decoder`` are ids as text. Other keys, and ids of no row, have no effect."""
    keys = {"5": 5, "99": 99, "100": None, "1000000000": None, "10000000005": None, "00000000012": None, "-1": None,
            "x": None, "9" * 5000: None}
    for key, token in keys.items():
        added = {key: {"content": "<|return|>"}, "7": {"content": "<|end|>"}, "8": "<|call|>"}
        fields = Fields.of({"added_tokens_decoder": added}, file="tokenizer_config.json")
        assert hf_parts._harmony_end_ids(fields, 100) == ({token} if token is not None else set()), key
    assert hf_parts._harmony_end_ids(Fields.of({}, file="tokenizer_config.json"), 100) == set()


def test_describe_sets_key_and_ref(tmp_path: Path) -> None:
    path = folder(tmp_path)
    described = describe(path)
    assert described.key == described.ref == path and described.est_memory_allocation_mb is None
    assert describe(Path(path), key="mine").key == "mine"
    with pytest.raises(errors.FormatError) as caught:
        os.unlink(os.path.join(path, "tokenizer.json"))
        describe(path, key="mine")
    assert caught.value.key == "mine"


def test_real_minilm() -> None:
    """The default embedding model, if it is in the cache; MPOOL_REQUIRE_REAL=1 allows the download."""
    required = os.environ.get("MPOOL_REQUIRE_REAL") == "1"
    try:
        described = describe("all-MiniLM-L6-v2", offline=not required)
    except errors.OfflineError as error:
        pytest.skip(str(error))
    embedding = described.embedding
    assert embedding is not None and len(described.spec.tensors) == 5 + 6 * 16
    assert (embedding.max_tokens, embedding.output_size, embedding.pooling, embedding.normalize) == (
        256, 384, ("mean",), True)
    assert (described.key, described.license) == ("all-MiniLM-L6-v2", "apache-2.0")
    assert sum(t.nbytes for t in described.spec.tensors) == 4 * (22_713_216 - 384 * 385)
