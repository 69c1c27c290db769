"""How commands end when standard output takes no more: the exit code, the message, and nothing left for the exit."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

import tinymodels
from mpool.cli import main

COMMANDS = (["models"], ["models", "--json"], ["list"], ["show"], ["show", "BERT"], ["completion", "bash"],
            ["embed", "-m", "BERT", "one"], ["capture", "compare", "A", "A"])
ROOT = Path(__file__).parents[3]
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def capture_file(path: Path, job: str, tokens: int) -> str:
    """Write a capture of one value for each token and return its path."""
    rows = [{"job_id": job, "token_idx": at, "checkpoint": "norm", "team": "x", "dtype": "float32", "shape": [1],
             "values": [1.0]} for at in range(tokens)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def command(request: pytest.FixtureRequest, bert: Path, tmp_path: Path) -> list[str]:
    """A command, with the paths of a model and of a capture."""
    places = {"BERT": str(bert), "A": capture_file(tmp_path / "a.jsonl", "a", 2)}
    return [places.get(word, word) for word in request.param]


@needs_full
@pytest.mark.parametrize("command", COMMANDS, indirect=True, ids=" ".join)
def test_a_full_disk_is_reported(command: list[str], monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Python flushes standard output at exit and replaces the exit code by 120 if that fails: commands flush before."""
    output = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", output)
    try:
        assert main(command) == 1
    finally:
        try:
            output.close()
        except OSError:
            pass
    assert capsys.readouterr().err.endswith("mpool: No space left on device\n")


@pytest.mark.parametrize("command", COMMANDS, indirect=True, ids=" ".join)
def test_a_reader_that_went_away(command: list[str], monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, without a message, and standard output is the null device from then on."""
    reading, writing = os.pipe()
    os.close(reading)
    output = io.TextIOWrapper(io.FileIO(writing, "w"), encoding="utf-8", write_through=False)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(command) == 1
    assert os.path.samestat(os.fstat(writing), os.stat(os.devnull))
    output.write("more")
    output.close()
    assert "mpool:" not in capsys.readouterr().err


def test_captures_are_compared_in_the_order_of_the_arguments(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    a, b = capture_file(tmp_path / "a.jsonl", "a", 2), capture_file(tmp_path / "b.jsonl", "b", 1)
    for first, second, missing in ((a, b, "second"), (b, a, "first")):
        assert main(["capture", "compare", first, second]) == 1
        assert f"the captures do not match: the {missing} has no " in capsys.readouterr().err
    for first, second, job in ((a, b, "a"), (b, a, "b")):
        assert main(["capture", "compare", first, second, "--tokens", "1", "--json"]) == 0
        assert [row["job_id"] for row in json.loads(capsys.readouterr().out)["differences"]] == [job]


@pytest.mark.parametrize("kind, commands", [
    ("an unknown command or option", ["nothing", "embed A --nothing"]),
    ("a missing argument", ["pull", "search", "capture", "capture --prompt x", "capture --out x"]),
    ("a value that is no number where one is required", ["embed A --dimensions x", "serve --port abc"]),
    ("none of the choices", ["embed A --task other"]),
    ("a value out of range", ["serve --port 99999", "search q a -k 0", "classify a -m m -k 0"]),
    ("options that exclude each other", ["embed A --file t.txt", "embed A --vectors tokens --dimensions 3"]),
    ("no input", ["embed --file EMPTY -m BERT", "run m"])])
def test_exit_codes_are_those_of_the_page(kind: str, commands: list[str], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``docs/cli.md`` says which errors have the exit code 2."""
    page = " ".join((ROOT / "docs" / "cli.md").read_text().split())
    two, one = page[page.index("2 if"):page.index("1 for every")], page[page.index("1 for every"):page.index("130 int")]
    assert (kind in two) != (kind in one)
    (tmp_path / "empty").write_text("")
    tinymodels.bert(tmp_path / "bert")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for command in commands:
        given = [str(tmp_path / part.lower()) if part in ("EMPTY", "BERT") else part for part in command.split()]
        try:
            code = main(given)
        except SystemExit as left:
            code = left.code  # type: ignore[assignment]
        assert code == (2 if kind in two else 1) and capsys.readouterr().err, command
