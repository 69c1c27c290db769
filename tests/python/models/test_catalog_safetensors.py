"""The reader of safetensors headers: the corpus, links and file types, and agreement with the safetensors package."""

import json
import re
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpool import errors
from mpool.models import json_strict
from mpool.models.files import Folder
from mpool.models.formats import safetensors_header
from mpool.models.formats.safetensors_header import DTYPE_BITS, read_header

CORPUS = Path(__file__).resolve().parent.parent.parent / "corpus"
sys.path.insert(0, str(CORPUS))
import make_safetensors as make  # noqa: E402

EXPECTED = json.loads((CORPUS / "safetensors" / "expected.json").read_text())


def refused(path: object) -> errors.FormatError:
    """Assert that a header is refused, and return the error."""
    with pytest.raises(errors.FormatError) as caught:
        read_header(str(path))
    assert caught.value.file == str(path) and caught.value.allowed is not None
    return caught.value


def test_corpus_matches_the_generator(tmp_path: Path) -> None:
    make.write_all(str(tmp_path))
    for part in ("safetensors", "folder"):
        made = {str(p.relative_to(tmp_path)): p.read_bytes() for p in (tmp_path / part).rglob("*") if p.is_file()}
        kept = {str(p.relative_to(CORPUS)): p.read_bytes() for p in (CORPUS / part).rglob("*")
                if p.is_file() and "regress" not in p.parts}
        assert made.keys() == kept.keys()
        assert [name for name in made if made[name] != kept[name]] == []


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_sizes_of_dtypes_are_those_in_their_names(tmp_path: Path, dtype: str) -> None:
    """Eight values: as many bytes as a value has bits. One byte more or less is refused."""
    size = 8 if dtype == "BOOL" else int(re.match(r"[A-Z]+(\d+)", dtype)[1])
    path = tmp_path / "model.safetensors"
    for count in (size, size - 1, size + 1):
        header = json.dumps({"t": {"dtype": dtype, "shape": [8], "data_offsets": [0, count]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(count))
        if count == size:
            assert [(t.dtype, t.nbytes) for t in read_header(str(path)).tensors] == [(dtype, size)]
        else:
            assert refused(path).field == "t.data_offsets"


def test_every_case_has_a_file() -> None:
    cases = {name.partition("_")[0] for name in EXPECTED}
    assert {f"case{n}" for n in range(43, 52)} <= cases
    assert {p.name for p in (CORPUS / "safetensors" / "reject").iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_rejected(name: str) -> None:
    path = CORPUS / "safetensors" / "reject" / name
    tracemalloc.start()
    start = time.process_time()
    try:
        error = refused(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(error).__name__ == EXPECTED[name]["error"]
    assert error.field == EXPECTED[name]["field"]
    assert error.offset is not None and 0 <= error.offset <= path.stat().st_size
    assert peak < 4 << 20 and time.process_time() - start < 10.0


@pytest.mark.parametrize("path", sorted((CORPUS / "safetensors" / "valid").iterdir()), ids=lambda p: p.stem)
def test_accepted(path: Path) -> None:
    data = path.read_bytes()
    table = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    metadata = table.pop("__metadata__", {})
    found = read_header(str(path), 3)
    assert found.metadata == metadata
    start = 8 + struct.unpack("<Q", data[:8])[0]
    assert {t.name: (t.dtype, list(t.shape), t.offset - start, t.nbytes, t.file) for t in found.tensors} == {
        name: (e["dtype"], e["shape"], e["data_offsets"][0], e["data_offsets"][1] - e["data_offsets"][0], 3)
        for name, e in table.items()}
    assert [t.offset for t in found.tensors] == sorted(t.offset for t in found.tensors)


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    np = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.standard_normal(tuple(rng.integers(1, 5, size=int(rng.integers(0, 4))))).astype(dtype)
              for i, dtype in enumerate(["float32", "float16", "float64", "int64", "int8", "uint8", "int32"] * 3)}
    path = str(tmp_path / "a.safetensors")
    save_file(arrays, path, metadata={"k": "v"})
    found = read_header(path)
    data = Path(path).read_bytes()
    assert found.metadata == {"k": "v"} and {t.name for t in found.tensors} == set(arrays)
    for tensor in found.tensors:
        assert data[tensor.offset:tensor.offset + tensor.nbytes] == arrays[tensor.name].tobytes()
        assert tensor.shape == arrays[tensor.name].shape
    # the package refuses every file that mpool refuses, except for properties that the package does not check
    lenient = []
    for name in EXPECTED:
        try:
            with safetensors.safe_open(str(CORPUS / "safetensors" / "reject" / name), "np"):
                lenient.append(name)
        except Exception:
            continue
    unchecked = ("case45_", "case46_", "case47_", "case49_too_many", "tensor_")
    assert [name for name in lenient if not name.startswith(unchecked)] == []


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_corrupted_files_are_refused_or_consistent(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(make.build(make.TWO, metadata={"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        header = read_header(str(path))
    except errors.FormatError:
        return
    for tensor in header.tensors:
        bits = DTYPE_BITS[tensor.dtype]
        for size in tensor.shape:
            bits *= size
        assert tensor.nbytes * 8 == bits and tensor.offset + tensor.nbytes <= path.stat().st_size


def test_huge_sparse_file_is_not_read(tmp_path: Path) -> None:
    size = 1 << 40
    path = tmp_path / "huge.safetensors"
    head = make.pack({"a": make.entry("U8", [size], (0, size))})
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    tracemalloc.start()
    found = read_header(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tensors[0].nbytes == size and peak < 1 << 20
    with open(path, "r+b") as file:
        file.truncate(len(head) + size - 1)
    assert refused(path).field == "data_offsets"
    # a header length below the size of the sparse file, but above the maximum
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 1 << 39))
    assert refused(path).field == "header length"


def test_sparse_header_of_maximum_length(tmp_path: Path) -> None:
    path = tmp_path / "zeros.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(8 + 100_000_000)
    tracemalloc.start()
    error = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.field == "header" and peak < 1 << 20


@pytest.mark.parametrize("metadata", [False, True])
def test_number_of_tensors_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bool) -> None:
    """The limit is that of GGUF files. A header of 100 MB could list 2,000,000 tensors."""
    assert safetensors_header.MAX_TENSORS == 65536
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 100)
    for count in (100, 101):
        table: dict[str, Any] = {f"t{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                                 for at in range(count)}
        if metadata:
            table["__metadata__"] = {"format": "pt"}
        text = json.dumps(table).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        if count == 100:
            assert len(read_header(str(path)).tensors) == 100
        else:
            with pytest.raises(errors.LimitError, match=r"model\.safetensors: 101 tensors, the limit is 100"):
                read_header(str(path))


def test_values_of_a_header_are_limited(tmp_path: Path) -> None:
    """The parser stops before it holds more values than 65,536 tensors of 8 dimensions have."""
    text = ('{"__metadata__":{' + ",".join(f'"{at}":""' for at in range(1_000_000)) + "}}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(errors.FormatError, match="more than 983040 values"):
        read_header(str(path))


@pytest.mark.parametrize(("name", "most"), [
    ("config.json", 200_000), ("modules.json", 200_000), ("config_sentence_transformers.json", 200_000),
    ("tokenizer_config.json", 600_000), ("model.safetensors.index.json", 600_000), ("tokenizer.json", 4_000_000)])
def test_values_of_json_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                          most: int) -> None:
    """A load reads some of these files six times: 900,000 prompts took 8 s."""
    seen: list[int] = []
    real = json_strict.loads
    monkeypatch.setattr(json_strict, "loads", lambda data, **more: [seen.append(more.pop("max_values")),
                                                                    real(data, max_values=3, **more)][1])
    (tmp_path / name).write_text('{"a": [1, 2]}')
    with pytest.raises(errors.FormatError, match=f"{name} at byte .*more than 3 values, allowed: at most 3 values"):
        Folder(str(tmp_path)).fields(name)
    assert seen == [most]


def test_labels_of_published_classifiers_fit(tmp_path: Path) -> None:
    labels = {str(at): f"label {at}" for at in range(30_000)}
    config = {"id2label": labels, "label2id": {text: int(at) for at, text in labels.items()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Folder(str(tmp_path)).json("config.json") == config
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict.fromkeys(map(str, range(200_000)), "")}))
    with pytest.raises(errors.FormatError, match="config.json at byte .*more than 200000 values"):
        Folder(str(tmp_path)).json("config.json")
