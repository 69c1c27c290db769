"""The plugin of the command llm: found by it; models on offer, answers, streams, schemas, images, vectors, faults."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

llm = pytest.importorskip("llm")

import click.testing  # noqa: E402
from llm.cli import cli  # noqa: E402

from mpool.integrations import llm as plugin  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path, bert: Path) -> Run:
    """The command, with a folder of its own and two small models."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def runs(*arguments: str, text: str | None = None, code: int = 0) -> str:
        done = click.testing.CliRunner().invoke(cli, list(arguments), input=text)
        assert done.exit_code == code, done.output
        return done.output

    assert runs("mpool", "add", "small", str(llama)) == "mpool/small is a model of text_to_text\n"
    assert runs("mpool", "add", "vectors", str(bert)) == "mpool/vectors is a model of text_embedding\n"
    return runs


def test_llm_finds_it(tmp_path: Path) -> None:
    """By the entry point, in a process of its own; a list neither loads the core nor fetches anything."""
    script = ("import sys, llm; models = [model.model_id for model in llm.get_models() if 'Mpool' in str(model)];"
              "print(*models); print(*[name for name in ('torch', 'mpool._core') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path,
                          env={"LLM_USER_PATH": str(tmp_path), "PATH": "", "MPOOL_OFFLINE": "1",
                               "MPOOL_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}, timeout=120)
    models, heavy = done.stdout.splitlines()
    assert "mpool/SmolLM2-135M-Instruct" in models.split() and "mpool/digits-llava" in models.split()
    assert not heavy


def test_chat(run: Run, llama: Path) -> None:
    """Streamed and whole, with options; a conversation goes on where it was."""
    asked = {"role": "user", "content": "A cat?"}
    expected = mpool.chat([{"role": "system", "content": "Short."}, asked], str(llama), seed=3, max_tokens=12,
                          temperature=0.9)
    options = ("-o", "seed", "3", "-o", "max_tokens", "12", "-o", "temperature", "0.9")
    for more in ((), ("--no-stream",)):
        assert run("-m", "mpool/small", "A cat?", "-s", "Short.", *options, *more) == expected.text + "\n"
    first = mpool.chat([asked], str(llama), seed=3, max_tokens=12)
    second = mpool.chat([asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": "A dog?"}],
                        str(llama), seed=4, max_tokens=12)
    assert run("-m", "mpool/small", "A cat?", *options[:6]) == first.text + "\n"
    assert run("-c", "A dog?", "-o", "seed", "4", "-o", "max_tokens", "12") == second.text + "\n"
    logged = json.loads(run("logs", "-n", "1", "--json"))[0]
    assert (logged["input_tokens"], logged["output_tokens"]) == (second.usage.prompt_tokens,
                                                                 second.usage.completion_tokens)


def test_in_python(run: Run, llama: Path) -> None:
    """Pieces as they come, what was used, and the same for asyncio."""
    expected = mpool.chat([{"role": "user", "content": "A cat?"}], str(llama), seed=3, max_tokens=12)
    response = llm.get_model("mpool/small").prompt("A cat?", seed=3, max_tokens=12)
    pieces = list(response)
    assert "".join(pieces) == expected.text
    assert len(list(llm.get_model("mpool/small").prompt("A cat?", seed=3, max_tokens=1000, ignore_eos=True))) > 1
    assert response.usage().input == expected.usage.prompt_tokens and response.usage().output == 12
    assert response.response_json == {"finish_reason": "length", "seed": 3}

    async def both() -> tuple[str, str]:
        model = llm.get_async_model("mpool/small")
        streamed = "".join([piece async for piece in model.prompt("A cat?", seed=3, max_tokens=12)])
        return streamed, await model.prompt("A cat?", seed=3, max_tokens=12, stream=False).text()

    assert asyncio.run(both()) == (expected.text, expected.text)


def test_schemas(run: Run) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
              "required": ["kind", "old"], "additionalProperties": False}
    found = json.loads(run("-m", "mpool/small", "?", "--schema", json.dumps(schema), "-o", "max_tokens", "500", "-o",
                           "seed", "3"))  # a model of random weights may like nothing better than blanks
    assert found["kind"] in ("cat", "dog") and isinstance(found["old"], bool)


def test_tools(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the model asks for is made, and its result goes back to it."""
    pytest.importorskip("llguidance")
    import toolmodels

    cities, asked = [], []

    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "Sun."

    with mpool.Pool() as pool:
        model = pool.register("tools", llama, chat_template=toolmodels.HERMES)

        class Watched:
            """The pool, which has to call in the first turn and may not in the second."""

            def chat(self, messages: Any, ref: str, **options: Any) -> Any:
                asked.append(messages)
                choice = "required" if len(asked) == 1 else "none"
                return pool.chat(messages, model, **options, tool_choice=choice, parallel_tool_calls=False)

        monkeypatch.setattr(plugin, "default_pool", Watched)
        chain = llm.get_model("mpool/small").chain("Weather?", tools=[weather], options={"seed": 2, "max_tokens": 700})
        chain.text()
    assert len(cities) == 1 and len(asked) == 2
    call, result = asked[1][1:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": cities[0]}}
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "Sun."}


def test_images(run: Run) -> None:
    """Of a model that comes with mpool."""
    image = next((Path(mpool.__file__).parent / "demo_models" / "images").glob("*7*.png"))
    said = run("-m", "mpool/digits-llava", "Which digit is this?", "-a", str(image), "-o", "temperature", "0")
    assert said.strip() == mpool.vision(image, "Which digit is this?", "digits-llava", temperature=0).text.strip()
    assert "seven" in said.lower() or "7" in said
    rows = list(llm.get_embedding_model("mpool/digits-clip").embed_multi([image.read_bytes(), "the digit seven"]))
    assert np.allclose(rows[0], mpool.embed_image(image, "digits-clip"), atol=1e-6)
    assert np.allclose(rows[1], mpool.embed("the digit seven", "digits-clip"), atol=1e-6)


def test_embeddings(run: Run, bert: Path) -> None:
    found = json.loads(run("embed", "-m", "mpool/vectors", "-c", "A cat sat."))
    assert np.allclose(found, mpool.embed("A cat sat.", str(bert)), atol=1e-6)
    texts = [f"A cat, number {number}." for number in range(300)]
    rows = list(llm.get_embedding_model("mpool/vectors").embed_multi(texts))
    assert np.allclose(rows, mpool.embed(texts, str(bert)), atol=1e-6)


def test_list_of_models(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is added is on offer until it is removed; a list that is damaged does no harm."""
    assert "mpool/small  text_to_text" in run("mpool", "list")
    refused = run("mpool", "add", "digits-llava", str(tmp_path), code=1)
    assert "`name` must not be a key of the catalogue, got 'digits-llava'" in refused
    assert "`name` must be 1 to 128 letters, digits and . _ + -" in run("mpool", "add", "a/b", str(tmp_path), code=1)
    assert "nothing" in run("mpool", "add", "nothing", str(tmp_path / "nothing"), code=1)
    run("mpool", "remove", "small")
    assert "mpool/small" not in run("mpool", "list")
    assert "was not added" in run("mpool", "remove", "small", code=1)
    for damaged in ("{", "[1]", '{"x": {"ref": 3, "capability": "text_to_text"}}', '{"x": {"ref": "y"}}'):
        (tmp_path / "mpool.json").write_text(damaged)
        caplog.clear()
        assert plugin.added() == [] and "cannot be read" in caplog.text
    assert "mpool/SmolLM2-135M-Instruct" in run("models")


def test_faults(run: Run) -> None:
    """Said in a line, without a traceback."""
    assert "temprature" in run("-m", "mpool/small", "A cat?", "-o", "temprature", "1", code=1)
    assert "Error: small" not in run("-m", "mpool/small", "A cat?", "-o", "temperature", "-1", code=1)
    with pytest.raises(mpool.InvalidArgument, match="temperature is -1"):
        llm.get_model("mpool/small").prompt("A cat?", temperature=-1).text()
    with pytest.raises(ValueError, match="does not support attachments"):
        llm.get_model("mpool/small").prompt("?", attachments=[llm.Attachment(content=b"x", type="image/png")]).text()
