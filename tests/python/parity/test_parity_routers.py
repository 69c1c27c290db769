"""Asymmetric models, whose queries and documents have different encoders, against sentence-transformers on seeded
checkpoints with odd sizes: largest difference 1e-4 of the largest value."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.errors import FormatError, InvalidArgument, Unsupported

pytest.importorskip("sentence_transformers")

from adapterfiles import matrices, save_peft
from paritymodels import torch
from retrievalmodels import TEXTS, VOCAB, masked_model, same_sparse, save, write_masked, write_tokenizer

WIDTH = 21
PROMPTS = {"query": "w30 w31 ", "document": "w40 "}


def encoder(folder: Path, kind: str) -> str:
    """Write an encoder without a head. Returns its folder."""
    folder.mkdir(parents=True)
    model = masked_model(kind)
    getattr(model, {"modernbert": "model"}.get(kind, kind)).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def side(folder: Path, kind: str, pooling: str, seed: int) -> list[Any]:
    """Return the modules of a route whose vectors have WIDTH components."""
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(seed)
    return [Transformer(encoder(folder, kind), max_seq_length=9 + seed), Pooling(48, pooling), Dense(48, WIDTH)]


def static(folder: Path) -> list[Any]:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    folder.mkdir(parents=True)
    write_tokenizer(folder)
    torch.manual_seed(7)
    return [StaticEmbedding(Tokenizer.from_file(str(folder / "tokenizer.json")), torch.randn(VOCAB, WIDTH).numpy())]


def routed(folder: Path, queries: str = "modernbert", default: str | None = "document",
           normalize: bool = True) -> tuple[Any, Path]:
    """Return a model of sentence-transformers with a Router, and its folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sentence_transformer.modules import Normalize

    query = static(folder / "q") if queries == "static" else side(folder / "q", queries, "cls", 1)
    router = Router.for_query_document(query, side(folder / "d", "bert", "mean", 2), default_route=default)
    model = SentenceTransformer(modules=[router, *([Normalize()] if normalize else [])], device="cpu", prompts=PROMPTS)
    return model, save(model, folder / "model")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    model, folder = routed(tmp_path_factory.mktemp("routers"))
    return model, str(folder)


@pytest.fixture(params=["thread", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=2, isolation=request.param)) as found:
        yield found


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def differ(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() > 1e-2 * np.abs(b).max()


def check_look_alike(model: Any, folder: str) -> None:
    """The look-alike's methods and its ``task`` choose the same side as the library."""
    from mpool.integrations.sentence_transformers import SentenceTransformer

    ours = SentenceTransformer(folder)
    for method in ("encode_query", "encode_document", "encode"):
        for options in ({}, {"prompt": "w30 "}, {"prompt_name": "query"}, {"task": "query"}, {"task": "document"}):
            if method == "encode" or "task" not in options:
                same(getattr(ours, method)(TEXTS, **options), getattr(model, method)(TEXTS, **options))
    for one in (model, ours):
        with pytest.raises(ValueError, match="task"):
            one.encode(TEXTS, task="other")


def check(pool: mpool.Pool, model: Any, folder: str) -> None:
    queries = pool.embed(TEXTS, folder, task="query", compute="float32")
    documents = pool.embed(TEXTS, folder, task="document", compute="float32")
    same(queries, model.encode_query(TEXTS))
    same(documents, model.encode_document(TEXTS))
    same(pool.embed(TEXTS, folder, compute="float32"), model.encode(TEXTS))
    differ(queries, documents)
    same(mpool.similarity(queries, documents), model.similarity(queries, documents).numpy())


@pytest.mark.sample(4)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("default", ["document", "query", None])
@pytest.mark.parametrize("queries", ["modernbert", "static"])
def test_routers(tmp_path: Path, queries: str, default: str | None, normalize: bool) -> None:
    model, folder = routed(tmp_path, queries, default, normalize)
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        check(pool, model, str(folder))
    check_look_alike(model, str(folder))


def test_routers_of_older_versions(pair: tuple[Any, str], tmp_path: Path) -> None:
    """Asym, as sentence-transformers 2 to 4 saved it: in a folder of its own, with config.json and old class names."""
    model, new = pair
    old = tmp_path / "old"
    (old / "0_Asym").mkdir(parents=True)
    for path in Path(new).iterdir():
        if path.is_dir() and path.name != "1_Normalize":
            shutil.copytree(path, old / "0_Asym" / path.name)
        elif path.name == "config_sentence_transformers.json":
            shutil.copy(path, old)
    rows = json.loads((Path(new) / "modules.json").read_text())
    rows[0] |= {"path": "0_Asym", "type": "sentence_transformers.models.Asym"}
    rows[0].pop("kwargs", None)
    (old / "modules.json").write_text(json.dumps(rows))
    config = json.loads((Path(new) / "router_config.json").read_text())
    config["types"] = {name: "sentence_transformers.models." + kind.rpartition(".")[2]
                       for name, kind in config["types"].items()}
    config["structure"] = {name: config["structure"][name] for name in ("document", "query")}
    config["parameters"] = {"allow_empty_key": True}
    (old / "0_Asym" / "config.json").write_text(json.dumps(config))
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        check(pool, model, str(old))


def test_requests_of_both_sides(pool: mpool.Pool, pair: tuple[Any, str]) -> None:
    model, folder = pair
    tasks = [("query", "document", None)[at % 3] for at in range(60)]
    expected = {task: pool.embed(TEXTS, folder, task=task) for task in set(tasks)}
    jobs = [pool.submit("text_embedding", inputs=TEXTS, model=folder, task=task) for task in tasks]
    for task, job in zip(tasks, jobs):
        assert np.array_equal(job.result(), expected[task]), task
    rows = list(pool.embed_iter(iter(TEXTS * 3), folder, task="query"))
    assert np.array_equal(np.stack(rows), np.concatenate([expected["query"]] * 3))
    tokens = pool.embed_tokens(TEXTS, folder, task="query", prompt="")
    assert {row.shape[1] for row in tokens} == {48}
    differ(tokens[0], pool.embed_tokens(TEXTS, folder, task="document", prompt="")[0])
    assert {row.model.removeprefix(folder) for row in pool.ps()} == {"", " text_embedding (query)"}


def test_a_task_of_another_type(pair: tuple[Any, str]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        for task in (np.array(["query", "document"]), ["query"], {}, 1, True):
            for verb in (pool.embed, pool.embed_tokens):
                with pytest.raises(InvalidArgument, match="task"):
                    verb(TEXTS, pair[1], task=task)


def test_loading_swapping_and_settings(pair: tuple[Any, str], tmp_path: Path) -> None:
    model, folder = pair
    other, second = routed(tmp_path, "bert", "document")
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        loaded = pool.load(folder)
        assert len([row for row in pool.ps() if row.state != "cold"]) == 2
        assert loaded.capabilities == ("text_embedding",)
        pool.unload(folder)
        assert not [row for row in pool.ps() if row.state != "cold"]
        pool.register("name", folder, prompts={"query": "w7 "})
        same(pool.embed(TEXTS, "name", task="query", compute="float32"), model.encode_query(TEXTS, prompt="w7 "))
        same(pool.embed(TEXTS, "name", task="document", compute="float32"), model.encode_document(TEXTS, prompt=""))
        pool.load("name", compute="float32")
        pool.swap("name", str(second))
        # a swap keeps the prompts that it does not name
        same(pool.embed(TEXTS, "name", task="query", compute="float32"), other.encode_query(TEXTS, prompt="w7 "))
        same(pool.embed(TEXTS, "name", task="document", compute="float32"), other.encode_document(TEXTS, prompt=""))


def test_adapters_are_refused(pair: tuple[Any, str], tmp_path: Path) -> None:
    folder = pair[1]
    adapter = save_peft(tmp_path / "lora", matrices(masked_model("bert").bert, 4, 1, ("query",)), 4.0)
    with mpool.Pool() as pool:
        with pytest.raises(InvalidArgument, match="adapters.*two encoders"):
            pool.load(folder, adapters={"one": adapter})
        with pytest.raises(InvalidArgument, match="the model has no adapters"):
            pool.embed("w1", folder, task="query", adapter="one")


def test_sparse_encoders_of_both_sides(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    sides = [[Transformer(str(write_masked(tmp_path / kind, kind)), transformer_task="fill-mask"), SpladePooling("max")]
             for kind in ("bert", "modernbert")]
    reference = SparseEncoder(modules=[Router.for_query_document(*sides)], device="cpu")
    folder = str(save(reference, tmp_path / "model"))
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        for task, expected in (("query", reference.encode_query(TEXTS)),
                               ("document", reference.encode_document(TEXTS))):
            same_sparse(pool.embed_sparse(TEXTS, folder, task=task, compute="float32"), expected.to_dense().numpy())


@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda config: config["structure"].pop("query"), Unsupported, "document: 3 modules; mpool supports query and doc"),
    (lambda config: config["structure"].update(image=[]), Unsupported, "image: 0 modules"),
    (lambda config: config["structure"].update(query=[]), Unsupported, "query: 0 modules"),
    (lambda config: config["structure"].update(query=["../x"]), FormatError, r"\.\./x"),
    (lambda config: config["structure"].update(query=7), FormatError, "query"),
    (lambda config: config["structure"]["query"].pop(), FormatError, "query with 48 components"),
    (lambda config: config["structure"]["query"].reverse(), FormatError, r"router_config\.json.*Dense"),
    (lambda config: config["types"].update(query_0_Transformer="os.system"), FormatError, "os.system"),
    (lambda config: config["parameters"].update(route_mappings={"(None, 'text')": "query"}), Unsupported, "route_map"),
    (lambda config: config["parameters"].update(default_route=None, allow_empty_key=False), Unsupported, "no default"),
    (lambda config: config["parameters"].update(default_route="image"), FormatError, "default_route"),
    (lambda config: config.update(more=1), FormatError, "more")])
def test_bad_routers(pair: tuple[Any, str], tmp_path: Path, change: Any, error: Any, words: str) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "bad"))
    config = json.loads((folder / "router_config.json").read_text())
    change(config)
    (folder / "router_config.json").write_text(json.dumps(config))
    with mpool.Pool() as pool, pytest.raises(error, match=words):
        pool.embed("w1", str(folder))


def test_routers_in_routers_are_refused(pair: tuple[Any, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "bad"))
    config = json.loads((folder / "router_config.json").read_text())
    config["types"]["query_0_Transformer"] = config["types"]["query_0_Transformer"].replace(
        "transformer.Transformer", "router.Router")
    (folder / "router_config.json").write_text(json.dumps(config))
    with mpool.Pool() as pool, pytest.raises(Unsupported, match="Router; mpool supports"):
        pool.embed("w1", str(folder))


def test_files_of_the_hub(pair: tuple[Any, str]) -> None:
    from mpool.models.fields import Fields
    from mpool.models.sources.hub_files import choose_folder

    root = Path(pair[1])
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

    def read(name: str) -> Any:
        found = json.loads((root / name).read_text())
        return found if isinstance(found, list) else Fields.of(found, file=name)

    chosen = choose_folder([*names, "README.md", "onnx/model.onnx"], "", read, where="a/b")
    assert {"modules.json", "router_config.json", "query_0_Transformer/model.safetensors",
            "query_0_Transformer/tokenizer.json", "query_1_Pooling/config.json", "query_2_Dense/model.safetensors",
            "document_0_Transformer/model.safetensors"} <= set(chosen)
    assert "onnx/model.onnx" not in chosen
