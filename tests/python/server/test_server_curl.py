"""Lines of curl out of documentation, verbatim but for the address and for images. The models have the names that the
lines use.

Sources: Ollama's lines are those of ``docs/api.md`` of ollama/ollama at commit 948f6933 of 2026-08-11, but for
`FORMER`. Lines of OpenAI's API reference are those of ``openapi.yaml`` of openai/openai-openapi at commit f85dbe22 of
2026-08-21. That file has the placeholders of `PLACEHOLDERS` where the reference shows the name of a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest


from servers import serving
from test_server_fill_in import CHAINS, FIM, TEMPLATE

pytest.importorskip("llguidance")
if shutil.which("curl") is None and not os.environ.get("CI"):
    pytest.skip("needs curl", allow_module_level=True)

NAMES = ("llama3.2", "mistral", "llama3.1:8b", "llama3.1", "llava", "gpt-5.4", "gpt-3.5-turbo-instruct")
PLACEHOLDERS = {"VAR_chat_model_id": "gpt-5.4", "VAR_completion_model_id": "gpt-3.5-turbo-instruct"}
TOKENS = 60


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    coder = chainmodels.save(tmp_path_factory.mktemp("coder"), TEMPLATE, CHAINS, FIM)
    with serving([*(f"{name}={llama}" for name in NAMES), f"all-minilm={bert}", f"text-embedding-ada-002={bert}",
                  f"codellama:code={coder}"], default_max_tokens=TOKENS) as made:
        yield made


def run(server: Any, line: str, code: int = 0) -> str:
    """Run a line in a shell. Returns the body of the response. ``code``: exit code of curl, 22 for a refusal."""
    for address in ("http://localhost:11434", "https://api.openai.com"):
        line = line.replace(address, f"http://localhost:{server.port}")
    for placeholder, name in PLACEHOLDERS.items():
        line = line.replace(placeholder, name)
    done = subprocess.run(["bash", "-c", line.replace("curl ", "curl -s --fail-with-body --noproxy '*' ", 1)],
                          capture_output=True, text=True, timeout=60, env={**os.environ, "OPENAI_API_KEY": "sk-none"})
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def run_for_tokens(server: Any, line: str) -> str:
    """Run a line until its response has a token. Most lines have no temperature: the first token drawn may be the last.
    """
    for _ in range(5):
        body = run(server, line)
        if not re.search(r'"(eval_count|completion_tokens|output_tokens)": ?0\b', body):
            return body
    pytest.fail("five responses have no token")


def usage(found: dict[str, Any]) -> None:
    assert found["done"] and found["prompt_eval_count"] > 1 and 1 <= found["eval_count"] <= 100
    assert found["total_duration"] > found["eval_duration"] >= 0 and found["done_reason"] in ("stop", "length")


STREAMED = ["""
curl http://localhost:11434/api/generate -d '{
  "model": "mistral",
  "prompt": "Why is the sky blue?",
  "options": {
    "seed": 123
  }
}'""", """
curl http://localhost:11434/api/chat -d '{
  "model": "llama3.2",
  "messages": [
    {
      "role": "user",
      "content": "Hello!"
    }
  ],
  "options": {
    "seed": 101,
    "temperature": 0
  }
}'"""]


@pytest.mark.parametrize("line", STREAMED, ids=range(len(STREAMED)))
def test_streams_of_ollama(server: Any, line: str) -> None:
    """Every line of the stream is JSON; the last one has the counts; the text is that of the whole response."""
    chunks = [json.loads(one) for one in run_for_tokens(server, line).splitlines()]
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True] and len(chunks) > 1
    usage(chunks[-1])
    text = "".join(chunk.get("response", "") + chunk.get("message", {}).get("content", "") for chunk in chunks)
    whole = json.loads(run(server, line.replace('"options"', '"stream": false, "options"')))
    assert whole.get("response", "") + whole.get("message", {}).get("content", "") == text
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (chunks[-1]["prompt_eval_count"],
                                                                 chunks[-1]["eval_count"])


#: A line that an earlier ``docs/api.md`` had: with options that Ollama has removed since.
FORMER = """
curl http://localhost:11434/api/generate -d '{
  "model": "llama3.2",
  "prompt": "Why is the sky blue?",
  "stream": false,
  "options": {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "mirostat": 1,
    "mirostat_tau": 0.8,
    "mirostat_eta": 0.6,
    "penalize_newline": true,
    "stop": ["\\n", "user:"],
    "numa": false,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "low_vram": false,
    "vocab_only": false,
    "use_mmap": true,
    "use_mlock": false,
    "num_thread": 8
  }
}'"""
WHOLE = [FORMER, """
curl http://localhost:11434/api/generate -d '{
  "model": "mistral",
  "prompt": "[INST] why is the sky blue? [/INST]",
  "raw": true,
  "stream": false
}'"""]


@pytest.mark.parametrize("line", WHOLE, ids=range(len(WHOLE)))
def test_whole_responses_of_ollama(server: Any, line: str) -> None:
    found = json.loads(run_for_tokens(server, line))
    usage(found)
    assert isinstance(found["response"] if "generate" in line else found["message"]["content"], str)


def test_structured_outputs_of_ollama(server: Any) -> None:
    found = json.loads(run(server, """
curl -X POST http://localhost:11434/api/generate -H "Content-Type: application/json" -d '{
  "model": "llama3.1:8b",
  "prompt": "Ollama is 22 years old and is busy saving the world. Respond using JSON",
  "stream": false,
  "format": {
    "type": "object",
    "properties": {
      "age": {
        "type": "integer"
      },
      "available": {
        "type": "boolean"
      }
    },
    "required": [
      "age",
      "available"
    ]
  }
}'"""))
    usage(found)
    if found["done_reason"] == "stop":
        value = json.loads(found["response"])
        assert isinstance(value["age"], int) and isinstance(value["available"], bool)
    else:
        assert found["response"].lstrip().startswith("{")


def test_create_of_ollama(server: Any) -> None:
    """The new model has the system message, and no other form of creation is accepted."""
    line = """
curl http://localhost:11434/api/create -d '{
  "model": "mario",
  "from": "llama3.2",
  "system": "You are Mario from Super Mario Bros."
}'"""
    assert [json.loads(one) for one in run(server, line).splitlines()] == [{"status": "success"}]
    ask = """
curl http://localhost:11434/api/chat -d '{"model": "mario", "messages": [{"role": "user", "content": "Hello!"}],
  "stream": false, "options": {"temperature": 0}}'"""
    said = json.loads(run(server, ask))
    messages = [{"role": "system", "content": "You are Mario from Super Mario Bros."},
                {"role": "user", "content": "Hello!"}]
    wanted = server.state.pool.chat(messages, "llama3.2", temperature=0, max_tokens=TOKENS)
    assert said["message"]["content"] == wanted.text and said["prompt_eval_count"] == wanted.usage.prompt_tokens
    assert run(server, """curl -X DELETE http://localhost:11434/api/delete -d '{"model": "mario"}'""") == ""
    quantize = """
curl http://localhost:11434/api/create -d '{
  "model": "llama3.2:quantized",
  "from": "llama3.2:3b-instruct-fp16",
  "quantize": "q4_K_M"
}'"""
    assert "`quantize` is not supported." in json.loads(run(server, quantize, 22))["error"]


def test_models_of_ollama(server: Any) -> None:
    load = """
curl http://localhost:11434/api/generate -d '{
  "model": "llama3.2"
}'"""
    assert json.loads(run(server, load))["done_reason"] == "load"
    listed = json.loads(run(server, "curl http://localhost:11434/api/ps"))["models"]
    assert "llama3.2" in [row["name"] for row in listed]
    found = json.loads(run(server, """
curl http://localhost:11434/api/chat -d '{
  "model": "llama3.2",
  "messages": [],
  "keep_alive": 0
}'"""))
    assert found["done_reason"] == "unload" and found["message"] == {"role": "assistant", "content": ""}
    assert {row["name"] for row in json.loads(run(server, "curl http://localhost:11434/api/tags"))["models"]} >= {
        *NAMES, "all-minilm"}
    assert json.loads(run(server, """
curl http://localhost:11434/api/show -d '{
  "model": "llava"
}'"""))["details"]["family"] == "llama"
    copy = """
curl http://localhost:11434/api/copy -d '{
  "source": "llama3.2",
  "destination": "llama3-backup"
}'"""
    assert run(server, copy) == run(server, copy.replace("llama3-backup", "llama3:13b")) == ""
    delete = """
curl -X DELETE http://localhost:11434/api/delete -d '{
  "model": "llama3:13b"
}'"""
    assert run(server, delete) == ""
    listed = {row["name"] for row in json.loads(run(server, "curl http://localhost:11434/api/tags"))["models"]}
    assert "llama3:13b" not in listed and any(name.startswith("llama3-backup") for name in listed)
    assert run(server, delete.replace("llama3:13b", "llama3-backup")) == ""


def test_lines_of_openai(server: Any) -> None:
    pool = server.state.pool
    found = json.loads(run(server, """
curl https://api.openai.com/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -d '{
    "model": "VAR_chat_model_id",
    "messages": [
      {
        "role": "developer",
        "content": "You are a helpful assistant."
      },
      {
        "role": "user",
        "content": "Hello!"
      }
    ]
  }'"""))
    choice, counts = found["choices"][0], found["usage"]
    assert found["object"] == "chat.completion" and choice["message"]["role"] == "assistant" and choice["index"] == 0
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert counts["prompt_tokens"] == pool.chat([{"role": "system", "content": "You are a helpful assistant."},
                                                 {"role": "user", "content": "Hello!"}], "gpt-5.4",
                                                max_tokens=1).usage.prompt_tokens
    found = json.loads(run(server, """
curl https://api.openai.com/v1/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -d '{
    "model": "VAR_completion_model_id",
    "prompt": "Say this is a test",
    "max_tokens": 7,
    "temperature": 0
  }'"""))
    wanted = pool.generate("Say this is a test", "gpt-3.5-turbo-instruct", max_tokens=7, temperature=0)
    assert found["choices"][0]["text"] == wanted.text
    assert found["usage"]["completion_tokens"] == wanted.usage.completion_tokens
    found = json.loads(run(server, """
curl https://api.openai.com/v1/embeddings \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{
    "input": "The food was delicious and the waiter...",
    "model": "text-embedding-ada-002",
    "encoding_format": "float"
  }'"""))
    assert found["data"][0]["embedding"] == pool.embed("The food was delicious and the waiter...",
                                                       "text-embedding-ada-002").tolist()
    found = json.loads(run_for_tokens(server, """
curl https://api.openai.com/v1/responses \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -d '{
    "model": "gpt-5.4",
    "input": "Tell me a three sentence bedtime story about a unicorn."
  }'"""))
    assert found["object"] == "response" and found["output"][0]["content"][0]["type"] == "output_text"
    assert found["usage"]["output_tokens"] <= TOKENS
    found = json.loads(run(server, """
curl https://api.openai.com/v1/models \\
  -H "Authorization: Bearer $OPENAI_API_KEY"
"""))
    assert {row["id"] for row in found["data"]} >= set(NAMES)
