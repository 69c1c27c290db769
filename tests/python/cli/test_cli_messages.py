"""Errors of the library have the words of the command line: options, and no values of Python."""

import sys
from pathlib import Path

import pytest

import tinymodels
from mpool.cli import main
from mpool.cli.messages import text_of
from mpool.cli.parser import make_parser
from mpool.errors import FileError, InvalidArgument, MpoolError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models."""
    return {name.upper(): str(tinymodels.cached(tmp_path_factory, name)) for name in ("bert", "llama")}


@pytest.mark.parametrize("arguments, said", [
    (["generate", "Hi", "-m", "LLAMA", "--stop", ""],
     "--stop must be Unicode text of 1 to 1,024 bytes in UTF-8, got ''"),
    (["generate", "Hi", "-m", "LLAMA", "--stop", "a", "--stop", "x" * 1025],
     "--stop must be Unicode text of 1 to 1,024"),
    (["generate", "Hi", "-m", "LLAMA", "--stop-token-id", "-4"],
     "--stop-token-id must be a token id, an integer from 0 to "),
    (["generate", "Hi", "-m", "LLAMA", "--logit-bias", "99999=5"],
     "--logit-bias must be ID=X, where ID is a token id, 0 to "),
    (["generate", "Hi", "-m", "LLAMA", "--seed", "-1"],
     "--seed must be an integer from 0 to 2**64 - 1, or left out for a random seed, got -1\n"),
    (["run", "LLAMA", "Hi", "--seed", "-1"],
     "--seed must be an integer from 0 to 2**64 - 1, or left out for a random seed, got -1\n"),
    (["generate", "Hi", "-m", "LLAMA", "--max-tokens", "0"],
     "--max-tokens must be an integer from 1 to 2**31 - 1, or none to generate until the context is full, got 0\n"),
    (["generate", "Hi", "-m", "LLAMA", "--min-tokens", "-1"],
     "--min-tokens must be an integer from 0 to --max-tokens, got -1\n"),
    (["generate", "Hi", "-m", "LLAMA", "--logprobs", "-1"], "--logprobs must be an integer from 0 to 20, got -1\n"),
    (["rerank", "q", "a", "-m", "BERT", "-k", "0"],
     "--top-k must be an integer of 1 or more, or left out for all documents, got 0\n"),
    (["embed", "a", "-m", "BERT", "--adapter", "x"], "--adapter must be left out: the model has no adapters, got 'x'. "
                                                     "--adapter NAME=PATH adds one\n"),
    (["vision", "q", "-m", "digits-llava", "-i", "nope.png"],
     "--image: nope.png: No such file or directory. Name an image file, or a URL with --allow-urls\n"),
    (["embed-image", "nope.png", "-m", "digits-clip"],
     "image 1 of the command line: nope.png: No such file or directory. Name an image file, or a URL with "
     "--allow-urls\n"),
    (["generate-image", "1", "-m", "digits-sd3", "--steps", "0"], "--steps must be an integer from 1 to "),
    (["classify", "a", "-m", "BERT", "--labels", ""],
     "--labels must be one or more labels, separated by commas, got ''\n"),
    (["serve", "--allow-origin", "x"], "--allow-origin must be origins such as https://page.example, got 'x'\n"),
    (["serve", "--allow-host", "a b"], "--allow-host must be names or addresses, "),
    (["serve", "--port", "0", "--only", "-m", "BERT", "--load", "--draft", "LLAMA"],
     "--draft must be left out: only text_to_text models have draft models, got '/")])
def test_errors_have_the_options(folders: dict[str, str], arguments: list[str], said: str, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for elements of lists, for parameters with other names, and for errors while a conversation runs."""
    monkeypatch.chdir(tmp_path)
    assert main([folders.get(one, one) for one in arguments]) == 1
    seen = capsys.readouterr().err
    assert said in seen and seen.startswith("mpool: ") and "None" not in seen and "`" not in seen


@pytest.mark.parametrize("arguments, usage", [
    (["generate", ""], "mpool generate PROMPT"), (["generate"], "mpool generate PROMPT"),
    (["generate", "-"], "mpool generate PROMPT"), (["vision", "", "-i", "a.png"], "mpool vision QUESTION --image FILE"),
    (["capture", "--prompt", "", "--out", "a.jsonl"], "mpool capture --prompt TEXT --out PATH")])
def test_an_empty_prompt(arguments: list[str], usage: str, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the model is loaded."""
    monkeypatch.setattr("mpool.cli.talking.standard_input", lambda *_: "")
    assert main([*arguments, "-m", "no such model"]) == 1
    assert capsys.readouterr().err == ("mpool: the prompt must have at least 1 character, got none. Pass it as an "
                                       f"argument or on standard input: {usage}\n")


def test_values_are_not_changed() -> None:
    """Only the allowed values are reworded, not the value that was given, nor the messages of other errors."""
    given = make_parser().parse_args(["generate", "x", "--stop", "None"])
    for error, said in (
            (InvalidArgument(param="seed", got="'None or max_tokens'", allowed="1, or None"),
             "--seed must be 1, or left out, got 'None or max_tokens'"),
            (InvalidArgument(param="prompt", got="'None'", allowed="a text or None"),
             "`prompt` must be a text or None, got 'None'"),
            (FileError("None of the files exists", param="seed"), "None of the files exists"),
            (MpoolError("None"), "None")):
        assert text_of(error, given) == said


@pytest.mark.parametrize("encoding, advice", [("utf-8", "Convert the argument to UTF-8"),
                                              ("ascii", "Set LC_ALL=C.UTF-8, or another locale of UTF-8")])
def test_arguments_that_are_no_text_in_the_locale(encoding: str, advice: str, folders: dict[str, str],
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the encoding of the locale, and what to do."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    assert main(["embed", "caf\udce9", "-m", folders["BERT"]]) == 1
    assert capsys.readouterr().err.endswith(
        f"The locale has the encoding {encoding.upper()}, in which the argument is no valid text. {advice}\n")
