"""Every public function and command that computes goes through the pool: its requests are counted, its memory is
charged, and an open breaker refuses it. New functions need a row here."""

from __future__ import annotations

import asyncio
import http.server
import inspect
import io
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio, cli
from poolcalls import IMAGE, SMALL, WAYS, awaited

Entry = Callable[[mpool.Pool, str, dict[str, Any]], Any]
BAD = "z"
DEMO = Path(mpool.__file__).parent / "demo_models"
DIGIT = str(DEMO / "images" / "7.png")


def _default(call: Callable[..., Any]) -> Entry:
    """Return an entry for a function of the module. The fixture `pool` replaces the process-wide pool."""
    return lambda pool, model, options: call(model, options)


TEXT: dict[str, Any] = dict(temperature=0, max_tokens=2, ignore_eos=True)
USER = [{"role": "user", "content": "Hello"}]
#: Name -> kind of model, function. The methods of pools and models and the functions of aio come from `poolcalls`.
ENTRIES: dict[str, tuple[str, Entry]] = {
    **{f"Pool: {name}" if name[:1].islower() and not name.startswith("aio") else name: way
       for name, way in WAYS.items()},
    "mpool.embed": ("bert", _default(lambda model, o: mpool.embed("a", model, **o))),
    "mpool.embed_iter": ("bert", _default(lambda model, o: list(mpool.embed_iter(["a"], model, **o)))),
    "mpool.generate_image": ("flux", _default(lambda model, o: mpool.generate_image("a", model, **SMALL, **o))),
    "mpool.generate": ("llama", _default(lambda model, o: mpool.generate("a", model, **TEXT, **o))),
    "mpool.chat": ("llama", _default(lambda model, o: mpool.chat(USER, model, **TEXT, **o))),
    "mpool.submit": ("bert", _default(lambda model, o: mpool.submit("text_embedding", inputs="a", model=model,
                                                                    **o).result())),
    "Model.check": ("bert", _default(lambda model, o: mpool.get(model).check())),
    "check of a text model": ("llama", _default(lambda model, o: mpool.get(model).check())),
    "await of a job": ("bert", lambda pool, model, o: asyncio.run(awaited(
        pool.submit("text_embedding", inputs="a", model=model, **o)))),
    "mpool embed": ("bert", lambda pool, model, o: _command("embed", "--model", model, "a", "b")),
    "mpool.embed_image": ("dino", _default(lambda model, o: mpool.embed_image(IMAGE, model, **o))),
    "check of a vision model": ("llava", _default(lambda model, o: mpool.get(model).check())),
    "check of an image generation model": ("flux", _default(lambda model, o: mpool.get(model).check())),
    "check of an image model": ("dino", _default(lambda model, o: mpool.get(model).check())),
    "mpool embed-image": ("dino", lambda pool, model, o: _command("embed-image", "--model", model, _image_file())),
    "mpool.rerank": ("ranker", _default(lambda model, o: mpool.rerank("a", ["b"], model, **o))),
    "mpool rerank": ("ranker", lambda pool, model, o: _command("rerank", "--model", model, "a", "b")),
    "mpool.classify": ("ranker", _default(lambda model, o: mpool.classify("b", model, **o))),
    "mpool classify": ("ranker", lambda pool, model, o: _command("classify", "--model", model, "a", "b")),
    "mpool.classify_tokens": ("tagger", _default(lambda model, o: mpool.classify_tokens("b", model, **o))),
    "mpool.embed_sparse": ("m3", _default(lambda model, o: mpool.embed_sparse("a", model, **o))),
    "mpool.embed_tokens": ("m3", _default(lambda model, o: mpool.embed_tokens("a", model, **o))),
    "mpool.embed_all": ("m3", _default(lambda model, o: mpool.embed_all("a", model, **o))),
    **{f"mpool embed --vectors {name}": ("m3", lambda pool, model, o, name=name: _command(
        "embed", "--model", model, "--vectors", name, "a", "b")) for name in ("sparse", "tokens", "all")},
    "mpool classify --tokens": ("tagger", lambda pool, model, o: _command("classify", "--tokens", "--model", model,
                                                                          "a", "b")),
    "mpool search": ("bert", lambda pool, model, o: _command("search", "--model", model, "a", "b")),
    "mpool generate-image": ("flux", lambda pool, model, o: _generated("--model", model, "--width", str(SMALL["width"]),
                                                                   "--height", str(SMALL["height"]), "a")),
    "mpool generate": ("llama", lambda pool, model, o: _command("generate", "--model", model, "--max-tokens", "2",
                                                                "a")),
    "mpool generate --json": ("llama", lambda pool, model, o: _command("generate", "--json", "--model", model,
                                                                       "--max-tokens", "2", "a")),
    "mpool.vision": ("llava", _default(lambda model, o: mpool.vision(DIGIT, "Which digit?", model, **TEXT, **o))),
    "mpool.describe_image": ("llava", _default(lambda model, o: mpool.describe_image(DIGIT, model=model, **TEXT))),
    "aio.describe_image": ("llava", lambda pool, model, o: asyncio.run(aio.describe_image(DIGIT, model=model, pool=pool,
                                                                                          **TEXT))),
    "Model.describe_image": ("llava", lambda pool, model, o: pool.get(model).describe_image(DIGIT, **TEXT)),
    "Model.describe_url": ("llava", lambda pool, model, o: _served(
        lambda url: pool.get(model).describe_url(url, **TEXT))),
    "mpool.describe_url": ("llava", lambda pool, model, o: _served(
        lambda url: mpool.describe_url(url, model=model, **TEXT))),
    "aio.describe_url": ("llava", lambda pool, model, o: _served(
        lambda url: asyncio.run(aio.describe_url(url, model=model, pool=pool, **TEXT)))),
    "mpool vision": ("llava", lambda pool, model, o: _command("vision", "--model", model, "--max-tokens", "2",
                                                              "--image", DIGIT, "Which digit?")),
    "mpool capture": ("llama", lambda pool, model, o: _captured("--model", model, "--max-tokens", "2", "--prompt",
                                                                "a")),
    "mpool chat": ("llama", lambda pool, model, o: _command("chat", "--model", model, "--max-tokens", "2")),
    "mpool run": ("llama", lambda pool, model, o: _command("run", model, "--max-tokens", "2", "a")),
}
#: Public functions that compute, by module or class. All others must be in OTHERS.
OUTPUTS = {"embed_sparse", "embed_tokens", "embed_all"}
COMPUTES = {"mpool": {*OUTPUTS, "embed", "embed_iter", "embed_image", "rerank", "classify", "classify_tokens",
                      "generate", "generate_image", "chat", "submit", "vision", "describe_image", "describe_url"},
            "aio": {*OUTPUTS, "embed", "embed_iter", "embed_image", "rerank", "classify", "classify_tokens", "generate",
                    "generate_image", "chat", "vision", "describe_image", "describe_url"},
            "Model": {*OUTPUTS, "embed", "batch_embed", "embed_iter", "embed_image", "rerank", "classify",
                      "classify_tokens", "generate", "generate_image", "chat", "check", "vision", "describe_image",
                      "describe_url"}}
OTHERS = {"mpool": {"get", "load", "unload", "register", "ps", "count_tokens", "tokenize", "detokenize", "similarity",
                    "semantic_search", "swap", "maxsim", "show_config", "metrics", "health", "init_maintenance",
                    "begin_shutdown"},
          "aio": {"load", "swap", "unload"},
          "Model": {"count_tokens", "tokenize", "detokenize", "unload", "ping", "changed_file", "description_of",
                    "is_current", "set_adapters", "with_compute"}}


#: Commands without a row. `demo` needs models of the catalogue. `demo`, `serve`, `worker` and `ray` call methods of a
#: pool that have rows.
OTHER_COMMANDS = {"completion", "demo", "list", "ls", "models", "ps", "pull", "quantize", "ray", "rm", "show", "serve",
                  "stop", "worker"}


def _image_file() -> str:
    """Return an image as a data URL."""
    import base64

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(IMAGE).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _served(call: Callable[[str], Any]) -> Any:
    """Call a function with the URL of an image of a digit on a local server."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = Path(DIGIT).read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            return call(f"http://127.0.0.1:{server.server_address[1]}/digit.png")
        finally:
            server.shutdown()


class _Failed(Exception):
    """A command that failed."""


def _command(*arguments: str) -> None:
    if cli.main(list(arguments)) != 0:
        raise _Failed


def _captured(*arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _command("capture", *arguments, "--out", str(Path(folder) / "run.jsonl"))


def test_the_table_is_complete() -> None:
    """Every public function is in COMPUTES or OTHERS, and every one in COMPUTES has a row."""
    public = {"mpool": {name for name in mpool.__all__ if inspect.isfunction(getattr(mpool, name))},
              "aio": {name for name in aio.__all__ if not inspect.isclass(getattr(aio, name))},
              "Model": {name for name, value in {name: getattr(mpool.Model, name) for name in dir(mpool.Model)}.items()
                        if not name.startswith("_") and inspect.isfunction(value)}}
    for place, names in public.items():
        assert names == COMPUTES[place] | OTHERS[place], place
        for name in COMPUTES[place]:
            assert any(row.startswith(f"{place}.{name}") for row in ENTRIES), f"{place}.{name} has no row"
    from mpool.cli.parser import make_parser

    commands = next(iter(make_parser()._subparsers._group_actions)).choices  # type: ignore[union-attr]
    assert set(commands) == OTHER_COMMANDS | {"embed", "embed-image", "search", "rerank", "classify", "generate",
                                               "generate-image", "chat", "run", "vision", "capture"}
    assert all(f"mpool {name}" in ENTRIES for name in set(commands) - OTHER_COMMANDS)


def _generated(*arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _command("generate-image", *arguments, "--output", str(Path(folder) / "image.png"))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[mpool.Pool]:
    """A pool that is used as the process-wide pool and as the pool of commands."""
    from mpool.api import functions as _runtime
    from mpool.cli import capturing, classifying, embedding, imaging, searching, talking

    # With its own memory limit, the pool does not share its byte counts with other pools.
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=1,
                                     memory_bytes=2**31)) as made:
        monkeypatch.setattr(_runtime, "_default", made)
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))

        class Kept:
            """A context manager that returns the pool and does not close it."""

            def __enter__(self) -> mpool.Pool:
                return made

            def __exit__(self, *error: object) -> None:
                pass

        for module in (capturing, classifying, embedding, imaging, searching, talking):
            monkeypatch.setattr(module, "make_pool", lambda arguments: Kept())
        yield made


@pytest.fixture(scope="module")
def poisoned(bert: Path, llama: Path, dino: Path, flux: Path, ranker: Path, llava: Path, m3: Path,
             tagger: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """Models for which an input gives NaN: kind -> folder, token."""
    from safetensors.numpy import load_file, save_file

    found = {}
    for kind, source in (("bert", bert), ("llama", llama)):
        folder = tmp_path_factory.mktemp("poisoned") / kind
        shutil.copytree(source, folder)
        weights = load_file(str(folder / "model.safetensors"))
        name = next(name for name in weights if "word_embeddings" in name or "embed_tokens" in name)
        with mpool.Pool() as own:
            token = own.tokenize(BAD, str(folder), add_special=False)[0]
        weights[name] = weights[name].copy()
        weights[name][token] = np.nan
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        found[kind] = str(folder), token
    for kind, source, name in (("dino", dino, "layernorm.bias"), ("ranker", ranker, "classifier.bias"),
                               ("tagger", tagger, "classifier.bias"),
                               ("m3", m3, "encoder.layer.1.output.LayerNorm.bias")):
        folder = tmp_path_factory.mktemp("poisoned") / kind
        shutil.copytree(source, folder)
        weights = load_file(str(folder / "model.safetensors"))
        weights[name] = np.full_like(weights[name], np.nan)  # every image, pair or text gives NaN
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        found[kind] = str(folder), 0
    folder = tmp_path_factory.mktemp("poisoned") / "llava"
    shutil.copytree(llava, folder)
    weights = load_file(str(folder / "model.safetensors"))
    name = next(name for name in weights if name.endswith("model.norm.weight"))
    weights[name] = np.full_like(weights[name], np.nan)  # every completion fails because of NaN
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    found["llava"] = str(folder), 0
    folder = tmp_path_factory.mktemp("poisoned") / "flux"
    shutil.copytree(flux, folder)
    path = str(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    weights = load_file(path)
    weights["proj_out.bias"] = np.full_like(weights["proj_out.bias"], np.nan)  # every image fails because of NaN
    save_file(weights, path, metadata={"format": "pt"})
    found["flux"] = str(folder), 0
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ENTRIES)
def test_every_function_goes_through_the_pool(name: str, pool: mpool.Pool, request: pytest.FixtureRequest) -> None:
    kind, entry = ENTRIES[name]
    before = pool.metrics()
    assert before["total_requests"] == 0 and before["memory_used"] == 0
    entry(pool, str(request.getfixturevalue(kind)), {})
    after = pool.metrics()
    assert after["total_requests"] == after["completed"] > 0
    assert after["memory_used"] > 0 and after["loads"] == 1 and after["workers_spawned"] == 1
    (model,) = after["models"].values()
    assert model["calls"] == model["latency"]["count"] == after["completed"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ENTRIES)
def test_an_open_breaker_refuses_every_function(name: str, pool: mpool.Pool, poisoned: dict[str, tuple[str, int]],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    kind, entry = ENTRIES[name]
    folder, token = poisoned[kind]
    with pytest.raises(mpool.NumericError):
        if kind == "bert":
            pool.embed(BAD, folder)
        elif kind == "dino":
            pool.embed_image(IMAGE, folder)
        elif kind == "ranker":
            pool.rerank("a", ["b"], folder)
        elif kind == "tagger":
            pool.classify_tokens("a", folder)
        elif kind == "m3":
            pool.embed_all("a", folder)
        elif kind == "llava":
            pool.vision(DIGIT, "Which digit?", folder, **TEXT)
        elif kind == "flux":
            pool.generate_image("a", folder, **SMALL)
        else:
            pool.generate([token], folder, **TEXT)
    assert pool.ps()[0].breaker == "open"
    before = pool.metrics()
    with pytest.raises((mpool.CircuitOpen, _Failed)) as refused:
        entry(pool, folder, {})
    after = pool.metrics()
    assert after["circuit_rejections"] > before["circuit_rejections"] and after["completed"] == before["completed"]
    message = capsys.readouterr().err if refused.type is _Failed else str(refused.value)
    assert "breaker" in message
    assert refused.type is _Failed or refused.value.key == folder
