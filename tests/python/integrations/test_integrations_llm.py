"""The plugin for the command llm: discovery, list of models, completions, streams, schemas, tools, images, vectors,
errors."""

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
import integrationexamples
from clientpackages import package

llm = package("llm", "llm")

import click.testing  # noqa: E402
from llm.cli import cli  # noqa: E402

from mpool.integrations import llm as plugin  # noqa: E402

RunCommand = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path, bert: Path) -> RunCommand:
    """Return a function that runs the command ``llm`` with an empty user folder and two small models."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def run_llm(*arguments: str, text: str | None = None, code: int = 0) -> str:
        done = click.testing.CliRunner().invoke(cli, list(arguments), input=text)
        assert done.exit_code == code, done.output
        return done.output

    assert run_llm("mpool", "add", "small", str(llama)) == "mpool/small was added, with the capability text_to_text\n"
    assert run_llm("mpool", "add", "vectors", str(bert)) \
        == "mpool/vectors was added, with the capability text_embedding\n"
    return run_llm


@pytest.mark.builds
def test_llm_discovers_the_plugin(tmp_path: Path) -> None:
    """A new process finds the plugin by its entry point. Listing models neither loads the core nor downloads files."""
    script = ("import sys, llm; models = [model.model_id for model in llm.get_models() if 'Mpool' in str(model)];"
              "print(*models); print(*[name for name in ('torch', 'mpool._core') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path,
                          env={"LLM_USER_PATH": str(tmp_path), "PATH": "", "MPOOL_OFFLINE": "1",
                               "MPOOL_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}, timeout=120)
    models, imported = done.stdout.splitlines()
    assert "mpool/SmolLM2-135M-Instruct" in models.split() and "mpool/digits-llava" in models.split()
    assert not imported


def test_chat(run: RunCommand, llama: Path) -> None:
    """Streamed and unstreamed completions with options equal mpool's. ``llm -c`` continues the conversation."""
    question = {"role": "user", "content": "A cat?"}
    expected = mpool.chat([{"role": "system", "content": "Short."}, question], str(llama), seed=3, max_tokens=12,
                          temperature=0.9)
    options = ("-o", "seed", "3", "-o", "max_tokens", "12", "-o", "temperature", "0.9")
    for more in ((), ("--no-stream",)):
        assert run("-m", "mpool/small", "A cat?", "-s", "Short.", *options, *more) == expected.text + "\n"
    first = mpool.chat([question], str(llama), seed=3, max_tokens=12)
    second = mpool.chat([question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "A dog?"}],
                        str(llama), seed=4, max_tokens=12)
    assert run("-m", "mpool/small", "A cat?", *options[:6]) == first.text + "\n"
    assert run("-c", "A dog?", "-o", "seed", "4", "-o", "max_tokens", "12") == second.text + "\n"
    logged = json.loads(run("logs", "-n", "1", "--json"))[0]
    assert (logged["input_tokens"], logged["output_tokens"]) == (second.usage.prompt_tokens,
                                                                 second.usage.completion_tokens)


def test_in_python(run: RunCommand, llama: Path) -> None:
    """Chunks, usage and metadata of the Python API, synchronous and asynchronous."""
    expected = mpool.chat([{"role": "user", "content": "A cat?"}], str(llama), seed=3, max_tokens=12)
    response = llm.get_model("mpool/small").prompt("A cat?", seed=3, max_tokens=12)
    chunks = list(response)
    assert "".join(chunks) == expected.text
    assert len(list(llm.get_model("mpool/small").prompt("A cat?", seed=3, max_tokens=1000, ignore_eos=True))) > 1
    assert response.usage().input == expected.usage.prompt_tokens and response.usage().output == 12
    assert response.response_json == {"finish_reason": "length", "seed": 3}

    async def both() -> tuple[str, str]:
        model = llm.get_async_model("mpool/small")
        streamed = "".join([chunk async for chunk in model.prompt("A cat?", seed=3, max_tokens=12)])
        return streamed, await model.prompt("A cat?", seed=3, max_tokens=12, stream=False).text()

    assert asyncio.run(both()) == (expected.text, expected.text)


def test_schemas(run: RunCommand) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
              "required": ["kind", "old"], "additionalProperties": False}
    found = json.loads(run("-m", "mpool/small", "?", "--schema", json.dumps(schema), "-o", "max_tokens", "500", "-o",
                           "seed", "3"))  # a model with random weights may generate many blanks
    assert found["kind"] in ("cat", "dog") and isinstance(found["old"], bool)


def test_tools(run: RunCommand, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``llm`` runs the requested tool call and returns its result to the model."""
    pytest.importorskip("llguidance")
    import toolmodels

    cities, conversations = [], []

    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "Sun."

    with mpool.Pool() as pool:
        model = pool.register("tools", llama, chat_template=toolmodels.HERMES)

        class RecordingPool:
            """Records the conversations. Forces a tool call in the first turn and forbids one in the second."""

            def chat(self, messages: Any, ref: str, **options: Any) -> Any:
                conversations.append(messages)
                choice = "required" if len(conversations) == 1 else "none"
                return pool.chat(messages, model, **options, tool_choice=choice, parallel_tool_calls=False)

        monkeypatch.setattr(plugin, "default_pool", RecordingPool)
        chain = llm.get_model("mpool/small").chain("Weather?", tools=[weather], options={"seed": 2, "max_tokens": 700})
        chain.text()
    assert len(cities) == 1 and len(conversations) == 2
    call, result = conversations[1][1:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": cities[0]}}
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "Sun."}


def test_images(run: RunCommand) -> None:
    """Completions and vectors of images, with the demo models of the package."""
    image = next((Path(mpool.__file__).parent / "demo_models" / "images").glob("*7*.png"))
    answer = run("-m", "mpool/digits-llava", "Which digit is this?", "-a", str(image), "-o", "temperature", "0")
    assert answer.strip() == mpool.vision(image, "Which digit is this?", "digits-llava", temperature=0).text.strip()
    assert "seven" in answer.lower() or "7" in answer
    rows = list(llm.get_embedding_model("mpool/digits-clip").embed_multi([image.read_bytes(), "the digit seven"]))
    assert np.allclose(rows[0], mpool.embed_image(image, "digits-clip"), atol=1e-6)
    assert np.allclose(rows[1], mpool.embed("the digit seven", "digits-clip"), atol=1e-6)


def test_embeddings(run: RunCommand, bert: Path) -> None:
    found = json.loads(run("embed", "-m", "mpool/vectors", "-c", "A cat sat."))
    assert np.allclose(found, mpool.embed("A cat sat.", str(bert)), atol=1e-6)
    texts = [f"A cat, number {number}." for number in range(300)]
    rows = list(llm.get_embedding_model("mpool/vectors").embed_multi(texts))
    assert np.allclose(rows, mpool.embed(texts, str(bert)), atol=1e-6)


def test_list_of_models(run: RunCommand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Added models are listed until they are removed. A corrupted list is ignored with a warning."""
    assert "mpool/small  text_to_text" in run("mpool", "list")
    refused = run("mpool", "add", "digits-llava", str(tmp_path), code=1)
    assert "`name` must be a name that is not in mpool's catalogue, got 'digits-llava'" in refused
    assert "`name` must be 1 to 128 letters, digits and . _ + -" in run("mpool", "add", "a/b", str(tmp_path), code=1)
    assert "nothing" in run("mpool", "add", "nothing", str(tmp_path / "nothing"), code=1)
    run("mpool", "remove", "small")
    assert "mpool/small" not in run("mpool", "list")
    assert "is not in the list of added models" in run("mpool", "remove", "small", code=1)
    for corrupted in ("{", "[1]", '{"x": {"ref": 3, "capability": "text_to_text"}}', '{"x": {"ref": "y"}}'):
        (tmp_path / "mpool.json").write_text(corrupted)
        caplog.clear()
        assert plugin.added_models() == [] and "cannot be read" in caplog.text
    assert "mpool/SmolLM2-135M-Instruct" in run("models")


def test_errors(run: RunCommand) -> None:
    """Errors are one line on the command line, and mpool's exceptions in Python."""
    assert "temprature" in run("-m", "mpool/small", "A cat?", "-o", "temprature", "1", code=1)
    assert "Error: small" not in run("-m", "mpool/small", "A cat?", "-o", "temperature", "-1", code=1)
    with pytest.raises(mpool.InvalidArgument, match="`temperature` must be a number from 0 .*, got -1"):
        llm.get_model("mpool/small").prompt("A cat?", temperature=-1).text()
    with pytest.raises(ValueError, match="does not support attachments"):
        llm.get_model("mpool/small").prompt("?", attachments=[llm.Attachment(content=b"x", type="image/png")]).text()


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("llm", "llm", tmp_path)
