"""Entries of models with made-up descriptions and a made-up core: names, keys, networks, swaps and forgetting."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import _core
from mpool.models.spec import (EmbeddingSettings, GenerationSettings, ImageSettings, LowRank, Adapter, ModelDescription,
                               ModelSpec, TensorEntry)
from mpool.runtime import entry as entries
from mpool.runtime.entry import Entry
from mpool.runtime.overrides import check, override
from mpool.runtime.load_options import LoadOptions
from mpool.runtime.naming import Names

SPEC = ModelSpec("bert", ("/w",), {"mpool.pooling": ["cls"], "mpool.normalize": True}, ())
EMBEDDING = EmbeddingSettings(64, 32, 48, pooling=("cls",), prompts={"query": "q: ", "x": "y: "})
IMAGE = ImageSettings(32, 48, None, 3, None, 8, 32, True)


def described(capability: str = "text_embedding", task: str = "", **fields: Any) -> ModelDescription:
    given: dict[str, Any] = {"embedding": EMBEDDING} if capability == "text_embedding" else {}
    return ModelDescription(key="m", ref="/m", capability=capability, spec=SPEC, task=task, **given | fields)


class Registry:
    """The core's registry: notes every call."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows, self.calls = list(rows), []

    def entries(self) -> list[dict[str, Any]]:
        return self.rows

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, args, options))


def entry(description: ModelDescription | None = None, *rows: dict[str, Any], key: str = "m", **config: Any) -> Any:
    """An entry whose files have been read."""
    pool: Any = SimpleNamespace(registry=Registry(*rows), config=mpool.PoolConfig(**config))
    made = Entry(pool, key, "/m")
    made._description = described() if description is None else description
    made._capability = made._description.capability
    return made


def with_parts() -> tuple[Any, Any, Any]:
    """An image model with an encoder of texts and another one for queries, and their entries."""
    parts = described(), described(task="query")
    main = entry(described("image_embedding", image=IMAGE, networks=parts))
    _, texts, queries = main.parts()
    return main, texts, queries


# ---- networks ------------------------------------------------------------------------------------------------------

def test_a_model_has_an_entry_for_each_network() -> None:
    main, texts, queries = with_parts()
    assert [part.name_of_network for part in main.parts()] == ["image_embedding", "text_embedding",
                                                              "text_embedding (query)"]
    assert main.parts() == [main, texts, queries] and texts._main is main and queries.capability == "text_embedding"
    assert (texts.key, texts.ref, texts.revision, texts.pool) == (main.key, main.ref, main.revision, main.pool)
    assert texts.describe() is main.describe().networks[0] and queries.describe() is main.describe().networks[1]
    assert main.serving("text_embedding") is texts and main.serving("image_embedding") is main
    assert main.serving("text_to_text") is None
    assert main.for_task("query") is queries and main.for_task("document") is main and main.for_task(None) is main
    other = entry(described("image_embedding", image=IMAGE))
    with pytest.raises(mpool.WrongCapability, match="capability is image_embedding, not text_embedding") as caught:
        other._by_name("text_embedding").describe()
    assert caught.value.wanted == "text_embedding" and caught.value.key == "m"


def test_files_of_another_kind_have_other_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    main, texts, _ = with_parts()
    names = Names(main.pool)
    names.by_key["m"] = names.by_name["m"] = main
    assert main.capability == "image_embedding" and names.known("m", "text_embedding") is texts
    monkeypatch.setattr("mpool.models.describe", lambda *_, **options: described())
    main.forget()
    assert names.known("m", "text_embedding") is main and main.capability == "text_embedding"
    assert main.serving("text_embedding") is main and names.known("m", "image_embedding") is main
    with pytest.raises(mpool.WrongCapability):
        texts.describe()
    monkeypatch.setattr("mpool.models.describe", lambda *_, **options: described("text_to_text"))
    given = Entry(main.pool, "m", "/m", "text_embedding")
    with pytest.raises(mpool.WrongCapability, match="capability is text_to_text, not text_embedding"):
        given.describe()


@pytest.mark.parametrize("capability, wanted, serves", [
    ("vision", "text_to_text", True), ("vision", "vision", True), ("vision", "text_embedding", False),
    ("text_to_text", "vision", False), ("text_to_text", "text_to_text", True),
    ("text_embedding", "text_to_text", False),
    ("image_embedding", "text_embedding", False)])
def test_capabilities_that_a_model_serves(capability: str, wanted: str, serves: bool) -> None:
    made = entry(described(capability, image=IMAGE if capability == "image_embedding" else None))
    assert made.serving(wanted) is (made if serves else None)


def test_a_request_is_ready_once_everything_was_read() -> None:
    made = entry()
    made._tokenizer = SimpleNamespace(complete=True)
    assert not made.ready("auto")
    made._core["auto"] = "m"
    assert made.ready("auto") and not made.ready("int8") and not made.ready("auto", chat=True)
    made._template = object()
    assert made.ready("auto", chat=True)
    made._tokenizer.complete = False
    assert not made.ready("auto")
    made._tokenizer = None
    assert not made.ready("auto")
    images = entry(described("image_embedding", image=IMAGE))
    assert not images.ready("auto")
    images._core["auto"] = "m"
    assert images.ready("auto") == (not images.describe().tokenizes)
    side = entry(described(networks=(described(task="query"),)))
    side._tokenizer, side._core = SimpleNamespace(complete=True), {"auto": "m"}
    assert not side.ready("auto")
    part = side.for_task("query")
    part._tokenizer, part._core = side._tokenizer, {"auto": "m text_embedding (query)"}
    assert side.ready("auto")


def test_pairs_that_a_template_renders() -> None:
    assert not Entry(SimpleNamespace(), "m", "/m").renders  # type: ignore[arg-type]
    for answering, renders in ((None, False), (False, True), (True, True)):
        settings = EmbeddingSettings(64, 32, 48, answering=answering)
        assert entry(described(embedding=settings)).renders is renders
    assert not entry(described("text_to_text")).renders


# ---- forks, swaps and forgetting -----------------------------------------------------------------------------------

def test_a_forked_child_has_new_locks() -> None:
    main, texts, _ = with_parts()
    main._draft = entry()
    main.plans = {1: 2}
    before = [(one._lock, one.changing) for one in (*main.parts(), main._draft)]
    names = Names(main.pool)
    names.by_key["m"], lock = main, names.lock
    names.renew_locks()
    after = [(one._lock, one.changing) for one in (*main.parts(), main._draft)]
    assert names.lock is not lock and main.plans == {}
    assert not {id(one) for pair in before for one in pair} & {id(one) for pair in after for one in pair}


def test_an_entry_follows_the_swaps_of_its_name() -> None:
    main, texts, _ = with_parts()
    second, third = entry(), entry()
    assert main.latest() is main and not main.was_replaced() and not texts.was_replaced()
    main.require_current()
    main.successor, second.successor = second, third
    assert main.latest() is third and second.latest() is third and third.latest() is third
    for one in (main, texts):
        assert one.was_replaced()
        with pytest.raises(mpool.SendError, match="replaced before the request was queued") as caught:
            one.require_current()
        assert caught.value.key == "m"


def test_forgetting_a_model() -> None:
    """Everything that was read from files goes, also of its networks."""
    main, texts, _ = with_parts()
    for one in (main, texts):
        one._tokenizer = one._vocab = one._template = one._table = one._draft = object()
        one._draft_stamps, one._adapters, one.plans = {"x": 1}, {}, {1: 1}
    main.forget()
    for one in (main, texts):
        assert (one._description, one._tokenizer, one._vocab, one._template, one._table, one._draft) == (None,) * 6
        assert (one._draft_stamps, one._adapters, one.plans, one._core) == ({}, None, {}, {})
        assert one.known is None


def test_an_unread_entry_of_the_same_model() -> None:
    main, texts, _ = with_parts()
    main._core, main.was_read, main.former, main.loading = {"auto": "m"}, True, ("/old",), LoadOptions(weights="mapped")
    main.pool.registry.rows = [{"key": "m", "pinned": True, "keep_alive": 5}]
    found = main.unread()
    assert (found.key, found.ref, found.pool, found.loading) == (main.key, main.ref, main.pool, main.loading)
    assert found.kept == {"m": (True, 5)} and found.was_read and found.former == ("/old",)
    assert found.known is None and found.core_keys() == [] and found.revision != main.revision


def test_keys_keep_their_pin_and_keep_alive() -> None:
    main, texts, _ = with_parts()
    main._core, texts._core = {"auto": "m"}, {"auto": "t"}
    main.pool.registry.rows = [{"key": key, "pinned": key == "t", "keep_alive": at} for at, key in enumerate("mtx", 5)]
    texts.remember()
    assert main.kept == {"t": (True, 6)} and texts.kept == {}
    main.remember()
    assert main.kept == {"m": (False, 5), "t": (True, 6)}
    unused = entry()
    unused.pool.registry = None
    unused.remember()
    assert unused.kept == {}


def test_compute_types_with_keys_of_their_own() -> None:
    made = entry()
    assert made.computes() == []
    made._core = {"auto": "m", "int8": "m", "float32": "m (float32)"}
    assert made.computes() == ["auto", "float32"]
    made._core = {"int8": "m (int8)", "bfloat16": "m (bfloat16)"}
    assert made.computes() == ["int8", "bfloat16"]


@pytest.mark.parametrize("compute, key", [("int8", "m"), ("float32", None)])
def test_a_compute_type_that_auto_has_shares_its_key(compute: str, key: str | None) -> None:
    made = entry(None, {"key": "x", "facts": {"compute": "float32"}}, {"key": "m", "facts": {"compute": "int8"}},
                 {"key": "y", "facts": None})
    assert made._key_with_compute(compute) is None
    made._core["auto"] = "m"
    assert made._key_with_compute(compute) == key
    made._core["auto"] = "y"
    assert made._key_with_compute(compute) is None


@pytest.fixture()
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs of the core, in which nothing is loaded."""
    monkeypatch.setattr(Entry, "_make_spec", lambda self, weights, kv_dtype, fast: SimpleNamespace(
        made=(self.ref, weights, kv_dtype, *(["fast"] if fast else [])),
        set_draft=lambda draft: self.__dict__.update(drafted=draft.made)))


@pytest.mark.parametrize("compute, key", [("auto", "m"), ("int8", "m (int8)")])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"staged": True}])
def test_what_the_core_gets(specs: None, compute: str, key: str, options: dict[str, bool]) -> None:
    made = entry(weights="mapped")
    assert made.add_cold(compute, **options) == key and made._core == {compute: key}
    (name, args, given), = made.pool.registry.calls
    assert (name, args[0], args[1].made, args[2:]) == ("add", key, ("/m", "mapped", "auto"), (
        compute, options.get("replace", False)))
    assert given == {"revision": made.revision, "staged": options.get("staged", False)}


def test_what_the_core_gets_for_a_process(specs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries._isolated, "command", lambda: ("python",))
    monkeypatch.setattr(entries._isolated, "environment", lambda: [b"A=b"])
    made = entry(isolation="process", process_memory=77)
    made.loading = LoadOptions(weights="packed", kv_dtype="int8")
    made.add_cold("auto", True)
    (_, args, given), = made.pool.registry.calls
    assert args[1].made == ("/m", "packed", "int8") and args[2:] == ("auto", True, ("python",), 77)
    assert given == {"revision": made.revision, "staged": False, "environment": [b"A=b"]}
    made.loading = LoadOptions(isolation="thread")
    assert made.runs_in == "thread" and made.uses_weights == "auto" and made._settings() == (
        "thread", "auto", "auto", "", ())
    made = entry(kv_dtype="int8")
    assert made.uses_kv_dtype == "int8" and made._settings()[2] == "int8"
    made.loading = LoadOptions(kv_dtype="auto")
    assert made.uses_kv_dtype == "auto"


@pytest.mark.parametrize("isolation, library, fast", [("thread", "", True), ("process", "", False),
                                                      ("process", "/libblas.so", True)])
def test_float32_fast_is_a_setting_of_float32(specs: None, monkeypatch: pytest.MonkeyPatch, isolation: str,
                                              library: str, fast: bool) -> None:
    """A worker process opens no library but the one that MPOOL_BLAS names."""
    monkeypatch.setattr(entries._isolated, "command", lambda: ("python",))
    monkeypatch.setattr(_core, "options", lambda: [("MPOOL_CPU", "avx2", "", ""), ("MPOOL_BLAS", library, "", "")])
    made = entry(isolation=isolation, weights="auto", process_memory=77)
    assert made.add_cold("float32-fast") == "m (float32-fast)"
    (_, args, _), = made.pool.registry.calls
    assert args[1].made == ("/m", "auto", "auto", *(["fast"] if fast else [])) and args[2] == "float32"


def test_keys_of_networks_and_long_keys(specs: None) -> None:
    main, texts, queries = with_parts()
    assert [part.add_cold("auto") for part in main.parts()] == ["m", "m text_embedding", "m text_embedding (query)"]
    assert queries.add_cold("int8") == "m text_embedding (query) (int8)"
    longest = entry(key="ä" * 120)
    assert longest.add_cold("auto") == "ä" * 120
    keys = {entry(key=first + "ä" * 120).add_cold("auto") for first in "ab"}
    assert len(keys) == 2 and {len(key) for key in keys} == {75}
    assert all(key.startswith("...") and key.endswith("ä" * 60) for key in keys)
    widest = entry(key="模" * 81).add_cold("auto")  # the core counts bytes
    assert widest.endswith("模" * 40) and len(widest.encode()) == 135


def test_a_key_that_comes_back_keeps_its_keep_alive(specs: None) -> None:
    main, texts, _ = with_parts()
    main.kept = {"m text_embedding": (True, 3.5)}
    texts.add_cold("auto", staged=True)
    assert [name for name, _, _ in main.pool.registry.calls] == ["add"]
    texts.add_cold("auto")
    assert main.pool.registry.calls[2:] == [("keep_alive", ("m text_embedding", 3.5), {"pin": True})]
    main.add_cold("auto")
    assert [name for name, _, _ in main.pool.registry.calls[3:]] == ["add"]


def test_new_settings_replace_each_key_once(specs: None) -> None:
    """The pins and times of the keys are noted first. The next request or load() loads the entries."""
    made = entry(None, {"key": "m", "pinned": True, "keep_alive": 2.5})
    made._core = {"auto": "m", "int8": "m", "float32": "m (float32)"}
    made._replace()
    assert made.kept == {"m": (True, 2.5)}
    calls = [(name, *args[:1], *args[2:], options.get("timeout")) for name, args, options in made.pool.registry.calls]
    assert calls == [("add", "m", "auto", True, None), ("keep_alive", "m", None),
                     ("add", "m (float32)", "float32", True, None)]


def test_a_draft_model_belongs_to_the_spec(specs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(described("text_to_text"), weights="mapped")
    made.loading = LoadOptions(draft="/draft", kv_dtype="int8")
    draft = entry(described("text_to_text", stamps={"/draft": (1,)}))
    draft.ref = "/draft"
    made._draft = draft
    made.add_cold("auto")
    assert made.__dict__["drafted"] == ("/draft", "mapped", "int8")
    assert made._draft is None and made._draft_stamps == {"/draft": (1,)}
    made.loading = LoadOptions()
    made.add_cold("auto")
    assert made._draft_stamps == {}


def test_ids_of_adapters() -> None:
    """An adapter keeps its id while its files are the same; own adapters come from the model's settings."""
    made = entry(described(embedding=EmbeddingSettings(64, 32, 48, adapters=("own", "second"))))
    tensor = TensorEntry("x", "F32", (1,), 0, 0, 4)
    one, other = (Adapter((path,), (LowRank("l", tensor, tensor, 1.0),), {path: (1, 2, 3, 4)})
                  for path in ("/a", "/b"))
    made._adapters = {"a": one, "b": other}
    made.loading = LoadOptions(adapters=(("a", "/a"), ("b", "/b")))
    assert [made.adapter_id(name) for name in ("a", "b", "a")] == [1, 2, 1]
    made._adapters["a"] = Adapter(one.files, one.updates, {"/a": (1, 2, 3, 5)})  # another time of change
    assert [made.adapter_id(name) for name in ("a", "b")] == [3, 2]
    assert [made.adapter_id(name) - entries.OWN_ADAPTERS for name in ("own", "second")] == [0, 1]
    for bad in ("c", 1, None):
        with pytest.raises(mpool.InvalidArgument, match="own, second, a, b or None") as caught:
            made.adapter_id(bad)
        assert (caught.value.param, caught.value.key) == ("adapter", "m")


# ---- settings of register() ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, field, expected", [
    ({"prompts": {"a": "b"}}, "prompts", {"a": "b"}), ({"default_prompt_name": "x"}, "default_prompt_name", "x"),
    ({"prompts": {"a": "b"}, "default_prompt_name": "a"}, "default_prompt_name", "a"),
    ({"pooling": "max"}, "pooling", ("max",)), ({"pooling": "max"}, "output_size", 32),
    ({"normalize": False}, "normalize", False), ({"max_length": 4}, "max_tokens", 4),
    ({"max_length": 64}, "max_tokens", 64), ({"max_length": np.int64(9)}, "max_tokens", 9)])
def test_settings_that_replace_those_of_the_files(settings: dict[str, Any], field: str, expected: Any) -> None:
    """The settings apply to the model's other encoder as well, and leave all other fields unchanged."""
    found = override(described(networks=(described(task="query"),)), settings)
    for one in (found, found.networks[0]):
        assert getattr(one.embedding, field) == expected
        changed = {name for name in vars(EMBEDDING) if getattr(one.embedding, name) != getattr(EMBEDDING, name)}
        assert changed <= {*settings, "max_tokens", "output_size"} and one.spec.architecture == "bert"
        assert one.spec.kv == {"mpool.pooling": ["max"] if "pooling" in settings else ["cls"],
                               "mpool.normalize": settings.get("normalize", True)}
    assert SPEC.kv == {"mpool.pooling": ["cls"], "mpool.normalize": True}


@pytest.mark.parametrize("settings, param, got, allowed", [
    ({"default_prompt_name": "z"}, "default_prompt_name", "'z'", "a name in prompts"),
    ({"max_length": 65}, "max_length", "65", "an integer from 4 to 64"),
    ({"chat_template": "x"}, "chat_template", "'x'", "the text of a Jinja template, for a language model")])
def test_refused_settings(settings: dict[str, Any], param: str, got: str, allowed: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        override(described(), settings | {"prompts": settings.get("prompts")})
    error = caught.value
    assert (error.param, error.got, error.key) == (param, got, "m") and (error.allowed or "").startswith(allowed)


@pytest.mark.parametrize("settings", [
    {"prompts": [1]}, {"prompts": {"a": 1}}, {"prompts": {"a": "b"}, "default_prompt_name": "z"}, {"pooling": "first"},
    {"normalize": 1}, {"max_length": 3}, {"max_length": True}, {"chat_template": 1}], ids=str)
def test_settings_that_no_model_allows(settings: dict[str, Any]) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        check(settings)
    assert caught.value.param == [*settings][-1]


def test_settings_of_other_models() -> None:
    talker = described("text_to_text", generation=GenerationSettings(99))
    assert override(talker, {"chat_template": "t", "pooling": None}).chat_template == "t"
    assert override(talker, {"prompts": None}) is talker
    with pytest.raises(mpool.InvalidArgument, match="`pooling` must be None: the model computes no embeddings"):
        override(talker, {"chat_template": "t", "pooling": "cls"})
    padded = described(embedding=EmbeddingSettings(64, 32, 48, padding="left"))
    with pytest.raises(mpool.InvalidArgument, match="every text of this model is padded to one length"):
        override(padded, {"max_length": 8})
    images = described("image_embedding", image=IMAGE, networks=(described(),))
    found = override(images, {"normalize": True, "max_length": 9})
    assert found.image is not None and found.image.normalize and found.spec.kv["mpool.normalize"] is True
    assert found.networks[0].embedding is not None and found.networks[0].embedding.max_tokens == 9
    assert override(images, {"normalize": False}).networks[0].spec.kv["mpool.normalize"] is False
    assert override(images, {"max_length": 9}).image == IMAGE
    alone = described("image_embedding", image=IMAGE)
    with pytest.raises(mpool.InvalidArgument, match="`max_length` must be None: the model embeds no texts, got 9"):
        override(alone, {"max_length": 9})


# ---- waiting, and names of models whose files were read --------------------------------------------------------------

def test_a_load_without_options_waits_for_no_swap() -> None:
    """Other options wait until the thread that replaces the model in the core has finished."""
    made = entry()
    made.require_current = lambda: None
    started, ended = {name: threading.Event() for name in ("none", "one")}, list[str]()

    def load(name: str, options: LoadOptions) -> None:
        started[name].set()
        made.set_loading(options)
        ended.append(name)

    calls = {"none": LoadOptions(), "one": LoadOptions(weights="mapped")}
    threads = {name: threading.Thread(target=load, args=(name, options), daemon=True)
               for name, options in calls.items()}
    with made.changing:
        for thread in threads.values():
            thread.start()
        threads["none"].join(10)
        assert started["one"].wait(10)
        threads["one"].join(0.1)
        assert ended == ["none"] and made.loading.weights is None
    threads["one"].join(10)
    assert ended == ["none", "one"] and made.loading.weights == "mapped"


def test_names_of_models_whose_files_were_read_are_kept(bert: Path, tmp_path: Path) -> None:
    """Files that cannot be read a second time may be in the middle of a change; a wrong path is forgotten."""
    pool: Any = SimpleNamespace(config=mpool.PoolConfig())
    names = Names(pool)
    gone = names.find(str(tmp_path / "none"))
    assert names.by_key[gone.key] is gone
    with pytest.raises(mpool.FileError):
        names.require(gone, "text_embedding")
    assert gone.key not in names.by_key and gone not in names.by_name.values()
    found = names.find(str(bert))
    found.describe()
    names.forget(found)
    assert names.by_key[found.key] is names.by_name[found.key] is found
