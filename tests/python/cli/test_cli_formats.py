"""``--grammar``, ``--regex`` and ``--json-schema``: the completion has the format, and errors name the option."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tinymodels
from mpool.cli import main
from mpool.cli.formats import format_of
from mpool.cli.parser import make_parser

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
          "additionalProperties": False}
GBNF = 'root ::= word ("-" word)\nword ::= "red" | "green"\n'
LARK = 'start: "a" /[0-9]{3}/'


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny language model."""
    return str(tinymodels.cached(tmp_path_factory, "llama"))


@pytest.mark.parametrize("flag, value, pattern", [
    ("--grammar", GBNF, "(red|green)-(red|green)"), ("--grammar", LARK, "a[0-9]{3}"),
    ("--regex", "[xyz]{4}", "[xyz]{4}"), ("--json-schema", json.dumps(SCHEMA), r'\{\s*"n"\s*:\s*[0-9]\s*\}')])
@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_output_has_the_format(llama: str, flag: str, value: str, pattern: str, seed: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Sampled at a high temperature, a text and the path of a file give the same completion."""
    path = tmp_path / "format"
    path.write_text(value, encoding="utf-8")
    found = []
    for given in (value, str(path)) if flag != "--regex" else (value,):
        assert main(["generate", "-m", llama, "The", flag, given, "--seed", seed, "--temperature", "1.5",
                     "--max-tokens", "100"]) == 0
        found.append(capsys.readouterr().out)
    assert re.fullmatch(pattern, found[0].removesuffix("\n")) and len(set(found)) == 1
    assert main(["run", llama, "The", flag, value, "--seed", seed, "--max-tokens", "100"]) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.removesuffix("\n"))


def test_json_output_has_the_parsed_value(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", llama, "The", "--json-schema", json.dumps(SCHEMA), "--json", "--seed", "1"]) == 0
    choice = json.loads(capsys.readouterr().out)["choices"][0]
    assert choice["parsed"] == json.loads(choice["text"]) and set(choice["parsed"]) == {"n"}


@pytest.mark.parametrize("command", [["generate", "p"], ["vision", "-i", "a.png", "p"], ["chat"], ["run", "x"]],
                         ids=lambda command: command[0])
def test_every_command_of_text_has_the_options(command: list[str]) -> None:
    parse = make_parser().parse_args
    assert format_of(parse(command)) == {}
    wanted: list[tuple[list[str], Any]] = [
        (["--grammar", GBNF], {"type": "grammar", "grammar": GBNF}),
        (["--regex", "a"], {"type": "regex", "regex": "a"}),
        (["--json-schema", "{}"], {"type": "json_schema", "json_schema": {"schema": {}}})]
    for arguments, value in wanted:
        assert format_of(parse([*command, *arguments])) == {"response_format": value}


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g"
    for data, words in ((b"\xff" * 9, "the file is not UTF-8 text"), (b"a" * 65537, "more than 65,536 characters")):
        path.write_bytes(data)
        assert main(["generate", "The", "--grammar", str(path)]) == 1
        assert f"{path}: " in (text := capsys.readouterr().err) and words in text


def test_only_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "The", "--grammar", "a", "--regex", "b"])
    assert "--regex: not allowed with argument --grammar" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "The", "--grammar-file", "a"])
    assert "Use --grammar TEXT or --json-schema TEXT" in capsys.readouterr().err


def test_an_embedding_model_has_no_format(tmp_path_factory: pytest.TempPathFactory,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    bert = str(tinymodels.cached(tmp_path_factory, "bert"))
    assert main(["run", bert, "text", "--regex", "a"]) == 1
    assert "`--regex` is for models that generate text" in capsys.readouterr().err
