"""Static embeddings: model2vec folders against recorded vectors of model2vec 0.10 and the formula in float64, and
StaticEmbedding modules against sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import staticmodels
from safetensors.numpy import save_file

import mpool

GOLDENS = np.load(Path(__file__).resolve().parents[2] / "parity" / "static" / "goldens.npz")


@pytest.mark.parametrize("variant", staticmodels.VARIANTS)
def test_model2vec(variant: str, tmp_path: Path) -> None:
    folder = staticmodels.write_variant(tmp_path / "model", variant)
    vectors = mpool.embed(staticmodels.TEXTS, str(folder))
    scale = np.abs(GOLDENS[variant]).max()
    # the vectors that model2vec computes from a table of float16 are rounded to float16, which has 11 bits of precision
    np.testing.assert_allclose(vectors, GOLDENS[variant], atol=(1e-3 if variant == "float16" else 1e-6) * scale)
    assert not vectors[4].any(), "a text of unknown tokens has the vector of model2vec: zeros"
    for number in (0, 3, 5):
        assert (mpool.embed(staticmodels.TEXTS[number], str(folder)) == vectors[number]).all()


def test_the_formula(tmp_path: Path) -> None:
    folder = str(staticmodels.write(tmp_path / "model", *staticmodels.VARIANTS["quantised"]))
    vocabulary, table = staticmodels.vocabulary(), staticmodels.table(rows=7).astype(float)
    ids = [vocabulary[word] for word in "the cat sleeps on the warm roof".split()]
    mean = (table[staticmodels.mapping()[ids]] * staticmodels.weights()[ids][:, None].astype(float)).mean(axis=0)
    for size in (None, 8):
        part = mean[:size]
        vector = mpool.embed(staticmodels.TEXTS[0], folder, dimensions=size)
        np.testing.assert_allclose(vector, part / np.linalg.norm(part), atol=1e-6)
    np.testing.assert_allclose(mpool.embed(staticmodels.TEXTS[0], folder, normalize=False), mean, atol=1e-6)


def test_many_texts_alone_together_and_in_a_process(tmp_path: Path) -> None:
    folder = str(staticmodels.write(tmp_path / "model", *staticmodels.VARIANTS["normalised"]))
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(staticmodels.WORDS[:7], random.integers(1, 60))) for _ in range(700)]
    together = mpool.embed(texts, folder)
    for number in range(0, 700, 97):
        assert (mpool.embed(texts[number], folder) == together[number]).all()
    assert (np.concatenate(list(mpool.embed_iter(iter(texts), folder))).reshape(700, -1) == together).all()
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as pool:
        assert (pool.embed(texts[:300], folder) == together[:300]).all()


def write_modules(folder: Path, module: str = "0_StaticEmbedding", normalize: bool = True,
                  tensors: dict[str, np.ndarray] | None = None) -> Path:
    sub = folder / module
    sub.mkdir(parents=True)
    staticmodels.tokenizer().save(str(sub / "tokenizer.json"))
    save_file(tensors or {"embedding.weight": staticmodels.table()}, sub / "model.safetensors")
    modules = [{"idx": 0, "name": "0", "path": module,
                "type": "sentence_transformers.models.StaticEmbedding"}]
    if normalize:
        modules.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({
        "prompts": {"query": "the "}, "similarity_fn_name": "cosine"}))
    return folder


@pytest.mark.parametrize("module", ["0_StaticEmbedding", ""])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers(module: str, normalize: bool, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    if module:
        write_modules(folder, module, normalize)
    else:
        write_modules(folder / "x", "y", normalize)
        for path in [*(folder / "x").glob("*.json"), *(folder / "x" / "y").iterdir()]:
            path.rename(folder / path.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = ""
        (folder / "modules.json").write_text(json.dumps(modules))
    reference = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(mpool.embed(staticmodels.TEXTS, str(folder)), reference.encode(staticmodels.TEXTS),
                               atol=1e-6)
    np.testing.assert_allclose(mpool.embed(staticmodels.TEXTS[:3], str(folder), task="query"),
                               reference.encode(staticmodels.TEXTS[:3], prompt_name="query"), atol=1e-6)


def test_a_row_that_is_not_finite_fails_its_texts_alone(tmp_path: Path) -> None:
    table = staticmodels.table()
    table[staticmodels.vocabulary()["cat"], 3] = np.nan
    folder = str(staticmodels.write(tmp_path / "model", {"embeddings": table}, {}))
    with pytest.raises(mpool.NumericError):
        mpool.embed("the cat", folder)
    assert np.isfinite(mpool.embed("the roof", folder)).all()


def test_token_ids_and_long_texts(tmp_path: Path) -> None:
    folder = str(staticmodels.write(tmp_path / "model", *staticmodels.VARIANTS["cut"]))
    assert (mpool.embed([[2, 3]], folder) == mpool.embed(["the cat"], folder)).all()
    with pytest.raises(mpool.InvalidArgument):
        mpool.embed([[2, 99]], folder)
    with pytest.raises(mpool.ContextOverflow):
        mpool.embed("the cat sleeps on the warm roof", folder, truncate=False)
    assert not mpool.embed(" ", folder).any()
