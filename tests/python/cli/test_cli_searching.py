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
def lines(tmp_path: Path) -> str:
    """A file with one text per line."""
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    """Run a command with ``--json``, and return what it prints."""
    assert main([*arguments, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("batch", [256, 2])
def test_search_prints_the_most_similar_lines(bert: str, lines: str, batch: int, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are ranked as the library ranks them, however they are batched; blank lines are skipped."""
    monkeypatch.setattr("mpool.cli.searching._BATCH", batch)
    query = mpool.embed("cat", bert, task="query")
    scores = mpool.similarity(query[None, :], mpool.embed([text for _, text in TEXTS], bert, task="document"))[0]
    order = np.argsort(-scores, kind="stable")[:3]
    found = printed(capsys, "search", "cat", "-f", lines, "-m", bert, "-k", "3")
    assert [(row["line"], row["text"]) for row in found] == [TEXTS[at] for at in order]
    assert np.allclose([row["score"] for row in found], scores[order], rtol=0, atol=1e-6)


def test_equal_scores_keep_the_order_of_the_lines(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of several equal texts comes first, also if there are more of them than results."""
    found = printed(capsys, "search", "x", "same", "same", "same", "-m", bert, "-k", "2")
    assert [row["line"] for row in found] == [1, 2]


def test_rerank_prints_the_scores_of_the_library(reranker: str, lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The order and the scores are those of ``mpool.rerank``; the line is that of the file."""
    expected = mpool.rerank("cat", [text for _, text in TEXTS], reranker)
    found = printed(capsys, "rerank", "cat", "-f", lines, "-m", reranker)
    assert [(row["line"], row["text"], row["score"]) for row in found] \
        == [(*TEXTS[one.index], one.score) for one in expected]
    assert main(["rerank", "cat", "-f", lines, "-m", reranker, "-k", "1"]) == 0
    assert capsys.readouterr().out == f"{expected[0].score:.4f}  {expected[0].text}\n"


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
