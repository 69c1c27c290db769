"""Commands as users of Ollama and llama.cpp write them: they work, or the error has the command to use."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.cli import main
from mpool.cli.parser import make_parser

GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Terminal(io.StringIO):
    """Standard input of a user."""

    def isatty(self) -> bool:
        return True


def _stdin(text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set standard input: a file with a text, or /dev/null (None)."""
    path = tmp_path / "stdin"
    path.write_text(text or "")
    monkeypatch.setattr("sys.stdin", open(os.devnull if text is None else path, encoding="utf-8"))


@pytest.mark.parametrize("arguments, piped, prompt", [
    (["Say", "hello."], None, "Say hello."), (["Say hello."], None, "Say hello."),
    ([*GREEDY[:2], "Say", "hello."], None, "Say hello."), ([], "Say hello.", "Say hello."),
    (["Shorter:"], "A text.", "A text.\n\nShorter:")])
def test_run_answers_a_prompt(llama: Path, arguments: list[str], piped: str | None, prompt: str, tmp_path: Path,
                              capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(piped, monkeypatch, tmp_path)
    assert main(["run", str(llama), *arguments, *GREEDY[2:], "--temperature", "0"]) == 0
    wanted = mpool.chat([{"role": "user", "content": prompt}], str(llama), **OPTIONS).text
    assert capsys.readouterr().out == wanted + "\n"


@pytest.mark.parametrize("arguments, words", [
    (["a", "--seed", "3", "--", "-x", "--foo"], ["a", "-x", "--foo"]), (["--", "-5", "degrees"], ["-5", "degrees"]),
    (["--seed", "3", "--", "-x"], ["-x"]), (["a", "--seed", "3", "b", "--", "--", "c"], ["a", "b", "--", "c"])])
def test_words_behind_two_dashes(arguments: list[str], words: list[str]) -> None:
    assert make_parser().parse_args(["run", "M", *arguments]).prompt == words


def test_run_chats_in_a_terminal(llama: Path, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("Hello\n/bye\n"))
    assert main(["run", str(llama), *GREEDY]) == 0
    said = capsys.readouterr()
    assert "Chat with" in said.err and said.out == \
        mpool.chat([{"role": "user", "content": "Hello"}], str(llama), **OPTIONS).text + "\n"


def test_run_prints_the_vector_of_an_embedding_model(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(None, monkeypatch, tmp_path)
    assert main(["run", str(bert), "A", "cat"]) == 0
    assert np.array_equal(np.array(json.loads(capsys.readouterr().out), np.float32), mpool.embed("A cat", str(bert)))


@pytest.mark.parametrize("options, part", [
    (["A", "cat", "--temperature", "0.5"], "`--temperature` is for models that generate text"),
    (["A", "cat", "--stop-token-id", "3"], "`--stop-token-id` is for models that generate text"),
    (["A", "cat", "--system", "Be brief"], "`--system` is for models that generate text"),
    (["A", "cat", "--stats"], "`--stats` is for models that generate text"), ([], "returns vectors and cannot chat")])
def test_run_refuses_options_that_an_embedding_model_ignores(
        bert: Path, options: list[str], part: str, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["run", str(bert), *options]) == 1
    found = capsys.readouterr()
    assert part in found.err and f"mpool run {bert} TEXT" in found.err and not found.out


@pytest.mark.parametrize("arguments, part", [
    (["run", "digits-sd3", "a", "three"], "Use mpool generate-image --model digits-sd3 PROMPT"),
    (["run", "digits-clip", "a"], "Use mpool embed-image --model digits-clip FILE"),
    (["run", "MODEL"], "mpool run MODEL PROMPT"),
    (["chat", "one", "--model", "two"], "the model is given twice")])
def test_refused_runs(arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                      monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(None, monkeypatch, tmp_path)
    assert main(arguments) == 1
    assert part in capsys.readouterr().err


def test_chat_takes_the_model_as_an_argument(llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin("Hello\n", monkeypatch, tmp_path)
    assert main(["chat", str(llama), *GREEDY]) == 0
    assert capsys.readouterr().out == \
        mpool.chat([{"role": "user", "content": "Hello"}], str(llama), **OPTIONS).text + "\n"


def test_list_lists_downloaded_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for command in (["models", "--local", "--json"], ["list", "--json"], ["ls", "--json"]):
        assert main([*command, "--capability", "text_to_image"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2] and "digits-sd3" in [row["key"] for row in found[0]]


def test_serve_takes_models_as_arguments() -> None:
    parse = make_parser().parse_args
    for arguments in (["a", "b=c"], ["--port", "0", "a", "b=c"], ["a", "--port", "0", "b=c"]):
        assert parse(["serve", *arguments]).names == ["a", "b=c"]
    assert parse(["ray", "serve", "a"]).names == ["a"]


@pytest.mark.parametrize("arguments, part", [
    (["create", "x", "-f", "Modelfile"], "mpool serve NAME=MODEL"), (["cp", "a", "b"], "mpool serve NAME=MODEL"),
    (["delete", "a"], "mpool rm MODEL"), (["remove", "a"], "mpool rm MODEL"), (["download", "a"], "mpool pull MODEL"),
    (["similar", "a"], "mpool search QUERY"), (["start"], "mpool serve"), (["unload", "a"], "mpool stop NAME"),
    (["tokenize", "a"], "mpool.tokenize(text, model)"), (["bench"], "mpool demo"),
    (["benchh"], "unknown command 'benchh'. `mpool --help` lists the commands"),
    (["modles"], "Did you mean models?"),
    (["push", "a"], "hf upload"), (["version"], "mpool --version"),
    (["generate", "qwen3:0.6b", "Why?"], "mpool run MODEL PROMPT"), (["chat", "a", "Why?"], "mpool run MODEL PROMPT"),
    (["serve", "a", "--colour"], "mpool serve: error: unrecognized arguments: --colour. `mpool serve --help`"),
    (["serve", "--modell", "a"], "Did you mean --model?"),
    (["-v", "embed", "a"], "unrecognized arguments: -v. Options follow the command: mpool embed -v"),
    (["ray", "serve", "--relicas", "2"], "Did you mean --replicas?"),
    (["ray", "sreve"], "unknown command 'sreve'. Did you mean serve?"),
    (["serve", "-hf", "org/name"], "mpool serve: error: unrecognized arguments: -hf. Use --model org/name, or"),
    (["serve", "--ctx-size", "4096"], "error: unrecognized arguments: --ctx-size. The context is the model's own"),
    (["serve", "-m", "a", "--n-gpu-layers=9"], "mpool computes on the CPU"),
    (["serve", "--api-key", "x"], "--token-file"),
    (["run", "a", "--keepalive", "5m", "hi"], "--keepalive: A model of mpool run"),
    (["serve", "a", "--keepalive", "5m"], "Did you mean --keep-alive?"),
    (["ray", "serve", "a", "--keepalive=5m"], "Did you mean --keep-alive?"),
    (["serve", "--lora", "x"], "Use --adapter NAME=PATH"),
    (["rerank", "q", "a", "--lora", "x"], "Use --adapter NAME=PATH"),
    (["embed-image", "a.png", "--lora", "x"], "`mpool embed-image --help`")])
def test_other_commands_name_what_to_use(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and part in capsys.readouterr().err
