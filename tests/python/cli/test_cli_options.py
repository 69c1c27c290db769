"""Every option of a command reaches the library, and a command without options passes the documented defaults. The
library is a recorder here; test_cli.py runs the commands with models."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpool import PoolConfig
from mpool.cli import capturing, embedding, main, talking
from mpool.cli.parser import make_parser
from mpool.results import Chunk, Completion, Timings, Usage
from mpool.tasks.sampling import TABLE
from commandimages import image_files as image_files

#: Sampling options as arguments -> as options of the library.
SAMPLED: dict[str, tuple[list[str], Any]] = {
    "temperature": (["--temperature", "0.3"], 0.3), "top_k": (["--top-k", "7"], 7), "top_p": (["--top-p", "0.4"], 0.4),
    "min_p": (["--min-p", "0.2"], 0.2), "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "presence_penalty": (["--presence-penalty", "0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty", "0.6"], 0.6), "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2), "seed": (["--seed", "11"], 11), "ignore_eos": (["--ignore-eos"], True),
    "stop": (["--stop", "a", "--stop", "b"], ["a", "b"]),
    "stop_token_ids": (["--stop-token-id", "3", "--stop-token-id", "4"], [3, 4]),
    "logit_bias": (["--logit-bias", "5=1.5"], {"5": 1.5})}
GIVEN = [part for arguments, _ in SAMPLED.values() for part in arguments]
SAMPLING = {name: value for name, (_, value) in SAMPLED.items()}


#: Command -> capability of its default model; text_to_text: the others.
CAPABILITIES = {"vision": "vision", "embed": "text_embedding", "embed-image": "image_embedding"}


class Recorder:
    """A pool, model and stream that records calls: (name, arguments, options)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.key, self.config = "model", PoolConfig()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Any:
        return iter([Chunk("text")])

    def close(self) -> None:
        """Do nothing: the interface of a stream."""

    def result(self) -> Any:
        """Return a completion."""
        return Completion("text", "stop", None, (), None, Usage(1, 1), Timings(0, 0, 0, 0), "model", 0, ())

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            if name == "embed_iter":
                return iter([np.zeros((len(list(arguments[0])), 2), np.float32)])
            if name.startswith("embed"):
                return np.zeros((len(arguments[0]), 2), np.float32)
            return self if options.get("stream") or name == "load" else self.result()

        return call


def last_call(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> tuple[str, Any, dict[str, Any]]:
    """Run a command with a recorder. Check that the model ``x``, or else the default model, was loaded with the compute
    type. Return the last call."""
    recorder = Recorder()
    for module in (talking, embedding, capturing):
        monkeypatch.setattr(module, "make_pool", lambda _: recorder)
        monkeypatch.setattr(module, "default_model", "default-model-of-{}".format)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    parsed = make_parser().parse_args(arguments)
    assert parsed.run(parsed) == 0
    capability = CAPABILITIES.get(arguments[0], "text_to_text")
    assert recorder.calls[0][0] == "load" and recorder.calls[0][2]["compute"] == parsed.compute
    assert recorder.calls[0][1] == (parsed.model or f"default-model-of-{capability}",)
    return recorder.calls[-1]


@pytest.mark.parametrize(("command", "required"), [
    ("run", "MODEL"), ("rerank", "query"), ("search", "query"), ("quantize", "IN, OUT, --type"),
    ("classify", "-m/--model")])
def test_errors_name_required_arguments_only(capsys: pytest.CaptureFixture[str], command: str, required: str) -> None:
    """Arguments that standard input can replace are not required."""
    with pytest.raises(SystemExit):
        make_parser().parse_args([command])
    assert f"the following arguments are required: {required}\n" in capsys.readouterr().err


def test_every_sampling_option_is_here() -> None:
    assert {*SAMPLED, "n", "logprobs", "top_logprobs"} >= set(TABLE)


@pytest.mark.parametrize("command, name", [(["generate", "-m", "x", "p"], "generate"),
                                           (["vision", "-m", "x", "-i", "a.png", "p"], "vision"),
                                           (["chat", "-m", "x"], "chat")])
def test_options_of_text(monkeypatch: pytest.MonkeyPatch, command: list[str], name: str) -> None:
    more = {"generate": {"parse_special": True}, "vision": {"allow_urls": True}, "chat": {}}[name]
    flags = ["--" + flag.replace("_", "-") for flag in more]
    numbers = {"image_tokens": 140} if name == "vision" else {}
    given = [word for key, value in numbers.items() for word in ("--" + key.replace("_", "-"), str(value))]
    called, _, options = last_call(monkeypatch, *command, *GIVEN, *flags, *given, "--compute", "float32", stdin="Hi\n")
    assert (called, options) == (name, {**SAMPLING, **more, **numbers, "compute": "float32", "stream": True})
    called, _, options = last_call(monkeypatch, *command, stdin="Hi\n")
    assert (called, options) == (name, {**dict.fromkeys(more, False), "compute": "auto", "stream": True})


def test_chat_keeps_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/clear`` deletes the conversation, not the system message."""
    _, (messages, _), _ = last_call(monkeypatch, "chat", "-m", "x", "--system", "s", stdin="a\nb\n/clear\nc\n")
    assert [(message["role"], message["content"]) for message in messages] == [("system", "s"), ("user", "c")]


@pytest.mark.parametrize(("option", "value", "wanted"), [
    ("--max-tokens", "1e3", "must be an integer, or none, got '1e3'"),
    ("--logit-bias", "5=x", "must be ID=VALUE with a number as VALUE, got '5=x'"),
    ("--logit-bias", "x=5", "must be ID=VALUE, got 'x=5'")])
def test_values_that_are_no_numbers(capsys: pytest.CaptureFixture[str], option: str, value: str, wanted: str) -> None:
    """The message says what an option takes, without a name of the parser's functions."""
    with pytest.raises(SystemExit):
        main(["generate", "x", option, value])
    assert f"argument {option}: {wanted}" in capsys.readouterr().err


def test_options_of_embed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = ["-o", str(tmp_path / "out.jsonl")]
    _, (texts, model), options = last_call(monkeypatch, "embed", "-m", "x", "a", "b", *out)
    assert model == "x" and options == {
        "task": None, "prompt": None, "prompt_name": None, "dimensions": None, "normalize": None,
        "precision": "float32", "compute": "auto", "on_error": "raise", "truncate": True, "batch_size": 256,
        "progress": False, "output": "dense", "max_active": None, "adapter": None}
    _, _, options = last_call(
        monkeypatch, "embed", "-m", "x", "a", "--prompt-name", "n", "--dimensions", "3", "--no-normalize",
        "--precision", "ubinary", "--compute", "int8", "--on-error", "raise", "--no-truncate", *out)
    assert options == {
        "task": None, "prompt": None, "prompt_name": "n", "dimensions": 3, "normalize": False, "precision": "ubinary",
        "compute": "int8", "on_error": "raise", "truncate": False, "batch_size": 256, "progress": False,
        "output": "dense", "max_active": None, "adapter": None}
    _, _, options = last_call(monkeypatch, "embed", "-m", "x", "a", "--task", "query", "--normalize", *out)
    assert options["task"] == "query" and options["normalize"] is True
    assert last_call(monkeypatch, "embed", "-m", "x", "a", "--prompt", "p", *out)[2]["prompt"] == "p"
    assert last_call(monkeypatch, "embed", "-m", "x", "a", "--on-error", "null", *out)[2]["on_error"] == "null"
    assert last_call(monkeypatch, "embed", "-m", "x", "a", "--adapter", "n", *out)[2]["adapter"] == "n"


def test_options_of_embed_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = ["-o", str(tmp_path / "out.jsonl")]
    _, _, options = last_call(monkeypatch, "embed-image", "-m", "x", "a.png", *out)
    assert options == {"dimensions": None, "normalize": None, "precision": "float32", "compute": "auto",
                       "on_error": "raise", "allow_urls": False, "max_inputs": 1, "progress": False}
    _, _, options = last_call(
        monkeypatch, "embed-image", "-m", "x", "a.png", "b.png", "--dimensions", "3", "--no-normalize", "--precision",
        "int8", "--compute", "float32", "--on-error", "raise", "--allow-urls", *out)
    assert options == {"dimensions": 3, "normalize": False, "precision": "int8", "compute": "float32",
                       "on_error": "raise", "allow_urls": True, "max_inputs": 2, "progress": False}


@pytest.mark.parametrize("command", [["generate", "p"], ["vision", "-i", "a.png", "p"], ["chat"], ["embed", "a"],
                                     ["embed-image", "a.png"]], ids=lambda command: command[0])
def test_commands_without_a_model_use_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  command: list[str]) -> None:
    out = ["-o", str(tmp_path / "out.jsonl")] if command[0].startswith("embed") else []
    last_call(monkeypatch, *command, *out, stdin="Hi\n")


def test_options_of_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Capture:
        """Records its options."""

        written, dropped, path = 1, 0, "a.jsonl"

        def __init__(self, out: str, **options: Any) -> None:
            made.append((out, options))

        def job(self, name: str | None) -> Any:
            """Return a marker for the job."""
            return "job", name

        def flush(self) -> None:
            """Do nothing."""

    monkeypatch.setattr("mpool.cli.capturing.Capture", Capture)
    command = ["capture", "-m", "x", "-p", "p", "-o", "a.jsonl"]
    _, _, options = last_call(monkeypatch, *command)
    assert options == {"temperature": 0, "parse_special": False, "capture": ("job", None)}
    _, _, options = last_call(monkeypatch, *command, *GIVEN, "--values", "3", "--records", "8", "--job-id", "j",
                              "--parse-special", "--compute", "float32")
    assert options == {**SAMPLING, "parse_special": True, "capture": ("job", "j")}
    assert made == [("a.jsonl", {"values": 10, "records": 1_000_000}), ("a.jsonl", {"values": 3, "records": 8})]


# ---- mpool serve -----------------------------------------------------------------------------------------------------

def test_serve_configures_the_pool(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the pool apply to every model that the server loads."""
    serving = pytest.importorskip("mpool.server.serving")
    found = []

    def run(self: Any, ready: object) -> None:
        """Load the model in place of serving, and close the pool as a server does at its end."""
        pool = self.state.pool
        pool.load("m")
        row, = pool.ps()
        found.append((row.keep_alive, row.kv_dtype, pool.health().models["m"].queue_capacity))
        self.close()
        pool.close()

    monkeypatch.setattr(serving.Serving, "run", run)
    monkeypatch.setattr("mpool.host.native_calls.end_process_if_busy", lambda status: None)
    for options in ([], ["--keep-alive", "1h30m", "--kv-dtype", "int8", "--queue-capacity", "3"],
                    ["--keep-alive", "-1"]):
        assert main(["serve", f"m={llama}", "--only", "--offline", "--port", "0", *options]) == 0
    default = found[0][1]
    assert default in ("int16", "float32")
    assert found == [(300.0, default, 100), (5400.0, "int8", 3), (math.inf, default, 100)]


def test_serve_refuses_values_of_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpool.server.serving")
    for options, name in ((["--keep-alive", "soon"], "--keep-alive must be a number of seconds"),
                          (["--queue-capacity", "0"], "--queue-capacity must be 1 to 1,000,000, got 0")):
        assert main(["serve", "--port", "0", *options]) == 1
        assert name in capsys.readouterr().err
