"""Every way to send a request to a pool, each as a function of the pool, the model and options."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

import mpool
from mpool import aio

TEXT: dict[str, Any] = dict(temperature=0, max_tokens=2, ignore_eos=True)
USER = [{"role": "user", "content": "Hello"}]
IMAGE = np.zeros((60, 58, 3), np.uint8)
ASK = "Which digit?"
SEEN = [{"role": "user", "content": ASK, "images": [IMAGE]}]
async def _listed(items: Any) -> list[Any]:
    return [item async for item in items]
async def _streamed(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]
SMALL: dict[str, Any] = dict(width=16, height=16, num_inference_steps=2, max_sequence_length=8)
WAYS: dict[str, tuple[str, Callable[[mpool.Pool, Any, dict[str, Any]], Any]]] = {
    "embed": ("bert", lambda pool, model, o: pool.embed("a", model, **o)),
    "embed, many": ("bert", lambda pool, model, o: pool.embed(["a", "b"], model, **o)),
    "embed, slices": ("bert", lambda pool, model, o: pool.embed(["a"] * 1500, model, **o)),
    "embed_iter": ("bert", lambda pool, model, o: list(pool.embed_iter(["a", "b"], model, **o))),
    "submit embed": ("bert", lambda pool, model, o: pool.submit("text_embedding", inputs="a", model=model,
                                                                **o).result()),
    "Model.embed": ("bert", lambda pool, model, o: pool.get(model).embed("a", **o)),
    "Model.batch_embed": ("bert", lambda pool, model, o: pool.get(model).batch_embed(["a"], **o)),
    "Model.embed_iter": ("bert", lambda pool, model, o: list(pool.get(model).embed_iter(["a"], **o))),
    "aio.embed": ("bert", lambda pool, model, o: asyncio.run(aio.embed("a", model, pool=pool, **o))),
    "aio.embed, many": ("bert", lambda pool, model, o: asyncio.run(aio.embed(["a", "b"], model, pool=pool, **o))),
    "aio.embed_iter": ("bert", lambda pool, model, o: asyncio.run(_listed(aio.embed_iter(["a"], model, pool=pool,
                                                                                         **o)))),
    "generate": ("llama", lambda pool, model, o: pool.generate("a", model, **TEXT, **o)),
    "generate, stream": ("llama", lambda pool, model, o: list(pool.generate("a", model, stream=True, **TEXT, **o))),
    "chat": ("llama", lambda pool, model, o: pool.chat(USER, model, **TEXT, **o)),
    "chat, stream": ("llama", lambda pool, model, o: list(pool.chat(USER, model, stream=True, **TEXT, **o))),
    "submit prompt": ("llama", lambda pool, model, o: pool.submit("text_to_text", prompt="a", model=model, **TEXT,
                                                                  **o).result()),
    "submit messages": ("llama", lambda pool, model, o: pool.submit("text_to_text", messages=USER, model=model, **TEXT,
                                                                    **o).result()),
    "Model.generate": ("llama", lambda pool, model, o: pool.get(model).generate("a", **TEXT, **o)),
    "Model.chat": ("llama", lambda pool, model, o: pool.get(model).chat(USER, **TEXT, **o)),
    "aio.generate": ("llama", lambda pool, model, o: asyncio.run(awaited(aio.generate("a", model, pool=pool, **TEXT,
                                                                                       **o)))),
    "aio.generate, stream": ("llama", lambda pool, model, o: asyncio.run(_streamed(
        aio.generate("a", model, pool=pool, stream=True, **TEXT, **o)))),
    "aio.chat": ("llama", lambda pool, model, o: asyncio.run(awaited(aio.chat(USER, model, pool=pool, **TEXT, **o)))),
    "embed_image": ("dino", lambda pool, model, o: pool.embed_image(IMAGE, model, **o)),
    "embed_image, many": ("dino", lambda pool, model, o: pool.embed_image([IMAGE] * 3, model, **o)),
    "embed_image, slices": ("dino", lambda pool, model, o: pool.embed_image([IMAGE] * 50, model, **o)),
    "submit images": ("dino", lambda pool, model, o: pool.submit("image_embedding", images=IMAGE, model=model,
                                                                 **o).result()),
    "Model.embed_image": ("dino", lambda pool, model, o: pool.get(model).embed_image(IMAGE, **o)),
    "aio.embed_image": ("dino", lambda pool, model, o: asyncio.run(aio.embed_image(IMAGE, model, pool=pool, **o))),
    "aio.embed_image, many": ("dino", lambda pool, model, o: asyncio.run(aio.embed_image([IMAGE] * 50, model, pool=pool,
                                                                                         **o))),
    "generate_image": ("flux", lambda pool, model, o: pool.generate_image("a", model, **SMALL, **o)),
    "generate_image, stream": ("flux", lambda pool, model, o: list(pool.generate_image("a", model, stream=True, **SMALL,
                                                                                       **o))),
    "submit image": ("flux", lambda pool, model, o: pool.submit("text_to_image", prompt="a", model=model, **SMALL,
                                                                  **o).result()),
    "Model.generate_image": ("flux", lambda pool, model, o: pool.get(model).generate_image("a", **SMALL, **o)),
    "aio.generate_image": ("flux", lambda pool, model, o: asyncio.run(awaited(
        aio.generate_image("a", model, pool=pool, **SMALL, **o)))),
    "aio.generate_image, stream": ("flux", lambda pool, model, o: asyncio.run(_streamed(
        aio.generate_image("a", model, pool=pool, stream=True, **SMALL, **o)))),
    "rerank": ("ranker", lambda pool, model, o: pool.rerank("a", ["b", "c"], model, **o)),
    "Model.rerank": ("ranker", lambda pool, model, o: pool.get(model).rerank("a", ["b"], **o)),
    "aio.rerank": ("ranker", lambda pool, model, o: asyncio.run(awaited(aio.rerank("a", ["b", "c"], model, pool=pool,
                                                                                     **o)))),
    "classify": ("ranker", lambda pool, model, o: pool.classify(["b", "c"], model, **o)),
    "Model.classify": ("ranker", lambda pool, model, o: pool.get(model).classify("b", **o)),
    "submit texts": ("ranker", lambda pool, model, o: pool.submit("text_embedding", texts=[("a", "b")], model=model,
                                                                  **o).result()),
    "aio.classify": ("ranker", lambda pool, model, o: asyncio.run(awaited(aio.classify([("a", "b")], model, pool=pool,
                                                                                       **o)))),
    "classify_tokens": ("tagger", lambda pool, model, o: pool.classify_tokens(["b", "c"], model, **o)),
    "Model.classify_tokens": ("tagger", lambda pool, model, o: pool.get(model).classify_tokens("b", **o)),
    "submit spans": ("tagger", lambda pool, model, o: pool.submit("text_embedding", texts="a", output="spans",
                                                                  model=model, **o).result()),
    "aio.classify_tokens": ("tagger", lambda pool, model, o: asyncio.run(awaited(aio.classify_tokens(
        ["a", "b"], model, pool=pool, **o)))),
    "embed_sparse": ("m3", lambda pool, model, o: pool.embed_sparse(["a", "b"], model, **o)),
    "Model.embed_sparse": ("m3", lambda pool, model, o: pool.get(model).embed_sparse("a", **o)),
    "aio.embed_sparse": ("m3", lambda pool, model, o: asyncio.run(awaited(aio.embed_sparse(["a", "b"], model, pool=pool,
                                                                          **o)))),
    "embed_tokens": ("m3", lambda pool, model, o: pool.embed_tokens(["a", "b"], model, **o)),
    "Model.embed_tokens": ("m3", lambda pool, model, o: pool.get(model).embed_tokens("a", **o)),
    "aio.embed_tokens": ("m3", lambda pool, model, o: asyncio.run(awaited(aio.embed_tokens(["a", "b"], model, pool=pool,
                                                                          **o)))),
    "embed_all": ("m3", lambda pool, model, o: pool.embed_all(["a", "b"], model, **o)),
    "Model.embed_all": ("m3", lambda pool, model, o: pool.get(model).embed_all("a", **o)),
    "aio.embed_all": ("m3", lambda pool, model, o: asyncio.run(awaited(aio.embed_all(["a", "b"], model, pool=pool,
                                                                       **o)))),
    **{f"submit {name}": ("m3", lambda pool, model, o, name=name: pool.submit(
        "text_embedding", inputs=["a", "b"], model=model, output=name, **o).result())
        for name in ("sparse", "tokens", "all")},
    **{f"embed_{name}, slices": ("m3", lambda pool, model, o, name=name: getattr(pool, f"embed_{name}")(
        ["a"] * 1500, model, **o)) for name in ("sparse", "tokens", "all")},
    **{f"embed_iter, {name}": ("m3", lambda pool, model, o, name=name: list(pool.embed_iter(
        ["a", "b"], model, output=name, **o))) for name in ("sparse", "tokens", "all")},
    **{f"aio.embed_iter, {name}": ("m3", lambda pool, model, o, name=name: asyncio.run(_listed(aio.embed_iter(
        ["a", "b"], model, pool=pool, output=name, **o)))) for name in ("sparse", "tokens", "all")},
    **{f"embed_iter, {name}": (fixture, lambda pool, model, o, name=name: list(pool.embed_iter(
        ["a", "b"], model, output=name, **o))) for fixture, name in (("ranker", "labels"), ("tagger", "spans"))},
    **{f"aio.embed_iter, {name}": (fixture, lambda pool, model, o, name=name: asyncio.run(_listed(aio.embed_iter(
        ["a", "b"], model, pool=pool, output=name, **o)))) for fixture, name in (("ranker", "labels"),
                                                                                  ("tagger", "spans"))},
    "vision": ("llava", lambda pool, model, o: pool.vision(IMAGE, ASK, model, **TEXT, **o)),
    "vision, stream": ("llava", lambda pool, model, o: list(pool.vision([IMAGE] * 2, ASK, model, stream=True, **TEXT,
                                                                        **o))),
    "submit vision": ("llava", lambda pool, model, o: pool.submit("vision", images=IMAGE, prompt=ASK, model=model,
                                                                  **TEXT, **o).result()),
    "Model.vision": ("llava", lambda pool, model, o: pool.get(model).vision(IMAGE, ASK, **TEXT, **o)),
    "aio.vision": ("llava", lambda pool, model, o: asyncio.run(awaited(aio.vision(IMAGE, ASK, model, pool=pool,
                                                                                  **TEXT, **o)))),
    "chat, images": ("llava", lambda pool, model, o: pool.chat(SEEN, model, **TEXT, **o)),
    "aio.chat, images": ("llava", lambda pool, model, o: asyncio.run(awaited(aio.chat(SEEN, model, pool=pool, **TEXT,
                                                                                      **o)))),
}
async def awaited(result: Any) -> Any:
    return await result
