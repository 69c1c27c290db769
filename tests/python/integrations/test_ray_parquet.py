"""Embedding of Parquet files by Ray, without a cluster: batches, targets of other calls."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

import mpool  # noqa: E402
from mpool.integrations.ray import _share  # noqa: E402
from mpool.integrations.ray.parquet import EmbedBatches, Embedded, embed_parquet  # noqa: E402

from adapterfiles import two_adapters  # noqa: E402
from rerankers import make_classifier  # noqa: E402


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, Ray does not report a number of CPUs: use 2."""
    monkeypatch.setattr(_share, "_cpus_here", lambda: 2)


def test_batches(bert: Path) -> None:
    """The vectors are a column of fixed-size lists. Rows, columns and their order are kept."""
    made = EmbedBatches("body", "vector", str(bert), memory_mb=200, compute="float32", weights="mapped",
                        on_error="null")
    assert made.pool.config.weights == "mapped"
    table = pa.table({"id": [1, 2, 3], "body": ["A cat.", None, "A dog."], "vector": [0, 0, 0]})
    found = made(table)
    assert found.schema.names == ["id", "body", "vector"]
    assert found.schema.field("vector").type == pa.list_(pa.float32(), 32)
    rows = found["vector"].to_pylist()
    expected = mpool.embed(["A cat.", "A dog."], str(bert), compute="float32")
    assert np.array_equal(np.float32([rows[0], rows[2]]), expected)
    assert rows[1] is None and len(made(table.slice(0, 0))) == 0
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of id, got 'body'") as caught:
        made(table.select(["id"]))
    assert (caught.value.param, caught.value.hint) == ("column", "These are the columns of the batch")


VECTORS = {"sparse": pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))]),
           "tokens": pa.list_(pa.list_(pa.float32(), 48))}
VECTORS["all"] = pa.struct([("dense", pa.list_(pa.float32(), 48)), *((name, VECTORS[name]) for name in VECTORS)])


@pytest.mark.parametrize("vectors", VECTORS)
def test_batches_of_other_vectors(m3: Path, vectors: str) -> None:
    """Sparse vectors are structs of two lists, token vectors are lists of fixed-size lists: the library's."""
    made = EmbedBatches("body", "found", str(m3), memory_mb=200, compute="float32", vectors=vectors)
    texts = ["w1 w2, w3.", "w7", "w5 w5 w6!"]
    table = made(pa.table({"body": texts, "found": [0, 0, 0]}))
    assert table.schema.names == ["body", "found"] and table.schema.field("found").type == VECTORS[vectors]
    found = table["found"].to_pylist()
    if vectors == "sparse":
        wanted = [{"indices": ids.tolist(), "values": values.tolist()}
                  for ids, values in mpool.embed_sparse(texts, str(m3), compute="float32")]
    elif vectors == "tokens":
        wanted = [rows.tolist() for rows in mpool.embed_tokens(texts, str(m3), compute="float32")]
    else:
        every = mpool.embed_all(texts, str(m3), compute="float32")
        wanted = [{"dense": dense.tolist(), "sparse": {"indices": ids.tolist(), "values": values.tolist()},
                   "tokens": rows.tolist()}
                  for dense, (ids, values), rows in zip(every.dense, every.sparse, every.tokens)]
    assert found == wanted
    empty = made(table.slice(0, 0))
    assert len(empty) == 0 and empty.schema == table.schema
    with pytest.raises(mpool.InvalidArgument, match=r"`inputs\[1\]` must be a str"):
        made(pa.table({"body": ["w1", None]}))


LABELS = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))
SPANS = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32()), ("start", pa.int32()), ("end", pa.int32()),
                            ("word", pa.string())]))


def rows_of_labels(found: Any) -> list[Any]:
    """Return a column of labels or spans for results of the library; scores are rounded to float32."""
    names = ("label", "score", "start", "end", "word")
    return [[{name: float(np.float32(getattr(one, name))) if name == "score" else getattr(one, name)
              for name in names if hasattr(one, name)} for one in text] for text in found]


@pytest.mark.parametrize("zero_shot", [False, True])
def test_batches_of_labels(tmp_path: Path, zero_shot: bool) -> None:
    model = make_classifier(tmp_path / "nli", "bert", ("contradiction", "neutral", "entailment"))
    options: dict[str, Any] = dict(labels=["food", "money"]) if zero_shot else dict(top_k=2, function_to_apply="none")
    made = EmbedBatches("body", "found", str(model), memory_mb=200, vectors="labels", **options)
    texts = ["w1 The fox.", "", "over w2 dogs"]
    table = made(pa.table({"body": texts}))
    assert table.schema.field("found").type == LABELS
    assert table["found"].to_pylist() == rows_of_labels(mpool.classify(texts, model, **options))
    assert [len(row) for row in table["found"].to_pylist()] == [2, 2, 2]
    empty = made(table.slice(0, 0))
    assert len(empty) == 0 and empty.schema == table.schema


def test_batches_of_spans(tagger: Path) -> None:
    """With a stride, a batch may have more windows than rows."""
    options: dict[str, Any] = dict(aggregation="simple", stride=2, ignore_labels=["X"])
    made = EmbedBatches("body", "found", str(tagger), memory_mb=200, vectors="spans", **options)
    texts = ["w1 w2. " * 100, "", "The fox. \U0001f600 dogs"]
    table = made(pa.table({"body": texts}))
    assert table.schema.field("found").type == SPANS
    found = table["found"].to_pylist()
    assert found == rows_of_labels(mpool.classify_tokens(texts, tagger, **options))
    assert len(found[0]) > 50 and found[1] == [] and found[2][-1]["end"] == len(texts[2])
    empty = made(table.slice(0, 0))
    assert len(empty) == 0 and empty.schema == table.schema


def test_files_of_spans(tagger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the options of the labels, so that the same call continues, and another one is refused."""
    fake_run(monkeypatch)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["The fox", "w1 dogs"] * 90}), tmp_path / "in" / "a.parquet")
    same: dict[str, Any] = dict(model=str(tagger), memory_mb=200, progress=False, vectors="spans")
    assert embed_parquet(tmp_path / "in", tmp_path / "out", **same) == Embedded(1, 180, 0)
    assert embed_parquet(tmp_path / "in", tmp_path / "out", **same) == Embedded(0, 0, 1)
    for option, value, words in (("ignore_labels", ("O", "X"), r"its ignore_labels is \['O'\], not \['O', 'X'\]"),
                                 ("aggregation", "first", "its aggregation is 'none', not 'first'")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            embed_parquet(tmp_path / "in", tmp_path / "out", **same, **{option: value})


def test_batches_of_an_adapter(bert: Path, tmp_path: Path) -> None:
    """The actor loads the adapters; the option selects one, and the record has the hash of its files."""
    adapters, texts = two_adapters(bert, tmp_path), ["A cat.", "A dog."]
    with mpool.Pool() as pool:
        pool.load(bert, adapters=adapters)
        expected = {name: pool.embed(texts, bert, adapter=name).tolist() for name in (None, "one", "two")}
    assert len({str(rows) for rows in expected.values()}) == 3
    hashes = []
    for name, rows in expected.items():
        made = EmbedBatches("body", model=str(bert), memory_mb=200, adapters=adapters, adapter=name)
        table = made(pa.table({"body": texts}))
        assert table["embedding"].to_pylist() == rows
        record = json.loads(table.schema.metadata[b"mpool.embedding"])
        assert record["options"]["adapter"] == name
        hashes.append(record["adapter"])
    assert hashes[0] is None and hashes[1].startswith("sha256:") and len(set(hashes)) == 3


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors", "config.json"])
def test_files_that_change_after_the_load_are_refused(bert: Path, tmp_path: Path, changed: str) -> None:
    """A record never has the hash of other files than those that computed the vectors. A new actor reads the files."""
    adapters, model = two_adapters(bert, tmp_path), shutil.copytree(bert, tmp_path / "model")
    given: dict[str, Any] = dict(model=str(model), memory_mb=200, adapters=adapters, adapter="one")
    batch = pa.table({"text": ["A cat.", "A dog."]})
    before, made = EmbedBatches(**given)(batch), EmbedBatches(**given)
    place = (model if changed == "config.json" else adapters["one"]) / changed
    new = tmp_path / "new"
    if changed == "adapter_model.safetensors":
        shutil.copy(adapters["two"] / changed, new)
    else:
        config = json.loads(place.read_text())
        config["lora_alpha" if "adapter" in changed else "layer_norm_eps"] = 0.5
        new.write_text(json.dumps(config))
    os.replace(new, place)
    for _ in range(2):
        with pytest.raises(mpool.errors.IntegrityError, match="changed"):
            made(batch)
    after = EmbedBatches(**given)(batch)
    assert after["embedding"].to_pylist() != before["embedding"].to_pylist()
    records = [json.loads(one.schema.metadata[b"mpool.embedding"]) for one in (before, after)]
    differing = "revision" if changed == "config.json" else "adapter"
    assert records[0][differing] != records[1][differing]


def test_files_of_an_adapter(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target with vectors of another adapter, or of other files of the same name, is refused."""
    written = fake_run(monkeypatch)
    adapters, source, target = two_adapters(bert, tmp_path), tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name in "ab":
        pq.write_table(pa.table({"text": ["A cat.", "A dog."]}), source / f"{name}.parquet")
    same: dict[str, Any] = dict(model=str(bert), memory_mb=200, progress=False, adapters=adapters, adapter="one")
    for wrong, words in (({"adapter": "three"}, "`adapter` must be one, two or None, got 'three'"),
                         ({"adapter": 3}, "`adapter` must be a name, or None"),
                         ({"adapters": None}, "`adapter` must be None: the model has no adapters, got 'one'"),
                         ({"adapters": {"one": str(tmp_path / "missing")}}, "no such file or folder"),
                         ({"adapters": "one"}, "`adapters` must be a dict from name to path")):
        with pytest.raises(mpool.MpoolError, match=words):
            embed_parquet(source, target, **{**same, **wrong})
    assert not target.exists() and not written
    monkeypatch.chdir(tmp_path)  # a relative path, which an actor may read in another folder
    assert embed_parquet(source, target, **{**same, "adapters": {"one": "one"}}) == Embedded(2, 4, 0)
    with mpool.Pool() as pool:
        pool.load(bert, adapters=adapters)
        assert pq.read_table(target / "a.parquet")["embedding"].to_pylist() == \
            pool.embed(["A cat.", "A dog."], bert, adapter="one").tolist()
    os.unlink(target / "b.parquet")
    assert embed_parquet(source, target, **same) == Embedded(1, 2, 1)
    for change, words in (({"adapter": "two"}, "its adapter is 'one', not 'two'"),
                          ({"adapter": None}, "its adapter is 'one', not None"),
                          ({"adapters": {"one": adapters["two"]}}, "its hash of the adapter is 'sha256:")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            embed_parquet(source, target, **{**same, **change})


def test_options_of_other_vectors() -> None:
    for vectors, options, words in (("sparse", {"normalize": True}, "`normalize` is not an option"),
                                    ("tokens", {"on_error": "null"}, "`on_error` is not an option"),
                                    ("all", {"max_active": 3}, "`max_active` is not an option"),
                                    ("labels", {"task": "query"}, "`task` is not an option"),
                                    ("spans", {"top_k": 3}, "`top_k` is not an option"),
                                    ("both", {}, "`vectors` must be one of dense, sparse, tokens, all, labels, spans, "
                                                 "got 'both'")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            EmbedBatches(vectors=vectors, **options)


@pytest.mark.parametrize(("given", "param"), [
    ({"dimensions": 0}, "dimensions"), ({"compute": "int4"}, "compute"), ({"timeout": -1}, "timeout"),
    ({"vectors": "labels", "labels": []}, "labels"), ({"vectors": "spans", "stride": -1}, "stride"),
    ({"prompt": "\ud800"}, "prompt"), ({"adapters": {"a": "/none.gguf"}}, None)])
def test_values_before_the_model(given: dict[str, Any], param: str | None, tmp_path: Path) -> None:
    """Values that no model allows are refused before Ray is started and the model is read."""
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    for call in (lambda: embed_parquet(tmp_path, tmp_path / "out", model="org/none", **given),
                 lambda: EmbedBatches(model="org/none", memory_mb=200, **given)):
        with pytest.raises(mpool.errors.FileError if param is None else mpool.InvalidArgument) as caught:
            call()
        assert caught.value.param == param and not (tmp_path / "out").exists()


@pytest.mark.parametrize("vectors", VECTORS)
def test_files_of_other_vectors(m3: Path, vectors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have the column and its record; a target with another kind of vectors is refused."""
    fake_run(monkeypatch)
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    texts = [f"w{number} w{number % 7}" for number in range(150)]
    pq.write_table(pa.table({"text": texts}), source / "a.parquet")
    pq.write_table(pa.table({"text": texts[:0]}), source / "b.parquet")
    same: dict[str, Any] = dict(model=str(m3), memory_mb=200, progress=False, vectors=vectors)
    assert embed_parquet(source, target, **same) == Embedded(2, 150, 0)
    table = pq.read_table(target / "a.parquet")
    assert table.schema.field("embedding").type == VECTORS[vectors] and len(table) == 150
    assert pq.read_schema(target / "b.parquet").field("embedding").type == VECTORS[vectors]
    record = json.loads(table.schema.metadata[b"mpool.embedding"])
    assert record["vectors"] == vectors and "precision" not in record["options"]
    assert embed_parquet(source, target, **same) == Embedded(0, 0, 2)
    for other in {"dense", "sparse", "tokens", "all"} - {vectors}:
        with pytest.raises(mpool.InvalidArgument, match=f"its vectors are {vectors}, not {other}"):
            embed_parquet(source, target, **{**same, "vectors": other})
    with pytest.raises(mpool.InvalidArgument, match="its task is None, not 'query'"):
        embed_parquet(source, target, **same, task="query")


def test_folders_are_checked_first(tmp_path: Path) -> None:
    """Folders, columns and options are checked before Ray is started."""
    with pytest.raises(mpool.errors.FileError, match="`source` must be an existing folder, got .*in"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in").mkdir()
    with pytest.raises(mpool.errors.FileError, match="in has no .parquet files"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(mpool.InvalidArgument, match="`column` must be a column of strings, got 'text' of type int64"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, got 'body'.*a.parquet") as caught:
        embed_parquet(tmp_path / "in", tmp_path / "out", column="body")
    assert caught.value.param == "column"
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1 of no kind")
    with pytest.raises(mpool.errors.FileError, match="a.parquet cannot be read"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    with pytest.raises(mpool.InvalidArgument, match="`target` must be another folder than `source`, got "):
        embed_parquet(tmp_path / "in", tmp_path / "in" / ".")
    (tmp_path / "link").symlink_to("in")
    before = (tmp_path / "in" / "a.parquet").read_bytes()
    for same in (tmp_path / "link", tmp_path / "in" / ".." / "in"):
        with pytest.raises(mpool.InvalidArgument, match="`target` must be another folder than `source`, got "):
            embed_parquet(tmp_path / "in", same, overwrite=True, output="text")
    assert (tmp_path / "in" / "a.parquet").read_bytes() == before
    for progress in ("yes", 1):
        with pytest.raises(mpool.InvalidArgument, match="`progress` must be True, False, None or a function of"):
            embed_parquet(tmp_path / "in", tmp_path / "out", progress=progress)  # type: ignore[arg-type]
    with pytest.raises(mpool.InvalidArgument, match="`weights` must be one of auto, mapped, packed, got 'never'"):
        embed_parquet(tmp_path / "in", tmp_path / "out", weights="never")
    with pytest.raises(mpool.InvalidArgument, match="`actors` must be an integer of 1 or more, got 0"):
        embed_parquet(tmp_path / "in", tmp_path / "out", actors=0)
    for wrong in (True, 1.5, "2"):
        with pytest.raises(mpool.InvalidArgument, match="`rows` must be an integer of 1 or more, got "):
            embed_parquet(tmp_path / "in", tmp_path / "out", rows=wrong)


def fake_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace Ray: run the actors of ``embed_parquet`` in this process. Returns the list of the files they write."""
    from mpool.integrations.ray import parquet

    written: list[str] = []

    def run(files: list[dict[str, str]], actors: int, cpus: int, arguments: dict[str, Any]) -> Any:
        actor = parquet._EmbedFiles(**arguments)
        for file in files:
            written.append(file["target"])
            yield actor(file)

    monkeypatch.setattr(parquet, "_run", run)
    monkeypatch.setattr(parquet, "_RayConnection", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(parquet.ray, "cluster_resources", lambda: {"CPU": 1})
    return written


def test_progress(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A function gets the finished rows and all rows after each file. A bar counts rows, and is closed on an error."""
    from mpool.integrations.ray import parquet

    fake_run(monkeypatch)
    source = tmp_path / "in"
    source.mkdir()
    for name, texts in (("a", ["A cat.", "A dog."]), ("b", ["A fox", None]), ("c", ["w1", "w2", "w3"])):
        pq.write_table(pa.table({"text": texts}), source / f"{name}.parquet")
    same: dict[str, Any] = dict(model=str(bert), memory_mb=200)
    seen: list[tuple[int, int]] = []
    with pytest.raises(mpool.errors.FileError, match="1 of 3 files"):  # b has a null
        embed_parquet(source, tmp_path / "one", **same, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 7), (2, 7), (5, 7)]
    (source / "b.parquet").unlink()
    assert embed_parquet(source, tmp_path / "two", **same, progress=True) == Embedded(2, 5, 0)
    shown = capsys.readouterr().err
    assert "5/5" in shown and " rows" in shown and shown.endswith("\n")

    def interrupted(files: list[dict[str, str]], actors: int, cpus: int, arguments: dict[str, Any]) -> Any:
        yield {"rows": 2, "error": ""}
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:  # it keeps the frames, whose end would close the bar, too
        embed_parquet(source, tmp_path / "three", **same, progress=True)
    shown = capsys.readouterr().err
    assert "2/5" in shown and shown.endswith("\n"), caught
    assert embed_parquet(source, tmp_path / "two", **same, progress=True) == Embedded(0, 0, 2)
    assert capsys.readouterr().err == ""


def test_targets_of_another_call_are_refused(bert: Path, prompted: Path, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with vectors of another model, revision, option, column or version is refused before any work, and
    nothing in it changes. The same call continues."""
    written = fake_run(monkeypatch)
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name in "ab":
        pq.write_table(pa.table({"text": ["A cat.", "A dog."], "title": ["x", "y"]}), source / f"{name}.parquet")
    same: dict[str, Any] = dict(model=str(bert), memory_mb=200, progress=False)
    assert embed_parquet(source, target, **same) == Embedded(2, 4, 0)
    record = json.loads(pq.read_schema(target / "a.parquet").metadata[b"mpool.embedding"])
    assert record["model"] == str(bert) and record["revision"].startswith("sha256:")
    assert record["options"]["precision"] == "float32" and record["mpool"] == mpool.__version__

    os.unlink(target / "b.parquet")
    del written[:]
    numbers = {name: np.int64(2) for name in ("cpus", "rows", "actors")} | {"cpus": np.int64(1)}
    assert embed_parquet(source, target, **same, **numbers) == Embedded(1, 2, 1)  # continues
    assert written == [str(target / "b.parquet")]
    moved = shutil.copytree(bert, tmp_path / "moved")
    assert embed_parquet(source, target, **{**same, "model": str(moved)}) == Embedded(0, 0, 2)

    os.unlink(target / "b.parquet")
    before = (target / "a.parquet").read_bytes()
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}))
    for change, words in ((dict(model=str(prompted)), "its model is "),
                          (dict(model=str(moved)), "its (model|revision)"),
                          (dict(dimensions=8), "its dimensions is None, not 8"),
                          (dict(precision="int8"), "its precision is 'float32', not 'int8'"),
                          (dict(column="title"), "its column is 'text', not 'title'"),
                          (dict(output="vector"), "no record of the model of its column 'vector'")):
        with pytest.raises(mpool.InvalidArgument, match=words) as caught:
            embed_parquet(source, target, **{**same, **change})
        assert "--overwrite" in str(caught.value) and str(target / "a.parquet") in str(caught.value)
    monkeypatch.setattr("mpool.integrations.ray.provenance.__version__", "0.0.1")
    with pytest.raises(mpool.InvalidArgument, match="its version of mpool is "):
        embed_parquet(source, target, **same)
    monkeypatch.undo()
    fake_run(monkeypatch)
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, title, got 'body'"):
        embed_parquet(source, tmp_path / "new", **same, column="body")
    with pytest.raises(mpool.InvalidArgument, match="`dimension` is not an option"):
        embed_parquet(source, tmp_path / "new", **same, dimension=8)
    assert not (tmp_path / "new").exists()
    assert os.listdir(target) == ["a.parquet"] and (target / "a.parquet").read_bytes() == before
    assert embed_parquet(source, target, **same, dimensions=8, overwrite=True) == Embedded(2, 4, 0)
    assert pq.read_schema(target / "a.parquet").field("embedding").type == pa.list_(pa.float32(), 8)


def test_failed_files_are_retried_with_nulls(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are complete have no failed text, so that another ``on_error`` keeps them. Files that may have nulls
    are not taken for complete ones."""
    written = fake_run(monkeypatch)
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pq.write_table(pa.table({"text": ["A cat.", "A dog."]}), source / "a.parquet")
    pq.write_table(pa.table({"text": ["A cat.", None]}), source / "b.parquet")
    same: dict[str, Any] = dict(model=str(bert), memory_mb=200, progress=False)
    with pytest.raises(mpool.errors.FileError, match="1 of 2 files could not be embedded"):
        embed_parquet(source, target, **same)
    del written[:]
    with pytest.raises(mpool.InvalidArgument, match="its precision is 'float32', not 'int8'"):
        embed_parquet(source, target, **same, precision="int8")
    assert embed_parquet(source, target, **same, on_error="null") == Embedded(1, 2, 1)
    assert written == [str(target / "b.parquet")]
    assert pq.read_table(target / "b.parquet").column("embedding").null_count == 1
    with pytest.raises(mpool.InvalidArgument, match="its on_error is 'null', not 'raise'"):
        embed_parquet(source, target, **same)


def test_a_missing_column_is_refused_in_a_finished_target(bert: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Although every file has a copy, a column that does not exist is an error."""
    fake_run(monkeypatch)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["A cat."]}), tmp_path / "in" / "a.parquet")
    embed_parquet(tmp_path / "in", tmp_path / "out", model=str(bert), memory_mb=200, progress=False)
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, got 'body'"):
        embed_parquet(tmp_path / "in", tmp_path / "out", model=str(bert), column="body", progress=False)


def test_columns_of_two_models_keep_their_records(bert: Path, prompted: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["A cat."]}), tmp_path / "in" / "a.parquet")
    embed_parquet(tmp_path / "in", tmp_path / "one", model=str(bert), memory_mb=200, progress=False)
    embed_parquet(tmp_path / "one", tmp_path / "two", model=str(prompted), output="other", memory_mb=200,
                  progress=False)
    metadata = pq.read_schema(tmp_path / "two" / "a.parquet").metadata
    assert json.loads(metadata[b"mpool.embedding"])["model"] == str(bert)
    assert json.loads(metadata[b"mpool.other"])["model"] == str(prompted)
