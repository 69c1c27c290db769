"""``mpool classify``, compared with the library's function."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.cli import main
from rerankers import make_classifier

NLI = ("contradiction", "neutral", "entailment")
LINES = ["the cat sleeps", "", "a dog runs far", "  ", "bread and butter"]
TEXTS = [text for text in LINES if text.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_classifier(tmp_path_factory.mktemp("classifiers") / "bert", "bert", NLI))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["classify", *arguments]) == 0
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in arguments else out


@pytest.mark.parametrize("batch", [256, 2])
def test_lines_have_the_labels_of_the_library(folder: str, batch: int, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpool.cli.classifying._BATCH", batch)
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(LINES))
    want = mpool.classify(TEXTS, folder)
    found = printed(capsys, "-f", str(file), "-m", folder, "--json")
    assert [row["line"] for row in found] == [1, 3, 5] and [row["text"] for row in found] == TEXTS
    assert [[(one["label"], one["score"]) for one in row["results"]] for row in found] == [
        [(one.label, one.score) for one in result] for result in want]
    assert [(row["label"], row["score"]) for row in found] == [(one.label, one.score) for one in want]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
    assert printed(capsys, "-m", folder) == "".join(
        f"{one.score:.4f} {one.label}  {text}\n" for one, text in zip(want, TEXTS))


def test_top_k_labels_and_pairs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = mpool.classify("the cat", folder)
    assert printed(capsys, "the cat", "-m", folder, "-k", "2") == \
        f"{one[0].score:.4f} {one[0].label}, {one[1].score:.4f} {one[1].label}  the cat\n"
    assert len(printed(capsys, "the cat", "-m", folder, "--json", "-k", "1")[0]["results"]) == 1
    own = mpool.classify("the cat", folder, labels=["a", "b c"], template="It is {}!", multi_label=True)
    found = printed(capsys, "the cat", "-m", folder, "--json", "--labels", "a, b c,", "--template", "It is {}!",
                    "--multi-label")
    assert {row["label"]: row["score"] for row in found[0]["results"]} == {row.label: row.score for row in own}
    pair = mpool.classify([("the cat", "a dog")], folder, function_to_apply="none")[0]
    found = printed(capsys, "the cat", "-m", folder, "--json", "--pair", "a dog", "--function-to-apply", "none")
    assert [row["score"] for row in found[0]["results"]] == [row.score for row in pair]


@pytest.mark.parametrize("arguments, part", [
    (["text", "-k", "0"], "--top-k must be an integer of 1 or more"), (["text", "-f", "x"], "from --file, got both"),
    ([" "], "at least one text is required"), (["text", "--labels", " , "], "--labels must be one or more "),
    (["text", "--labels", "a,a"], "a label that is not in the list yet"),
    (["text", "--labels", "a", "--template", "x"], "--template must be a text with {} once"),
    (["text", "--labels", "a", "--pair", "b"], "--pair and --labels exclude each other"),
    (["text", "--template", "{}"], "--template must be 'This example is {}.' without labels"),
    (["dog " * 80, "--no-truncate"], "the model accepts at most 64")])
def test_refused_arguments(folder: str, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "-m", folder, *arguments]) == 1
    assert part in capsys.readouterr().err


def test_the_model_is_required_and_a_misspelt_command_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in ((["classify", "text"], "required: -m/--model"), (["clasify"], "Did you mean classify?")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and part in capsys.readouterr().err


# ---- tokens ----------------------------------------------------------------------------------------------------------

def test_tokens(tagger: Path, folder: str, capsys: pytest.CaptureFixture[str],
                monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans of the library, with offsets into the line."""
    lines = ["Zoë's cat sleeps", "", "a dog runs far " * 9]
    for options in ({}, {"aggregation": "average", "stride": 5}, {"aggregation": "none"}):
        want = mpool.classify_tokens([lines[0], lines[2]], tagger, **{"aggregation": "simple", **options})
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        found = printed(capsys, "--tokens", "-m", str(tagger), "--json", *given)
        assert [row["line"] for row in found] == [1, 3]
        assert [[tuple(span.values()) for span in row["spans"]] for row in found] == [
            [(one.label, one.score, one.start, one.end, one.word) for one in spans] for spans in want]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert printed(capsys, "--tokens", "-m", str(tagger), *given) == "".join(
            f"{line}:{one.start}-{one.end}  {one.score:.4f} {one.label}  {lines[line - 1][one.start:one.end]}\n"
            for line, spans in zip((1, 3), want) for one in spans)
    for arguments, part in ((["x", "--tokens", "-k", "2"], "--top-k and --tokens exclude each other"),
                            (["x", "--tokens", "--multi-label"], "--multi-label and --tokens exclude each other"),
                            (["x", "--stride", "2"], "--stride needs --tokens"),
                            (["x", "--tokens", "--stride", "-1"], "--stride must be an integer of 0 or more"),
                            ([" ", "--tokens"], "at least one text is required"),
                            (["x"], "Use mpool.classify_tokens(texts, model)")):
        assert main(["classify", "-m", str(tagger), *arguments]) == 1
        assert part in capsys.readouterr().err
    assert main(["classify", "-m", folder, "x", "--tokens"]) == 1
    assert "not a token classifier" in capsys.readouterr().err
