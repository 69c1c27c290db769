"""The core's GGUF parser from Python: the corpus, agreement with the gguf package, and cases that need large files."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

core = pytest.importorskip("mpool._core", reason="mpool's C core is not built")

from mpool import errors  # noqa: E402

CORPUS = Path(__file__).resolve().parents[2] / "corpus"
ROWS: list[dict[str, Any]] = json.loads((CORPUS / "gguf" / "manifest.json").read_text())
BY_NAME = {cls.name: cls for cls in vars(errors).values()
           if isinstance(cls, type) and issubclass(cls, errors.MpoolError) and "name" in vars(cls)}
GOOD = [row["file"] for row in ROWS if row["status"] == "OK"]


def load_maker() -> ModuleType:
    """Import the script that generates the corpus."""
    spec = importlib.util.spec_from_file_location("mpool_make_gguf", CORPUS / "make_gguf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


maker = load_maker()


def check(path: Path, status: str, field: str) -> None:
    """Assert that a file is accepted (``OK``) or raises the error of the status, naming the field."""
    if status == "OK":
        core.read_gguf(str(path))
        return
    with pytest.raises(BY_NAME[status]) as caught:
        core.read_gguf(str(path))
    error = caught.value
    assert type(error) is BY_NAME[status], error
    if status in ("FORMAT", "LIMIT"):
        assert field in str(error)
    if status == "FORMAT":
        assert error.field == field
        assert error.file and error.got and error.allowed
        assert path.parent.name in error.file


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_corpus(row: dict[str, Any]) -> None:
    path = CORPUS / "gguf" / row["file"]
    if row["status"] == "ANY":  # found by fuzzing: the file may be accepted or refused, but must not crash
        try:
            core.read_gguf(str(path))
        except errors.MpoolError:
            pass
        return
    check(path, row["status"], row["field"])


def test_corpus_matches_the_generator() -> None:
    for name, data in maker.build(maker.OUT).items():
        assert (maker.OUT / name).read_bytes() == data, f"run tests/corpus/make_gguf.py: {name} differs"


def test_corpus_has_every_case() -> None:
    refused = {row["case"] for row in ROWS if row["status"] not in ("OK", "ANY")}
    assert set(range(1, 32)) - {10, 30} <= refused  # 10 needs a large file, and files of case 30 are read


def test_large_files(tmp_path: Path) -> None:
    seen = set()
    for path, status, field in maker.large_cases(tmp_path):
        check(path, status, field)
        seen.add(path.stem[:6])
        path.unlink()
    assert {"case08", "case10", "case13", "case14", "case15"} <= seen


def test_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path / "fifo.gguf", tmp_path, Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(errors.FormatError) as caught:
            core.read_gguf(str(path))
        assert "regular file" in str(caught.value)
    with pytest.raises(errors.FileError):
        core.read_gguf(str(tmp_path / "absent.gguf"))


def plain(value: Any) -> Any:
    """Convert a value of the gguf package to built-in Python types."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.item() if hasattr(value, "item") else value


#: Files that the package's reader does not support: an empty array, and names and strings that are not UTF-8.
ODD = ("every_value_type", "case17_token_bytes")


@pytest.mark.parametrize("name", [name for name in GOOD if not any(odd in name for odd in ODD)])
def test_same_as_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the reference is the gguf package")
    path = CORPUS / "gguf" / name
    got = core.read_gguf(str(path))
    names = {}
    for index, file in enumerate(got.files):
        reader = gguf.GGUFReader(file)
        if index == 0:
            want = {key: plain(field.contents()) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
            assert got.kv == want
            assert got.architecture == want.get("general.architecture", "")
        for tensor in reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            names[tensor.name] = (tensor.tensor_type.name, shape, index, tensor.data_offset, tensor.n_bytes)
    assert {name: tuple(rest) for name, *rest in got.tensors} == names


def test_values() -> None:
    kv = core.read_gguf(str(CORPUS / "gguf" / "valid" / "every_value_type.gguf")).kv
    want = {"u8": [0, 255], "i8": [-128, 127], "u16": [0, 65535], "i16": [-32768, 32767], "u32": [0, 2**32 - 1],
            "i32": [-2**31, 2**31 - 1], "f32": [0.5, -2.0], "bool": [False, True], "string": ["", "häl"],
            "u64": [0, 2**63 - 1], "i64": [-2**63, 2**63 - 1], "f64": [1e300, -0.25]}
    for name, values in want.items():
        assert kv[f"one.{name}"] == values[1] and type(kv[f"one.{name}"]) is type(values[1])
        assert kv[f"many.{name}"] == values and [type(one) for one in kv[f"many.{name}"]] == [type(values[0])] * 2
        assert kv[f"none.{name}"] == []


def test_tokens_may_be_arbitrary_bytes() -> None:
    kv = core.read_gguf(str(CORPUS / "gguf" / "valid" / "case17_token_bytes.gguf")).kv
    assert kv["tokenizer.ggml.tokens"] == [b"\xff\xfe", b"a\x00b", "é".encode(), b""]


def test_split_files_in_order() -> None:
    got = core.read_gguf(str(CORPUS / "gguf" / "valid" / "split" / "pair-00001-of-00002.gguf"))
    assert [Path(file).name for file in got.files] == ["pair-00001-of-00002.gguf", "pair-00002-of-00002.gguf"]
    assert [(name, file) for name, _, _, file, _, _ in got.tensors] == [("a.weight", 0), ("b.weight", 1),
                                                                        ("c.weight", 1)]
