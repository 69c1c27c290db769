"""Entries of models with made-up descriptions and a made-up core: names, keys, networks, swaps and forgetting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.models.spec import (OWN_ADAPTERS, Adapter, EmbeddingSettings, GenerationSettings, ImageSettings, LowRank,
                               ModelDescription, ModelSpec, TensorEntry)
from mpool.runtime.core_keys import CoreKeys
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
    made.files._description = described() if description is None else description
    made.files.capability = made.files._description.capability
    return made


def with_parts() -> tuple[Any, Any, Any]:
    """An image model with an encoder of texts and another one for queries, and their entries."""
    parts = described(), described(task="query")
    main = entry(described("image_embedding", image=IMAGE, networks=parts))
    _, texts, queries = main.parts()
    return main, texts, queries


@pytest.mark.parametrize("capability, wanted, serves", [
    ("vision", "text_to_text", True), ("vision", "vision", True), ("vision", "text_embedding", False),
    ("text_to_text", "vision", False), ("text_to_text", "text_to_text", True),
    ("text_embedding", "text_to_text", False),
    ("image_embedding", "text_embedding", False)])
def test_capabilities_that_a_model_serves(capability: str, wanted: str, serves: bool) -> None:
    made = entry(described(capability, image=IMAGE if capability == "image_embedding" else None))
    assert made.serving(wanted) is (made if serves else None)


@pytest.fixture()
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs of the core, in which nothing is loaded."""
    monkeypatch.setattr(CoreKeys, "_make_spec", lambda self, files, adapters, fast: SimpleNamespace(
        made=(files._ref, self._setup.weights, self._setup.kv_dtype, *(["fast"] if fast else [])),
        set_draft=lambda draft: self.__dict__.update(drafted=draft.made)))


def test_keys_of_networks_and_long_keys(specs: None) -> None:
    main, texts, queries = with_parts()
    add = [part.keys.add_cold for part in main.parts()]
    assert [one("auto") for one in add] == ["m", "m text_embedding", "m text_embedding (query)"]
    assert queries.keys.add_cold("int8") == "m text_embedding (query) (int8)"
    longest = entry(key="ä" * 120)
    assert longest.keys.add_cold("auto") == "ä" * 120
    keys = {entry(key=first + "ä" * 120).keys.add_cold("auto") for first in "ab"}
    assert len(keys) == 2 and {len(key) for key in keys} == {75}
    assert all(key.startswith("...") and key.endswith("ä" * 60) for key in keys)
    widest = entry(key="模" * 81).keys.add_cold("auto")  # the core counts bytes
    assert widest.endswith("模" * 40) and len(widest.encode()) == 135


def test_ids_of_adapters() -> None:
    """An adapter keeps its id while its files are the same; own adapters come from the model's settings."""
    made = entry(described(embedding=EmbeddingSettings(64, 32, 48, adapters=("own", "second"))))
    tensor = TensorEntry("x", "F32", (1,), 0, 0, 4)
    one, other = (Adapter((path,), (LowRank("l", tensor, tensor, 1.0),), {path: (1, 2, 3, 4)})
                  for path in ("/a", "/b"))
    adapters = {"a": one, "b": other}
    made.setup.set(LoadOptions(adapters=(("a", "/a"), ("b", "/b"))), None, adapters)
    assert [made.setup.adapter_id(name) for name in ("a", "b", "a")] == [1, 2, 1]
    adapters["a"] = Adapter(one.files, one.updates, {"/a": (1, 2, 3, 5)})  # another time of change
    assert [made.setup.adapter_id(name) for name in ("a", "b")] == [3, 2]
    assert [made.setup.adapter_id(name) - OWN_ADAPTERS for name in ("own", "second")] == [0, 1]
    for bad in ("c", 1, None):
        with pytest.raises(mpool.InvalidArgument, match="own, second, a, b or None") as caught:
            made.setup.adapter_id(bad)
        assert (caught.value.param, caught.value.key) == ("adapter", "m")


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


def test_names_of_models_whose_files_were_read_are_kept(bert: Path, tmp_path: Path) -> None:
    """Files that cannot be read a second time may be in the middle of a change; a wrong path is forgotten."""
    pool: Any = SimpleNamespace(config=mpool.PoolConfig())
    names = Names(pool)
    gone = names.find(str(tmp_path / "none"))
    assert names.by_key[gone.key] is gone
    with pytest.raises(mpool.errors.FileError):
        names.require(gone, "text_embedding")
    assert gone.key not in names.by_key and gone not in names.by_name.values()
    found = names.find(str(bert))
    found.describe()
    names.forget(found)
    assert names.by_key[found.key] is names.by_name[found.key] is found
