"""``mpool search``, ``rerank``, ``generate-image`` and ``completion``, compared with the library's functions."""

import io
import json
import subprocess
import sys
import sys
from pathlib import Path

import numpy as np
import pytest

import mpool
import rerankers
import tinymodels
from mpool.cli import main

LINES = ["the cat sleeps", "", "a dog runs far", "bread and butter", "rain tomorrow", "  ", "the cat eats"]
TEXTS = [(number, text) for number, text in enumerate(LINES, 1) if text.strip()]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny embedding model."""
    return str(tinymodels.cached(tmp_path_factory, "prompted"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny cross-encoder."""
    return str(rerankers.make_reranker(tmp_path_factory.mktemp("rerankers") / "bert", "bert"))


@pytest.fixture()
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input with one text per line."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(LINES) + "\n"))


#: Paragraphs that are passages of their own: each has at least 300 characters and, with the next, more than 800.
FIRST, SECOND, THIRD = (" ".join([word] * 80) for word in ("garden", "violin", "harbour"))


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a folder ``notes``: text, a subfolder, and files that are not read."""
    monkeypatch.chdir(tmp_path)
    notes = tmp_path / "notes"
    (notes / "sub").mkdir(parents=True)
    (notes / ".hidden").mkdir()
    (notes / "a.md").write_text(f"\n{FIRST}\n\n\n{SECOND}\nand its end\n", encoding="utf-8-sig")
    (notes / "sub" / "b.py").write_text(f"# {THIRD}\n")
    (notes / ".hidden" / "c.txt").write_text("hidden")
    (notes / "d.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (notes / "e.txt").write_bytes("caf\xe9".encode("latin-1"))
    return notes


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    """Run a command with ``--json``, and return what it prints."""
    assert main([*arguments, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("batch", [256, 2])
def test_search_prints_the_most_similar_lines(bert: str, lines: None, batch: int, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are ranked as the library ranks them, however they are batched; blank lines are skipped."""
    monkeypatch.setattr("mpool.cli.searching._BATCH", batch)
    query = mpool.embed("cat", bert, task="query")
    scores = mpool.similarity(query[None, :], mpool.embed([text for _, text in TEXTS], bert, task="document"))[0]
    order = np.argsort(-scores, kind="stable")[:3]
    found = printed(capsys, "search", "cat", "-m", bert, "-k", "3")
    assert [(row["line"], row["text"]) for row in found] == [TEXTS[at] for at in order]
    assert np.allclose([row["score"] for row in found], scores[order], rtol=0, atol=1e-6)


def test_equal_scores_keep_the_order_of_the_lines(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of several equal texts comes first, also if there are more of them than results."""
    found = printed(capsys, "search", "x", "same", "same", "same", "-m", bert, "-k", "2")
    assert [row["line"] for row in found] == [1, 2]


def test_rerank_prints_the_scores_of_the_library(reranker: str, lines: None,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """The order and the scores are those of ``mpool.rerank``; the line is that of the file."""
    expected = mpool.rerank("cat", [text for _, text in TEXTS], reranker)
    found = printed(capsys, "rerank", "cat", "-m", reranker)
    assert [(row["line"], row["text"], row["score"]) for row in found] \
        == [(*TEXTS[one.index], one.score) for one in expected]
    sys.stdin.seek(0)
    assert main(["rerank", "cat", "-m", reranker, "-k", "1"]) == 0
    assert capsys.readouterr().out == f"{expected[0].score:.4f}  {expected[0].text}\n"


@pytest.mark.parametrize("given", [["notes"], ["notes/"], ["--file", "notes"],
                                   ["notes/a.md", "notes/d.png", "notes/e.txt", "notes/sub"]])
@pytest.mark.parametrize("command", ["search", "rerank"])
def test_paths_are_read(command: str, given: list[str], bert: str, reranker: str, folder: Path,
                        capsys: pytest.CaptureFixture[str]) -> None:
    """The passages of files and folders are ranked, with file and line; files that are not text are named."""
    model = bert if command == "search" else reranker
    assert main([command, "violin", "-m", model, "--json", *given]) == 0
    output = capsys.readouterr()
    passages = {("notes/a.md", 2): FIRST, ("notes/a.md", 5): SECOND + "\nand its end",
                ("notes/sub/b.py", 1): "# " + THIRD}
    rows = json.loads(output.out)
    assert {(row["file"], row["line"]): row["text"] for row in rows} == passages
    assert "d.png" in output.err and "e.txt" in output.err and "hidden" not in output.err
    if command == "search":
        expected = mpool.similarity(mpool.embed("violin", bert, task="query")[None, :],
                                    mpool.embed([row["text"] for row in rows], bert, task="document"))[0]
        assert np.allclose([row["score"] for row in rows], expected, rtol=0, atol=1e-6)


def test_paths_texts_and_standard_input_are_ranked_together(bert: str, folder: Path, lines: None,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that is no path stays a text; ``-`` stands for the lines of standard input."""
    found = printed(capsys, "search", "cat", "notes/sub", "no/such.file", "-", "-m", bert, "-k", "100")
    assert {(row["file"], row["line"], row["text"]) for row in found} == {
        ("notes/sub/b.py", 1, "# " + THIRD), (None, 2, "no/such.file"), *(("-", line, text) for line, text in TEXTS)}


@pytest.mark.parametrize("texts, noted", [
    (["./notez"], True), (["../no/such folder", "b"], True), (["~/notez", "b"], True), (["/no/where", "b"], True),
    (["notes/sub/nothing", "b"], True), (["nofolder"], True), (["a text", "word"], False), (["a / b", "c"], False)])
@pytest.mark.parametrize("command", ["search", "rerank"])
def test_a_path_that_does_not_exist_is_noted(command: str, texts: list[str], noted: bool, bert: str, reranker: str,
                                             folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such an argument is a text, as any other."""
    assert main([command, "cat", *texts, "-m", bert if command == "search" else reranker, "--json"]) == 0
    output = capsys.readouterr()
    assert len(json.loads(output.out)) == len(texts) and (repr(texts[0]) in output.err) == noted


@pytest.mark.parametrize("command", ["search", "rerank"])
def test_a_folder_without_texts_is_named(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "empty").mkdir()
    (folder.parent / "blank.txt").write_text("\n \n")
    for given in (["empty"], ["blank.txt"], ["-f", "empty"], ["notes/e.txt"]):
        assert main([command, "cat", *given]) == 1
        assert given[-1] in capsys.readouterr().err.splitlines()[-1]


def test_sizes_are_bounded(bert: str, folder: Path, capsys: pytest.CaptureFixture[str],
                           monkeypatch: pytest.MonkeyPatch) -> None:
    """A passage has at most 800 characters; large files of a folder are left out, not those that are named; a folder
    with too many files is refused."""
    monkeypatch.setattr("mpool.cli.passages._LARGEST", 2000)
    text = "lighthouse " * 200
    (folder / "long.txt").write_text(text + "\n")
    files = {row["file"] for row in printed(capsys, "search", "x", "notes", "-m", bert, "-k", "100")}
    assert files == {"notes/a.md", "notes/sub/b.py"}
    found = printed(capsys, "search", "x", "notes/long.txt", "-m", bert, "-k", "100")
    assert max(len(str(row["text"])) for row in found) <= 800
    assert sum(len(str(row["text"]).split()) for row in found) == 200
    monkeypatch.setattr("mpool.cli.passages._MOST_FILES", 2)
    assert main(["search", "x", "notes", "-m", bert]) == 1
    assert "notes" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, part", [
    (["search", "q", "text", "-f", "x"], "from --file, got both"),
    (["search", "q", "text", "-k", "0"], "--top-k must be 1 or more"),
    (["search", "q", " "], "at least one text is required"),
    (["rerank", "q", " ", "-m", "org/name"], "at least one text is required"),
    (["generate-image", "seven", "-m", "digits-sd3", "-o", "x.txt"], "--output must be the path of an image file"),
    (["generate-image", "seven", "-m", "digits-sd3", "-o", "none/x.png"], "--output must be a path in an existing"),
])
def test_wrong_values_are_named(arguments: list[str], part: str, bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option."""
    more = ["-m", bert] if arguments[0] == "search" else []
    assert main([*arguments, *more]) == 1
    assert part in capsys.readouterr().err


def test_generate_image_writes_the_images_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have the pixels and parameters of the same request to the library, and the options are passed on."""
    from PIL import Image

    options = ["--seed", "3", "--steps", "2", "-n", "2", "--guidance-scale", "2.5", "--negative-prompt", "eight"]
    expected = mpool.generate_image("a handwritten seven", "digits-sd3", seed=3, num_inference_steps=2, n=2,
                                    guidance_scale=2.5, negative_prompt="eight")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a handwritten seven"))
    path = tmp_path / "digit.png"
    assert main(["generate-image", "-m", "digits-sd3", "-o", str(path), *options]) == 0
    names = [str(tmp_path / f"digit-{number}.png") for number in (1, 2)]
    assert capsys.readouterr().out.split() == names
    for name, one in zip(names, expected.results):
        with Image.open(name) as image:
            assert (np.asarray(image) == np.asarray(one.image)).all()
            assert json.loads(image.info["mpool"])["seed"] == one.parameters["seed"]


@pytest.mark.parametrize("wrong, right", [("embd", "embed"), ("generte-image", "generate-image"),
                                          ("xyzzy", "`mpool --help`")])
def test_unknown_command_names_the_nearest(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error is answered with the command that was meant."""
    with pytest.raises(SystemExit) as left:
        main([wrong, "text"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert f"unknown command '{wrong}'" in error and right in error


def test_completion_completes_commands_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """bash completes a command, an option, names of models and of files with the printed script."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "mpool.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "mpool").write_text(f"#!/bin/sh\nexec {sys.executable} -m mpool \"$@\"\n")
    (tmp_path / "mpool").chmod(0o755)
    (tmp_path / "digits.gguf").touch()
    for words, expected in ((["mpool", "embed-i"], "embed-image"), (["mpool", "embed", "--dimens"], "--dimensions"),
                            (["mpool", "run", "digits-ll"], "digits-llava"),
                            (["mpool", "show", "digits.g"], "digits.gguf"),
                            (["mpool", "embed", "--file", "digits.g"], "digits.gguf")):
        code = (f"export PATH={tmp_path}:$PATH; cd {tmp_path}; source {script}; "
                f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
                "$(complete -p mpool | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); echo ${COMPREPLY[@]}")
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [expected], done.stderr
