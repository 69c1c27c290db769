"""EmbeddingGemma 2 against transformers in float32: texts, images and both in one space."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import mixed_inputs

import visionmodels
from paritymodels import torch
from visionmodels import EOS, IMAGE, image

TOLERANCE = 1e-4
PHOTO, LONG, SMALL = image(1, 63, 90), image(2, 24, 120), image(3, 40, 40)
TEXT = " ".join(f"w{40 + at % 90}" for at in range(150))  # longer than a block of the cache, and than the window
#: Inputs of a request, and their words and images (``None``) in order.
INPUTS: list[tuple[Any, list[Any]]] = [
    ("w40 w41", ["w40 w41"]), ("w42", ["w42"]), (TEXT, [TEXT]), ({"image": PHOTO}, [PHOTO]),
    ({"text": "w43", "image": LONG}, ["w43", LONG]), ({"image": LONG, "text": "w43"}, [LONG, "w43"]),
    ({"image": [SMALL, PHOTO], "text": [TEXT, " w44"]}, [SMALL, PHOTO, TEXT, " w44"])]
GIVEN = [one for one, _ in INPUTS]


def ids_of(parts: list[Any]) -> tuple[list[int], list[np.ndarray]]:
    """Return the token ids of a prompt with placeholders, and its images."""
    ids, images, joined = [1], [], ""
    for part in [*parts, None]:
        if isinstance(part, str):
            joined += part
            continue
        ids += [int(word[1:]) for word in joined.split()]
        joined = ""
        if part is not None:
            high, wide = visionmodels.tiles("gemma4", part)[0].shape[:2]
            ids += [158, *[IMAGE] * (high * wide // 144), 157]
            images.append(part)
    return [*ids, EOS], images


def stages(model: Any, parts: list[Any]) -> list[np.ndarray]:
    """Return the rows of the embeddings, of each layer, of the last norm, and of the projection."""
    ids, images = ids_of(parts)
    given = visionmodels.inputs(model, ids, images) if images else {"input_ids": torch.tensor([ids])}
    given.pop("mm_token_type_ids", None)
    found: list[Any] = []
    text = model.language_model
    hooks = [text.layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0].clone())),
             *(one.register_forward_hook(lambda _, args, out: found.append(out.clone()))
               for one in (*text.layers, text.norm, text.embedding_projection))]
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    return [one[0].numpy() for one in found]


def means(model: Any, before: str = "") -> np.ndarray:
    return np.stack([stages(model, [before, *parts])[-1].mean(axis=0) for _, parts in INPUTS])


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("embedding_gemma2")
    model = visionmodels.embedding_gemma2(folder)
    with mpool.Pool() as pool:
        yield model, folder, pool


def test_vectors_of_texts_images_and_both(family: Any) -> None:
    model, folder, pool = family
    found, wanted = pool.embed(GIVEN, folder, compute="float32"), means(model)
    assert found.shape == (7, 44) and np.abs(found - unit(wanted)).max() <= TOLERANCE
    assert np.abs(found[4] - found[5]).max() > 0.01  # the order of the parts counts
    for options, before in (({"task": "query"}, "w30 w31 "), ({"prompt_name": "document"}, "w32 ")):
        asked = pool.embed(GIVEN, folder, compute="float32", **options)
        assert np.abs(asked - unit(means(model, before))).max() <= TOLERANCE
    assert np.array_equal(asked, pool.embed(GIVEN, folder, compute="float32", prompt="w32 "))
    for size in (32, 7):
        cut = pool.embed(GIVEN, folder, compute="float32", dimensions=size)
        assert cut.shape == (7, size) and np.abs(cut - unit(wanted[:, :size])).max() <= TOLERANCE
    assert np.array_equal(pool.embed_image([PHOTO], folder, compute="float32"), found[3:4])


@pytest.mark.parametrize("at", [2, 3, 6])
def test_every_stage(family: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding and the output of each layer of the last token, the mean of the normed rows, and the vector."""
    model, folder, pool = family
    seen: list[np.ndarray] = []
    finish = mixed_inputs._result

    def result(plan: Any, ticket: Any) -> Any:
        seen.append(np.array(ticket.capture()[0][0]))
        return finish(plan, ticket)

    monkeypatch.setattr(mixed_inputs, "_result", result)
    pool.embed(GIVEN[at], folder, compute="float32")
    *rows, norm, vectors = stages(model, INPUTS[at][1])
    wanted = [*(one[-1] for one in rows), norm.mean(axis=0)]
    assert len(seen) == 1 and len(wanted) == 7  # the embedding, five layers, the mean
    found = [*seen[0][:7 * 44].reshape(7, 44), seen[0][7 * 44:]]
    for one, expected in zip(found, [*wanted, vectors.mean(axis=0)]):
        assert np.abs(one - expected[:44]).max() <= TOLERANCE * max(1, float(np.abs(expected).max()))


def test_bytes_do_not_depend_on_the_schedule(family: Any, tmp_path: Path) -> None:
    """Batches, threads, other requests, iterators, jobs and a worker process give the same bytes."""
    _, folder, pool = family
    for compute in ("float32", "auto"):
        alone = np.stack([pool.embed(one, folder, compute=compute) for one in GIVEN])
        assert np.array_equal(pool.embed(GIVEN, folder, compute=compute), alone)
        assert np.array_equal(np.stack(list(pool.embed_iter(iter(GIVEN), folder, compute=compute))), alone)
        jobs = [pool.submit("text_embedding", inputs=GIVEN[::step], model=folder, compute=compute) for step in (1, -1)]
        assert np.array_equal(jobs[0].result(60), alone) and np.array_equal(jobs[1].result(60), alone[::-1])
        for config in (mpool.PoolConfig(threads=1), mpool.PoolConfig(isolation="process")):
            with mpool.Pool(config) as other:
                assert np.array_equal(other.embed(GIVEN, folder, compute=compute), alone)


def test_long_texts_are_truncated_to_the_limit_of_the_model(family: Any) -> None:
    model, folder, pool = family
    words = [f"w{20 + at % 100}" for at in range(1100)]
    ids = [1, *(20 + at % 100 for at in range(1021)), EOS]
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    found = pool.embed(" ".join(words), folder, compute="float32")
    assert np.abs(found - (rows / rows.norm()).numpy()).max() <= TOLERANCE
    with pytest.raises(mpool.errors.ContextOverflow) as caught:
        pool.embed([" ".join(words)], folder, truncate=False)
    assert (caught.value.tokens, caught.value.limit, caught.value.param) == (1102, 1023, "inputs[0]")
