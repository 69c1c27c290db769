"""Model files that change while a model uses them: no result mixes the contents of two versions."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.runtime import swapping
from mpool.runtime.entry import Entry
import tinymodels


def _shift_tensors(file: Path) -> None:
    """Move the tensors to other offsets by adding metadata before them, as saving the file again may do."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    header["__metadata__"] = {"note": "x" * 5000}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])
    os.replace(fresh, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tinymodels.bert(tmp_path / "bert")


def test_a_folder_may_get_a_model_of_another_kind(folder: Path, llama: Path) -> None:
    def replace_folder(by: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(by, folder)

    with mpool.Pool() as pool:
        model, other = pool.load(folder), shutil.copytree(folder, folder.parent / "other")
        vector = pool.embed("A text.", folder)
        replace_folder(llama)
        pool.unload(folder)
        with pytest.raises(mpool.WrongCapability, match="capability is text_to_text, not text_embedding"):
            pool.embed("A text.", folder)
        assert model.generate("Once", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        assert model.capability == "text_to_text"
        replace_folder(Path(other))
        assert pool.load(folder).capability == "text_embedding"
        with pytest.raises(mpool.WrongCapability, match="capability is text_embedding, not text_to_text"):
            pool.generate("Once", folder)
        assert np.array_equal(pool.embed("A text.", folder), vector)


# ---- detection of changed content ------------------------------------------------------------------------------------

def _flip_signs(file: Path) -> None:
    """Change numbers in place: path, inode and size stay the same."""
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 2 & ~7, len(data) - 7, 8):  # after the header
        data[at + 3] ^= 0x80
    with open(file, "r+b") as stream:
        stream.write(data)


def _fresh(folder: Path, text: str = "A text.") -> np.ndarray:
    """Return the embedding computed by a new pool, which reads the current files."""
    with mpool.Pool() as pool:
        return pool.embed(text, str(folder))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_file_that_is_rewritten_in_place(folder: Path, isolation: str) -> None:
    """Token tables stay mapped, so the next step would mix both contents; that step detects the change."""
    with mpool.Pool(mpool.PoolConfig(isolation=isolation)) as pool:
        model = pool.load(folder)
        before = model.embed("A text.")
        _flip_signs(folder / "model.safetensors")
        with pytest.raises(mpool.errors.IntegrityError):
            model.embed("A text.")
        after = model.embed("A text.")  # loads the files of now
        assert np.array_equal(after, _fresh(folder)) and not np.array_equal(after, before)


def _row(pool: mpool.Pool, key: str) -> tuple[bool, float]:
    """Return whether a model is pinned, and its keep-alive in seconds."""
    (row,) = (row for row in pool.registry.entries() if row["key"] == key)
    return row["pinned"], row["keep_alive"]


def test_changed_files_keep_pin_and_keep_alive(folder: Path) -> None:
    with mpool.Pool() as pool:
        pool.register("mine", folder)
        pool.load("mine", pin=True, keep_alive=1234)
        _flip_signs(folder / "model.safetensors")
        pool.load("mine")
        assert _row(pool, "mine") == (True, 1234)
        pool.load("mine", weights="mapped")  # other settings: the core replaces the model
        assert _row(pool, "mine") == (True, 1234)
        _flip_signs(folder / "model.safetensors")
        pool.unload("mine")  # releases the pin, with or without changes
        pool.embed("A text.", "mine")
        assert _row(pool, "mine") == (False, 1234)
        pool.load("mine", keep_alive=77)
        assert _row(pool, "mine") == (False, 77)


def test_changed_files_keep_their_names(folder: Path) -> None:
    """Files that cannot be read for a moment take no name away."""
    with mpool.Pool() as pool:
        pool.register("mine", folder)
        before = pool.load("mine", name="other", pin=True, keep_alive=1234).embed("A text.")
        away = folder / "config.json"
        text = away.read_text()
        away.write_text("{")
        for call in (pool.load, pool.load, lambda name: pool.embed("A text.", name)):
            with pytest.raises(mpool.MpoolError) as raised:
                call("mine")
            assert not isinstance(raised.value, mpool.UnknownModel)
        away.write_text(text)
        assert np.array_equal(pool.load("other").embed("A text."), before)
        assert np.array_equal(pool.embed("A text.", "mine"), before)
        assert _row(pool, "mine") == (True, 1234)
        wrong = str(folder.parent / "nothing")
        for _ in range(2):  # a path that was never read leaves no name
            with pytest.raises(mpool.MpoolError):
                pool.load(wrong)
        assert wrong not in pool._names.by_name


# ---- requests while changed files are read anew ----------------------------------------------------------------------

def _swap_words(folder: Path) -> None:
    """Let the tokenizer give "cat" the token of another word."""
    data = (folder / "tokenizer.json").read_bytes()
    assert b'"cat"' in data
    (folder / "tokenizer.json").write_bytes(data.replace(b'"cat"', b'"tac"'))


@pytest.mark.parametrize("name", ["load", "unload"])
def test_a_request_for_old_files_is_prepared_again(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The files change, and are read anew, between the tokenization of a text and its submission."""
    changes = [_swap_words]

    def prepared_early(prepare: Any, use: Any) -> Any:
        def used(request: Any) -> Any:
            if changes:
                changes.pop()(folder)
                getattr(pool, name)("m")
            return use(request)

        return swapping.for_current(prepare, used)

    monkeypatch.setattr("mpool.tasks.running.for_current", prepared_early)
    with mpool.Pool() as pool:
        pool.register("m", folder)
        pool.load("m")
        found = pool.embed("A cat.", "m")
        assert not changes and np.array_equal(found, _fresh(folder, "A cat."))
        assert pool.metrics()["total_requests"] == 1


def test_an_iterator_does_not_continue_with_other_files(folder: Path) -> None:
    with mpool.Pool() as pool:
        found = pool.embed_iter(itertools.repeat("A cat.", 3000), folder)
        next(found)
        _swap_words(folder)
        pool.load(folder)  # completes the slices that the core accepted before
        with pytest.raises(mpool.SendError):
            list(found)


def test_an_unload_that_times_out_drops_every_compute_type(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "llama")
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with mpool.Pool() as pool:
        pool.register("m", folder)
        before = [pool.generate("A text", "m", compute=compute, **options).token_ids
                  for compute in ("float32", "bfloat16")]
        with pool.generate("A text", "m", max_tokens=8000, ignore_eos=True, compute="float32", stream=True) as stream:
            next(stream)
            (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
            with pytest.raises(mpool.Timeout):
                pool.unload("m", timeout=0.001)
            assert [pool.generate("A text", "m", compute=compute, **options).token_ids
                    for compute in ("float32", "bfloat16")] == before
            assert next(stream).finish_reason is None


def test_a_key_that_the_core_gets_during_the_check_for_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread looks for changed files of a model that is not loaded. Meanwhile, another thread uses the model."""
    with mpool.Pool() as pool:
        pool.register("m", folder)
        before, check = pool.get("m")._entry, Entry.changed

        def changed(entry: Entry, folders: bool = False) -> str | None:
            monkeypatch.setattr(Entry, "changed", check)
            entry.core_key()
            return "config.json"

        monkeypatch.setattr(Entry, "changed", changed)
        vector = pool.embed("A cat.", "m")
        assert np.array_equal(vector, _fresh(folder, "A cat.")) and pool.get("m")._entry is before


# ---- files that change while they are read ---------------------------------------------------------------------------

def test_weights_that_change_after_they_were_described(folder: Path) -> None:
    before = _fresh(folder)
    with mpool.Pool() as pool:
        assert pool.get(str(folder)).description.spec.architecture == "bert"
        _shift_tensors(folder / "model.safetensors")  # changes before the first request are allowed
        after = pool.embed("A text.", str(folder))
        assert np.array_equal(after, _fresh(folder)) and np.array_equal(after, before)  # only the offsets changed


def test_a_tokenizer_that_changes_after_it_was_described(folder: Path) -> None:
    before = _fresh(folder, "A cat.")
    with mpool.Pool() as pool:
        assert pool.get(str(folder)).description.spec.architecture == "bert"
        data = (folder / "tokenizer.json").read_bytes()
        assert b'"cat"' in data
        (folder / "tokenizer.json").write_bytes(data.replace(b'"cat"', b'"tac"'))
        after = pool.embed("A cat.", str(folder))
        assert np.array_equal(after, _fresh(folder, "A cat.")) and not np.array_equal(after, before)


def test_files_that_change_while_they_are_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpool.models.formats import hf_folder

    describe = hf_folder.describe_folder

    def describe_slowly(*args: Any, **kwargs: Any) -> Any:
        found = describe(*args, **kwargs)
        _flip_signs(folder / "model.safetensors")
        return found

    with mpool.Pool() as pool:
        with monkeypatch.context() as patch:
            patch.setattr(hf_folder, "describe_folder", describe_slowly)
            with pytest.raises(mpool.errors.IntegrityError, match="while"):
                pool.embed("A text.", str(folder))
        assert np.array_equal(pool.embed("A text.", str(folder)), _fresh(folder))
