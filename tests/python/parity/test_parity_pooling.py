"""Pooling without the tokens of the prompt, truncation, and static embeddings of texts without known tokens, against
sentence-transformers and recorded rules of model2vec."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.integrations.sentence_transformers import SentenceTransformer

import staticmodels

library = pytest.importorskip("sentence_transformers")
TEXTS = ["one", "the quick brown fox jumps over the lazy dog", "two three four five", "word " * 100]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(bert: Path, folder: Path, modes: Any, include: bool) -> str:
    made = Path(shutil.copytree(bert, folder))
    path = made / "1_Pooling" / "config.json"
    width = json.loads(path.read_text()).get("embedding_dimension") or json.loads(path.read_text())[
        "word_embedding_dimension"]
    path.write_text(json.dumps({"embedding_dimension": width, "pooling_mode": modes, "include_prompt": include}))
    return str(made)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("modes", [*MODES, ["cls", "mean"], ["max", "cls", "lasttoken"]], ids=str)
def test_the_prompt_is_left_out_of_pooling(bert: Path, tmp_path: Path, modes: Any, include: bool) -> None:
    folder = pooled(bert, tmp_path / "model", modes, include)
    theirs = library.SentenceTransformer(folder, device="cpu")
    for prompt in ("query: ", "a longer instruction with several words: ", ""):
        wanted = theirs.encode(TEXTS, prompt=prompt)
        for found in (mpool.embed(TEXTS, folder, prompt=prompt, compute="float32"),
                      SentenceTransformer(folder).encode(TEXTS, prompt=prompt),
                      np.stack(list(mpool.embed_iter(TEXTS, folder, prompt=prompt, compute="float32")))):
            assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max(), prompt


def test_a_prompt_that_fills_the_model(bert: Path, tmp_path: Path) -> None:
    """No token is left: CLS is the first token, as in sentence-transformers."""
    folder, prompt = pooled(bert, tmp_path / "model", "cls", False), "word " * 200
    wanted = library.SentenceTransformer(folder, device="cpu").encode(TEXTS[:1], prompt=prompt)
    assert np.abs(mpool.embed(TEXTS[:1], folder, prompt=prompt, compute="float32") - wanted).max() <= 1e-4


@pytest.mark.parametrize("stored", [None, 8, 100_000])
@pytest.mark.parametrize("given", [None, 6, 20, 100_000])
@pytest.mark.parametrize("called", [None, 5, 16, 100_000])
def test_truncation_of_files_constructor_and_call(bert: Path, tmp_path: Path, stored: Any, given: Any,
                                                  called: Any) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    config = folder / "config_sentence_transformers.json"
    values = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(values | ({} if stored is None else {"truncate_dim": stored})))
    ours, theirs = SentenceTransformer(folder, truncate_dim=given), library.SentenceTransformer(
        str(folder), device="cpu", truncate_dim=given)
    found, wanted = ours.encode(TEXTS, truncate_dim=called), theirs.encode(TEXTS, truncate_dim=called)
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 1e-4
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()


@pytest.mark.parametrize("normalize", [False, True])
def test_static_embeddings_of_texts_without_known_tokens(tmp_path: Path, normalize: bool) -> None:
    """model2vec leaves unknown tokens out, and both libraries return zeros for a text without tokens."""
    texts = ["", "the cat", "  ", "\u3000", "zebra", "\u200b", "cat zebra"]
    distilled = str(staticmodels.write(tmp_path / "distilled", {"embeddings": staticmodels.table()},
                                       {"normalize": normalize}))
    for found in (mpool.embed(texts, distilled), np.stack(list(mpool.embed_iter(texts, distilled))),
                  SentenceTransformer(distilled).encode(texts),
                  np.stack([mpool.embed(text, distilled) for text in texts])):
        assert [bool(row.any()) for row in found] == [False, True, False, False, False, False, True]
        assert np.isfinite(found).all()
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    module = StaticEmbedding(staticmodels.tokenizer(), embedding_weights=staticmodels.table())
    theirs = library.SentenceTransformer(modules=[module, *([Normalize()] if normalize else [])], device="cpu")
    theirs.save(str(tmp_path / "static"))
    wanted = theirs.encode(texts)
    for found in (mpool.embed(texts, str(tmp_path / "static")), SentenceTransformer(tmp_path / "static").encode(texts),
                  np.stack(list(mpool.embed_iter(texts, str(tmp_path / "static"))))):
        assert np.abs(found - wanted).max() <= 1e-5


@pytest.mark.parametrize("activation", ["Tanh", "LeakyReLU", "Identity"])
@pytest.mark.parametrize("sizes", [(24,), (32, 32), (32, 16, 16)], ids=str)
def test_residual_dense_modules(bert: Path, tmp_path: Path, sizes: tuple[int, ...], activation: str) -> None:
    from paritymodels import torch
    from sentence_transformers.base.modules import Dense

    theirs = library.SentenceTransformer(str(bert), device="cpu")
    torch.manual_seed(3)
    chain, width = list(theirs)[:2], theirs.get_embedding_dimension()
    for size in sizes:
        chain.append(Dense(width, size, activation_function=getattr(torch.nn, activation)(), use_residual=True))
        width = size
    theirs = library.SentenceTransformer(modules=chain, device="cpu")
    theirs.save(str(tmp_path / "model"))
    found, wanted = mpool.embed(TEXTS, str(tmp_path / "model"), compute="float32"), theirs.encode(TEXTS)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
