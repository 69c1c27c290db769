"""Files of models that change while the models serve: a loaded model keeps its version, a name that is looked up anew
gets the files of now."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import imagemodels
import paritymodels
import staticmodels
import tinygguf
import tinymodels
import visiongguf
import visionmodels

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
PHOTO = imagemodels.image(5, 60, 90)


def _text(model: Any) -> Any:
    return model.embed("A cat sat.").tobytes()


def _tokens(model: Any) -> Any:
    return model.generate("A cat", **GREEDY).token_ids


def _image(model: Any) -> Any:
    return model.embed_image(PHOTO).tobytes()


def _seen(model: Any) -> Any:
    return model.vision(PHOTO, visionmodels.text(1, 9), **GREEDY).token_ids


def _pixels(model: Any) -> Any:
    return model.generate_image("a cat", width=32, height=32, num_inference_steps=1, seed=1).image.tobytes()


def _write_static(folder: Path) -> Path:
    return staticmodels.write_variant(folder, "plain")


def _write_gguf(folder: Path) -> Path:
    folder.mkdir()
    made = paritymodels.decoder("llama", 2, vocab=157)
    paritymodels.randomise(made, 3)
    return tinygguf.write(folder / "model.gguf", made)


def _write_clip(folder: Path) -> Path:
    folder.mkdir()
    return imagemodels.save(imagemodels.randomised("clip", 2), "clip", folder)


def _write_vision(folder: Path) -> Path:
    folder.mkdir()
    return visionmodels.save(visionmodels.randomised("llava"), "llava", folder)


#: Kind of model -> the function that writes one, and one that computes a result with a handle.
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Any]]] = {
    "encoder": (tinymodels.bert, _text), "decoder": (tinymodels.llama, _tokens), "gguf": (_write_gguf, _tokens),
    "table": (_write_static, _text), "images": (_write_clip, _image), "texts of images": (_write_clip, _text),
    "vision": (_write_vision, _seen)}


def _weights(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.safetensors"))


def _flipped(file: Path) -> bytes:
    """Return the content of a file with other weights."""
    data = bytearray(file.read_bytes())
    start = len(data) // 2 & ~7 if data[:4] == b"GGUF" else 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data) - 7, 8):
        data[at + 3] ^= 0x80
    return bytes(data)


def _replace(file: Path, data: bytes) -> None:
    """Replace a file the right way: written beside it, then renamed."""
    beside = file.with_name(file.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, file)


def _metadata(file: Path) -> None:
    """Change nothing but the change time, as Kubernetes does to every file of a mount with ``fsGroup``."""
    status = os.stat(file)
    os.chmod(file, status.st_mode)
    os.chown(file, status.st_uid, status.st_gid)
    try:
        os.setxattr(file, "user.mpool", b"1")
    except (OSError, AttributeError):  # the file system, or the system, has no such attributes
        pass


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[Any], Any]]:
    write, use = KINDS[request.param]
    return write(tmp_path_factory.mktemp("kind") / "model"), use


def _copy(place: Path, to: Path) -> Path:
    if place.is_file():
        to.mkdir()
        return Path(shutil.copy(place, to))
    return Path(shutil.copytree(place, to))


# ---- a loaded model keeps its version ----------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["metadata", "renamed", "other", "unlinked"])
def test_a_loaded_model_does_not_depend_on_the_paths_of_its_weights(kind: Any, tmp_path: Path, how: str) -> None:
    place, use = _copy(kind[0], tmp_path / "model"), kind[1]
    with mpool.Pool() as pool:
        model = pool.load(place)
        before = use(model)
        for file in _weights(place):
            if how == "metadata":
                _metadata(file)
            elif how == "unlinked":
                file.unlink()
            else:
                _replace(file, file.read_bytes() if how == "renamed" else _flipped(file))
        loads = pool.registry.stats()["loads"]
        for _ in range(3):
            assert use(model) == before
        if how == "unlinked":  # there is no other version
            assert use(pool.get(place)) == before
        elif how != "other":
            assert use(pool.get(place)) == before
        else:
            with mpool.Pool() as fresh:
                want = use(fresh.get(place))
            assert use(pool.get(place)) == want != before
            assert use(model) == want  # the handle follows its name
        assert how != "metadata" or pool.registry.stats()["loads"] == loads


def test_image_generation_does_not_depend_on_the_paths_of_its_weights(flux: Path, tmp_path: Path) -> None:
    """Its networks are prepared at their first use."""
    folder = Path(shutil.copytree(flux, tmp_path / "flux"))
    options: dict[str, Any] = {"width": 32, "height": 32, "num_inference_steps": 1, "seed": 1}
    with mpool.Pool() as pool:
        want = np.asarray(pool.generate_image("a cat", folder, **options).image)
    with mpool.Pool() as pool:
        model = pool.load(folder)
        for file in _weights(folder):
            _replace(file, _flipped(file))
        assert np.array_equal(np.asarray(model.generate_image("a cat", **options).image), want)


# ---- a model that is loaded again --------------------------------------------------------------------------------

def _evict(pool: mpool.Pool) -> None:
    for row in pool.registry.entries():
        pool.registry.evict(row["key"])


async def _vector(text: str, model: Any, pool: mpool.Pool) -> bytes:
    return (await mpool.aio.embed(text, model, pool=pool)).tobytes()


async def _collected(stream: Any) -> tuple[int, ...]:
    async for _ in stream:
        pass
    found: tuple[int, ...] = (await stream.result()).token_ids
    return found


#: Ways to compute the tokens of a completion.
CALLS: dict[str, Callable[[mpool.Pool, Any], Any]] = {
    "blocking": lambda pool, model: pool.generate("A cat", model, **GREEDY).token_ids,
    "stream": lambda pool, model: pool.generate("A cat", model, stream=True, **GREEDY).result().token_ids,
    "job": lambda pool, model: pool.submit("text_to_text", prompt="A cat", model=model, **GREEDY).result().token_ids,
    "aio": lambda pool, model: asyncio.run(mpool.aio.generate("A cat", model, pool=pool, **GREEDY)).token_ids,
    "aio stream": lambda pool, model: asyncio.run(
        _collected(mpool.aio.generate("A cat", model, stream=True, pool=pool, **GREEDY)))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("by", ["name", "handle"])
def test_an_evicted_model_is_loaded_with_the_files_of_now(llama: Path, tmp_path: Path, call: str, by: str) -> None:
    folder, run = Path(shutil.copytree(llama, tmp_path / "model")), CALLS[call]
    with mpool.Pool() as pool:
        model = pool.load(folder)
        before = run(pool, model)
        _evict(pool)
        _replace(folder / "model.safetensors", _flipped(folder / "model.safetensors"))
        after = run(pool, model if by == "handle" else folder)
    with mpool.Pool() as fresh:
        assert after == run(fresh, folder) != before


@pytest.mark.parametrize("call", CALLS)
def test_files_that_change_between_a_submission_and_the_load(llama: Path, tmp_path: Path, call: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is in the queue when the core refuses to load the other files. It is prepared again for them."""
    folder, run = Path(shutil.copytree(llama, tmp_path / "model")), CALLS[call]
    file = folder / "model.safetensors"
    from mpool.tasks import text_to_text

    make, changes = text_to_text.prepare, [_flipped(file)]
    with mpool.Pool() as pool:
        before = run(pool, folder)

        def late(*args: Any, **more: Any) -> Any:
            found = make(*args, **more)
            if changes:
                _evict(pool)
                _replace(file, changes.pop())
            return found

        monkeypatch.setattr(text_to_text, "prepare", late)
        after = run(pool, folder)
        assert not changes
        assert [one.state for one in pool.history() if one.verb == "generate"] == ["completed", "completed"]
    with mpool.Pool() as fresh:
        assert after == run(fresh, folder) != before


def test_files_that_change_while_the_tokenizer_is_read(bert: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The request begins again with the new files."""
    from mpool.runtime import model_files

    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    file = folder / "model.safetensors"
    opened, changes = model_files.open_tokenizer, [_flipped(file)]

    def late(*args: Any, **more: Any) -> Any:
        found = opened(*args, **more)
        if changes:
            _replace(file, changes.pop())
        return found

    monkeypatch.setattr(model_files, "open_tokenizer", late)
    with mpool.Pool() as pool, mpool.Pool() as fresh:
        after = pool.embed("A cat sat.", folder).tobytes()
        assert not changes and after == _text(fresh.get(folder))


def test_files_that_change_between_a_lookup_and_the_load(bert: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The core refuses to load the other files; the request is prepared again for them."""
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    file = folder / "model.safetensors"
    with mpool.Pool() as pool:
        before = _text(pool.load(folder))
        for run in (lambda: pool.embed("A cat sat.", folder).tobytes(),
                    lambda: pool.submit("text_embedding", inputs="A cat sat.", model=folder).result().tobytes(),
                    lambda: asyncio.run(_vector("A cat sat.", folder, pool))):
            from mpool.tasks import requests

            opened, changes = requests._opened, [_flipped(file)]

            def late(*args: Any, **more: Any) -> Any:
                found = opened(*args, **more)
                if changes:
                    _evict(pool)
                    _replace(file, changes.pop())
                return found

            with monkeypatch.context() as patch:
                patch.setattr(requests, "_opened", late)
                after = run()
            assert not changes
            with mpool.Pool() as fresh:
                assert after == _text(fresh.get(folder)) != before
            before = after


# ---- names that are looked up anew -------------------------------------------------------------------------------

def _edit(file: Path, **values: Any) -> None:
    _replace(file, json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}).encode())


def _cls(folder: Path) -> None:
    _edit(folder / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)


def _prompt(folder: Path) -> None:
    _edit(folder / "config_sentence_transformers.json", prompts={"it": "the dog "}, default_prompt_name="it")


def _no_normalize(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:-1]))


def _words(folder: Path) -> None:
    data = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(data.replace(b'"cat"', b'"tac"'))


def _in_place(folder: Path) -> None:
    """A training loop saves its weights into the same folder."""
    (folder / "model.safetensors").write_bytes(_flipped(folder / "model.safetensors"))


EDITS = (_cls, _prompt, _no_normalize, _words, _in_place)


#: Ways to look a name up.
LOOKUPS: dict[str, Callable[[mpool.Pool, Path], bytes]] = {
    "embed": lambda pool, folder: pool.embed("A cat sat.", folder).tobytes(),
    "get": lambda pool, folder: pool.get(folder).embed("A cat sat.").tobytes(),
    "load": lambda pool, folder: pool.load(folder).embed("A cat sat.").tobytes(),
    "embed_iter": lambda pool, folder: next(iter(pool.embed_iter(["A cat sat."], folder))).tobytes(),
    "submit": lambda pool, folder: pool.submit("text_embedding", inputs="A cat sat.",
                                               model=str(folder)).result().tobytes(),
    "aio": lambda pool, folder: asyncio.run(_vector("A cat sat.", str(folder), pool)),
    "registered": lambda pool, folder: pool.embed("A cat sat.", "mine").tobytes(),
    "alias": lambda pool, folder: pool.embed("A cat sat.", "other").tobytes()}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_name_that_is_looked_up_anew_gets_the_files_of_now(bert: Path, tmp_path: Path, lookup: str) -> None:
    folder, look_up = Path(shutil.copytree(bert, tmp_path / "model")), LOOKUPS[lookup]
    with mpool.Pool() as pool:
        if lookup in ("registered", "alias"):
            pool.register("mine", folder)
            pool.load("mine", name="other")
        seen = [look_up(pool, folder)]
        for edit in EDITS:
            edit(folder)
            seen.append(look_up(pool, folder))
            with mpool.Pool() as fresh:
                assert seen[-1] == fresh.embed("A cat sat.", folder).tobytes(), edit.__name__
    assert len(set(seen)) == len(EDITS) + 1


def test_a_new_look_alike_gets_the_files_of_now(bert: Path, tmp_path: Path) -> None:
    """Its results are those of sentence-transformers, which reads the files for each object."""
    reference = pytest.importorskip("sentence_transformers")
    from mpool.integrations.sentence_transformers import SentenceTransformer

    folder = str(shutil.copytree(bert, tmp_path / "model"))
    for edit in (lambda folder: None, _cls, _prompt, _in_place):
        edit(Path(folder))
        want = reference.SentenceTransformer(folder, device="cpu").encode("A cat sat.")
        assert np.abs(SentenceTransformer(folder).encode("A cat sat.") - want).max() < 1e-5
    mpool.unload(folder)


def test_language_models_get_the_files_of_now(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    messages = [{"role": "user", "content": "A cat"}]
    with mpool.Pool() as pool:
        def seen(pool: mpool.Pool = pool) -> tuple[Any, ...]:
            done = pool.chat(messages, folder, max_tokens=4, temperature=0)
            return done.token_ids, done.finish_reason, done.usage.prompt_tokens

        held = pool.load(folder)
        found = [seen()]
        for edit in (lambda: (folder / "chat_template.jinja").write_text(
                         "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"),
                     lambda: _edit(folder / "generation_config.json", eos_token_id=[2, found[1][0][1]])):
            edit()
            found.append(seen())
            with mpool.Pool() as fresh:
                assert found[-1] == seen(fresh)
        assert found[0][2] != found[1][2] and found[1][1] == "length" and found[2][1] == "stop"
        assert held.description is pool.get(folder).description


def test_requests_in_flight_keep_the_old_files(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    options: dict[str, Any] = {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    with mpool.Pool() as pool:
        want = pool.generate("A cat", folder, **options).token_ids
        with pool.generate("A cat", folder, stream=True, **options) as stream:
            next(stream)
            _replace(folder / "model.safetensors", _flipped(folder / "model.safetensors"))
            after = pool.generate("A cat", folder, **GREEDY).token_ids
            assert stream.result().token_ids == want
        with mpool.Pool() as fresh:
            assert after == fresh.generate("A cat", folder, **GREEDY).token_ids != want[:6]


def test_half_a_save(bert: Path, tmp_path: Path) -> None:
    """While a save is incomplete, the name fails, and the loaded model serves its handle. Then the name gets the new
    files."""
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    text = (folder / "config.json").read_text()
    with mpool.Pool() as pool:
        model = pool.load(folder, pin=True, keep_alive=1234)
        before = _text(model)
        _replace(folder / "model.safetensors", _flipped(folder / "model.safetensors"))
        (folder / "config.json").write_text("{")
        for _ in range(2):
            with pytest.raises(mpool.errors.FormatError, match="config.json"):
                pool.get(folder)
        assert _text(model) == before
        (folder / "config.json").write_text(text)
        after = _text(pool.get(folder))
        with mpool.Pool() as fresh:
            assert after == _text(fresh.get(folder)) != before
        (row,) = pool.registry.entries()
        assert row["pinned"] and row["keep_alive"] == 1234


def test_threads_that_look_up_changed_files_at_once(bert: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    reads, describe = [], mpool.models.describe

    def counted(*args: Any, **more: Any) -> Any:
        reads.append(args)
        return describe(*args, **more)

    monkeypatch.setattr("mpool.runtime.model_files.describe", counted)
    with mpool.Pool() as pool:
        pool.embed("A cat sat.", folder)
        for edit in EDITS:
            edit(folder)
            reads.clear()
            found: list[Any] = []

            def caller() -> None:
                try:
                    found.append(pool.embed("A cat sat.", folder).tobytes())
                except BaseException as error:
                    found.append(error)

            threads = [threading.Thread(target=caller) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with mpool.Pool() as fresh:
                assert len(reads) == 1 and set(found) == {fresh.embed("A cat sat.", folder).tobytes()}


def _shards(folder: Path) -> Path:
    """A decoder whose weights are in several files with an index."""
    import transformers

    made = transformers.AutoModelForCausalLM.from_pretrained(tinymodels.llama(folder))
    made.save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    return folder


def _gguf_shards(folder: Path) -> Path:
    """A decoder in a GGUF file that is split."""
    folder.mkdir()
    made = paritymodels.decoder("llama", 2, vocab=157)
    paritymodels.randomise(made, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinygguf.gguf, "GGUFWriter", partial(tinygguf.gguf.GGUFWriter, split_max_tensors=9))
        tinygguf.write(folder / "m.gguf", made)
    return next(folder.glob("m-00001-of-*.gguf"))


def _gguf_pair(folder: Path) -> Path:
    folder.mkdir()
    made = visionmodels.randomised("llava")
    made.config.text_config.sliding_window = None  # GGUF files of Mistral have no window
    visiongguf.decoder(made, folder / "text-F32.gguf", visionmodels.IMAGE)
    visiongguf.projector(made, folder / "mmproj-F32.gguf")
    return folder


def _pipeline(folder: Path) -> Path:
    import pipelinemodels

    folder.mkdir()
    pipelinemodels.flux(folder, layers=1, singles=1)
    return folder


def _steps(model: Any) -> Any:
    return model.generate_image("a cat", width=32, height=32, num_inference_steps=3, seed=1).image.tobytes()


def _flip(folder: Path, pattern: str) -> None:
    file = sorted(folder.glob(pattern))[-1]
    _replace(file, _flipped(file))


#: Part of a model -> the functions that write the model, compute a result, and replace the part.
PARTS: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Any], Callable[[Path], None]]] = {
    "steps of images": (_write_clip, _image,
                        lambda folder: _edit(folder / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])),
    "steps of vision": (_write_vision, _seen,
                        lambda folder: _edit(folder / "preprocessor_config.json", image_std=[0.1, 0.2, 0.3])),
    "scheduler": (_pipeline, _steps,
                  lambda folder: _edit(folder / "scheduler/scheduler_config.json", shift=7.0)),
    "decoder of images": (_pipeline, _pixels, lambda folder: _flip(folder, "vae/*.safetensors")),
    "projector": (_gguf_pair, _seen, lambda folder: _flip(folder, "mmproj*")),
    "shards": (_shards, _tokens, lambda folder: _flip(folder, "model-*.safetensors")),
    "shards of a GGUF file": (_gguf_shards, _tokens, lambda file: _flip(file.parent, "m-*.gguf"))}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_model_is_looked_up_anew(tmp_path: Path, part: str) -> None:
    write, use, edit = PARTS[part]
    place = write(tmp_path / "model")
    with mpool.Pool() as pool:
        before = use(pool.get(place))
        assert use(pool.get(place)) == before
        edit(place)
        after = use(pool.get(place))
        with mpool.Pool() as fresh:
            assert after == use(fresh.get(place)) != before


def test_adapters_of_now(llama: Path, tmp_path: Path) -> None:
    from adapterfiles import matrices, save_peft

    folder, adapter = Path(shutil.copytree(llama, tmp_path / "model")), tmp_path / "adapter"
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapter.mkdir()
    save_peft(adapter, matrices(made, 4, 1), 8.0)
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"it": adapter})

        def call(pool: mpool.Pool) -> Any:
            return pool.generate("A cat", folder, adapter="it", **GREEDY).token_ids

        before = call(pool)
        save_peft(adapter, matrices(made, 8, 17), 16.0)
        after = call(pool)
        (adapter / "note.txt").write_text("not part of the adapter")
        assert call(pool) == after != before
        with mpool.Pool() as fresh:
            fresh.load(folder, adapters={"it": adapter})
            assert call(fresh) == after


def test_a_branch_of_the_hub_that_moves(tmp_path: Path) -> None:
    """Other programs rewrite the commit of a branch without a change; only another commit is another version."""
    from mpool.models import files
    from mpool.models.references import HubRef
    from mpool.models.sources import hub

    commit, snapshots = "0" * 40, tmp_path / "models--org--name/snapshots"
    branch = tmp_path / "models--org--name/refs/main"
    branch.parent.mkdir(parents=True)
    branch.write_text(commit)
    found = hub._resolved(HubRef("org/name"), str(snapshots / commit), commit, ["config.json"])
    assert found.pointers == (str(branch),)
    pinned = hub._resolved(HubRef("org/name", revision=commit), str(snapshots / commit), commit, ["config.json"])
    assert pinned.pointers == ()
    with files.collect_stamps() as stamps:
        files.note_pointer(str(branch))
    branch.write_text(commit)
    os.utime(branch, ns=(1, 1))
    assert files.changed(stamps, folders=True) is None
    branch.write_text("1" * 40)
    assert files.changed(stamps, folders=True) == str(branch) and files.changed(stamps) is None
