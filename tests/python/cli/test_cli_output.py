"""Lines that commands print, and what they pass on, with a library that returns known results."""

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import cli
from mpool.cli import capturing, common, embedding, imaging, main, serving, talking
from mpool.cli.common import Texts, size_of, speed, stats_line
from mpool.cli.parser import make_parser
from mpool.cli.chatting import Conversation
from mpool.cli.prompting import line_reader
from mpool.errors import FileError
from mpool.results import Choice, Chunk, Completion, Timings, Usage
from mpool.tasks.embedding_results import SparseVectors, TextEmbeddings, TokenVectors
from commandimages import image_files as image_files


class Terminal(io.StringIO):
    """A stream of a terminal."""

    def isatty(self) -> bool:
        return True


def completion(text: str = "text", choices: int = 1, cached: int = 0, tokens: int = 9) -> Completion:
    """A completion of 12 prompt tokens, prefilled in 0.5 s and decoded in 2 s."""
    return Completion(text=text, finish_reason="stop", stop=None, token_ids=(), logprobs=None,
                      usage=Usage(12, tokens, cached), timings=Timings(0.125, 0.5, 2.0, 2.75), model="m", seed=1,
                      choices=tuple(Choice(at, f"{text}{at}", "stop") for at in range(choices)))


class Library:
    """A pool and its model, whose methods return the results that the test gives."""

    key, capability, config = "m", "text_to_text", mpool.PoolConfig()

    def __init__(self, **results: Any) -> None:
        self.results, self.calls = results, list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            found = self.results.get(name, self)
            return found(*arguments, **options) if callable(found) and found is not self else found

        return call


def run(monkeypatch: pytest.MonkeyPatch, library: Library, *arguments: str) -> int:
    """Run a command with a library."""
    for module in (talking, embedding, capturing, imaging):
        monkeypatch.setattr(module, "make_pool", lambda _: library)
    return main(list(arguments))


# ---- text ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("done, prefill, decode, line", [
    (completion(), 24, 4, "12 prompt tokens in 0.500 s (24 tokens/s), 9 completion tokens at 4.0 tokens/s, 2.75 s in "
     "total, finish reason: stop"),
    (completion(cached=8), 8, 4, "12 prompt tokens in 0.500 s (8 tokens/s), 8 of them cached, 9 completion tokens at "
     "4.0 tokens/s, 2.75 s in total, finish reason: stop"),
    (completion(choices=3), 24, 3, "12 prompt tokens in 0.500 s (24 tokens/s), 9 completion tokens at 3.0 tokens/s, "
     "2.75 s in total, finish reason: stop"),
    (completion(tokens=1), 24, 0, "12 prompt tokens in 0.500 s (24 tokens/s), 1 completion tokens, 2.75 s in total, "
     "finish reason: stop")])
def test_line_of_statistics(done: Completion, prefill: float, decode: float, line: str) -> None:
    """Cached tokens are not prefilled, and the first token of each choice is not decoded."""
    assert speed(done) == (prefill, decode) and stats_line(done) == line
    for name in ("prompt", "generation"):
        timings = {**vars_of(done.timings), name: 0.0}
        short = SimpleNamespace(usage=done.usage, choices=done.choices, timings=SimpleNamespace(**timings))
        assert speed(short)[name == "generation"] == 0  # type: ignore[arg-type]


def vars_of(timings: Timings) -> dict[str, float]:
    """Return the fields of a dataclass with slots."""
    return {name: getattr(timings, name) for name in ("queued", "prompt", "generation", "total")}


@pytest.mark.parametrize("arguments, out", [
    (["generate", "-m", "m", "p", "-n", "2"], "--- 1 of 2, stop\ntext0\n--- 2 of 2, stop\ntext1\n"),
    (["generate", "-m", "m", "p", "-n", "1"], "a b\n"), (["generate", "-m", "m", "p"], "a b\n"),
    (["vision", "-m", "m", "-i", "i", "p"], "a b\n")])
@pytest.mark.parametrize("stats", [False, True])
def test_text_of_a_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                              arguments: list[str], out: str, stats: bool) -> None:
    """Several completions have numbers; one is printed as it is generated. Statistics are not part of the output."""
    done = completion(choices=2)

    class Stream(Library):
        def __iter__(self) -> Iterator[Any]:
            return iter([Chunk("a "), Chunk("b")])

        def result(self) -> Completion:
            return done

    def made(*_: Any, stream: bool = False, **__: Any) -> Any:
        return Stream() if stream else done

    library = Library(generate=made, vision=made)
    assert run(monkeypatch, library, *arguments, *["--stats"] * stats) == 0
    assert capsys.readouterr() == (out, stats_line(done) + "\n" if stats else "")
    assert run(monkeypatch, library, *arguments, "--json", *["--stats"] * stats) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["text"], found["usage"]["prompt_tokens"], len(found["choices"])) == ("text", 12, 2)
    assert shown.err == (stats_line(done) + "\n" if stats else "")


@pytest.mark.parametrize("interactive, chunks, out, err", [
    (True, [("a", ""), ("b", "")], "ab\n", ""),
    (True, [("", "x"), ("", "y"), ("a", ""), ("b", "")], "ab\n", "xy\n\n"),
    (True, [("", "x"), ("a", ""), ("", "y"), ("b", "")], "ab\n", "x\n\ny\n\n"),
    (True, [("", "x")], "\n", "x\n\n"),
    (False, [("", "x"), ("a", "")], "a\n", "")])
def test_reply_with_reasoning(capsys: pytest.CaptureFixture[str], interactive: bool, chunks: list[tuple[str, str]],
                              out: str, err: str) -> None:
    """Reasoning that a user wants to see is on standard error, and an empty line separates it from the text."""
    stream = Library(result=completion("reply"))
    type(stream).__iter__ = lambda self: iter(  # type: ignore[attr-defined]
        [SimpleNamespace(text=text, reasoning=reasoning) for text, reasoning in chunks])
    arguments = make_parser().parse_args(["chat", "-m", "m"])
    talk = Conversation(Library(chat=stream), arguments)  # type: ignore[arg-type]
    talk.interactive, talk.switches["fold"] = interactive, False
    try:
        assert talk.reply() == ({"role": "assistant", "content": "reply"}, True)
    finally:
        del Library.__iter__  # type: ignore[attr-defined]
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize("lines, message", [
    (["x"], "x"), ([" x "], " x "), ([" /help "], " /help "), (['"""a', 'b"""'], "a\nb"), (['"""a"""'], "a"),
    ([' """a', "", ' b """ '], "a\n\n b "), (['"""a', "b"], "a\nb"), ([], None)])
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str | None) -> None:
    """Triple quotes enclose a message of several lines; the end of the input ends it, too."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talk = Conversation(Library(), make_parser().parse_args(["chat", "-m", "m"]))  # type: ignore[arg-type]
    assert line_reader(talk)() == message


# ---- vectors ---------------------------------------------------------------------------------------------------------

def outputs() -> dict[str, Any]:
    """Known outputs of two texts."""
    dense = np.array([[0.5, 1.0], [0.25, 2.0]], np.float32)
    sparse = SparseVectors(np.array([0, 2, 3]), np.array([4, 7, 1]), np.array([0.5, 1.5, 2.0], np.float32), (2, 9), str)
    tokens = TokenVectors(np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([0, 2, 3]))
    return {"sparse": sparse, "tokens": tokens, "all": TextEmbeddings(dense, sparse, tokens)}


@pytest.mark.parametrize("vectors", ["sparse", "tokens", "all"])
def test_lines_of_other_outputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                vectors: str) -> None:
    """Each line is a JSON object with the text and its outputs."""
    library = Library(embed_iter=lambda texts, *_, **__: iter([list(texts) and outputs()[vectors]]))
    assert run(monkeypatch, library, "embed", "-m", "m", "--vectors", vectors, "one", "two") == 0
    parts = {"embedding": ([0.5, 1.0], [0.25, 2.0]), "sparse": ({"indices": [4, 7], "values": [0.5, 1.5]},
                                                                {"indices": [1], "values": [2.0]}),
             "tokens": ([[1, 2], [3, 4]], [[5, 6]])}
    names = list(parts) if vectors == "all" else [vectors]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"text": text, **{name: parts[name][at] for name in names}} for at, text in enumerate(("one", "two"))]
    assert library.calls[-1][2]["batch_size"] == (256 if vectors == "sparse" else 16)


@pytest.mark.parametrize("vectors", ["dense", "sparse", "tokens", "all"])
def test_vectors_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                               vectors: str) -> None:
    """A terminal shows the text, size and first numbers of each output, in a few lines; --format prints all numbers."""
    width = 384
    dense = np.linspace(0, 1, 2 * width, dtype=np.float32).reshape(2, width)
    sparse = SparseVectors(np.array([0, width, 2 * width]), np.tile(np.arange(width, dtype=np.int32), 2), dense.ravel(),
                           (2, 1000), str)
    tokens = TokenVectors(np.tile(dense, (3, 1)), np.array([0, 4, 6]))
    found = {"dense": dense, "sparse": sparse, "tokens": tokens, "all": TextEmbeddings(dense, sparse, tokens)}[vectors]
    library = Library(embed_iter=lambda texts, *_, **__: iter([list(texts) and found]))
    screens = []
    for options in ([], ["--format", "jsonl"]):
        screen = Terminal()
        screen.buffer = io.BytesIO()  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "stdout", screen)
        assert run(monkeypatch, library, "embed", "-m", "m", "--vectors", vectors, "one", "two\nlines", *options) == 0
        screens.append((screen.getvalue(), screen.buffer.getvalue()))  # type: ignore[attr-defined]
    (shown, nothing), (_, lines) = screens
    assert not nothing and len(shown.splitlines()) == (8 if vectors == "all" else 4) and str(width) in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert [json.loads(line)["text"] for line in lines.splitlines()] == ["one", "two\nlines"]


@pytest.mark.parametrize("arguments, said", [
    (["--vectors", "tokens", "--max-active", "3"], "--max-active needs --vectors sparse"),
    (["--max-active", "3"], "--max-active needs --vectors sparse"),
    (["--vectors", "sparse", "--format", "npy", "-o", "x"], "--format npy and --vectors sparse exclude each other"),
    (["--vectors", "all", "-o", "x.npy"], "--output x.npy, an array, and --vectors all exclude each other"),
    *((["--vectors", "tokens", *flags], f"{flags[0].replace('no-', '')} and --vectors tokens exclude each other")
      for flags in (["--dimensions", "3"], ["--no-normalize"], ["--precision", "int8"], ["--on-error", "null"]))])
def test_options_of_dense_vectors(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """Other outputs refuse the options of dense vectors before a model is loaded."""
    assert main(["embed", "-m", "no such model", "x", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["embed", "--file"], ["embed-image"]])
def test_inputs_are_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    """An output that is also an input is refused before a model is loaded, whatever path leads to it."""
    given = tmp_path / "given"
    given.write_text("a text")
    (tmp_path / "link").symlink_to("given")
    for path in (given, tmp_path / "." / ".." / tmp_path.name / "given", tmp_path / "link"):
        assert main([*arguments, str(given), "-m", "no such model", "-o", str(path)]) == 1
        assert "--output must be another file than the inputs, got '/" in capsys.readouterr().err
    assert given.read_text() == "a text"


@pytest.mark.parametrize("command", ["embed", "embed-image"])
def test_outputs_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    """They are refused before a model is loaded, under the name that the user gave."""
    for output, said in ((f"{tmp_path}/none/x.npy", "a path in an existing folder, got '{}'. Create the folder first"),
                         (f"{tmp_path}/", "the path of a file, got '{}'"), ("", "the path of a file, got '{}'"),
                         (str(tmp_path), "the path of a file, got '{}'")):
        assert main([command, "x", "-m", "no such model", "-o", output]) == 1
        shown = output if len(repr(output)) <= 60 or "folder" in said else None
        seen = capsys.readouterr().err
        assert seen.startswith("mpool: --output must be " + said.partition("{}")[0])
        assert shown is None or seen == f"mpool: --output must be {said.format(output)}\n"


def test_an_error_about_an_output_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder allows no new file, the error does not name the file that is renamed at the end."""
    output = str(tmp_path / ("n" * 250))  # its name with a suffix is too long
    assert run(monkeypatch, Library(), "embed", "-m", "m", "a", "-o", output) == 1
    assert capsys.readouterr().err == f"mpool: {output}: File name too long\n"


@pytest.mark.parametrize("command", ["embed", "embed-image"])
@pytest.mark.parametrize("name, form", [
    ("x.npy", "npy"), ("x.NPY", "npy"), ("x.jsonl", "jsonl"), ("x.json", "jsonl"), ("x.ndjson", "jsonl"),
    ("x", "jsonl"), ("x.txt", "jsonl"), ("x.vectors", "jsonl"), (".csv", "jsonl"),
    *((f"x{suffix}", None) for suffix in (".csv", ".CSV", ".tsv", ".parquet", ".npz", ".pt", ".safetensors",
                                          ".jsonl.gz"))])
def test_formats_by_the_suffix(capsys: pytest.CaptureFixture[str], command: str, name: str, form: str | None) -> None:
    """A suffix of a format that the command does not write is refused, unless --format says what to write."""
    given = make_parser().parse_args([command, "a", "-o", name])
    if form is not None:
        assert embedding._format(given) == form
        return
    assert main([command, "a", "-m", "no such model", "-o", name]) == 1
    assert capsys.readouterr().err == (
        f"mpool: --output must be a .npy file (an array) or a .jsonl file (lines of JSON), got '{name}'. To write "
        f"lines of JSON under the suffix {os.path.splitext(name)[1].lower()}, add --format jsonl\n")
    for form in ("jsonl", "npy"):
        given.format = form
        assert embedding._format(given) == form


def test_vectors_for_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe is not replaced by a file, and an array for it is written as a whole."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    library = Library(embed_iter=lambda texts, *_, **__: iter([list(texts) and rows[:2], rows[2:]]))
    assert run(monkeypatch, library, "embed", "-m", "m", "a", "b", "c", "--format", "npy", "-o", str(pipe)) == 0
    with os.fdopen(reading, "rb") as file:
        assert np.array_equal(np.load(io.BytesIO(file.read())), rows)
    assert list(tmp_path.iterdir()) == [pipe]


# ---- images, files and models ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("as_json", [False, True])
def test_paths_of_generated_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                   count: int, as_json: bool) -> None:
    """A single image has the given name; several have numbers from 1."""
    saved = list[str]()
    image = SimpleNamespace(save=saved.append)
    library = Library(generate_image=SimpleNamespace(model="m", seed=5, results=[image] * count))
    assert run(monkeypatch, library, "generate-image", "-m", "m", "p", "-o", f"{tmp_path}/a.png",
               *["--json"] * as_json) == 0
    paths = [f"{tmp_path}/a.png"] if count == 1 else [f"{tmp_path}/a-1.png", f"{tmp_path}/a-2.png"]
    out = capsys.readouterr().out
    assert saved == paths
    assert (json.loads(out) == {"model": "m", "seed": 5, "images": paths}) if as_json else out.split() == paths


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("failing", [(), ("b",)])
def test_rm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry: bool,
            failing: tuple[str]) -> None:
    """A model that cannot be deleted is reported, and the others still are."""
    def remove(name: str, dry_run: bool) -> Any:
        assert dry_run is dry
        if name in failing:
            raise mpool.errors.FileError(f"{name} is in use")
        return SimpleNamespace(freed=1_550_000, files=("x", "y"))

    monkeypatch.setattr("mpool.cli.removing.remove", remove)
    names, flags = ["a", "b", "c"], ["--dry-run"] * dry
    assert main(["rm", *names, *flags]) == len(failing)
    would = "would be " if dry else ""
    assert capsys.readouterr() == ("".join(f"{name}: 1.6 MB {would}freed\n" for name in names if name not in failing),
                                   "".join(f"mpool: {name} is in use\n" for name in failing))
    assert main(["rm", *names, *flags, "--json"]) == len(failing)
    assert json.loads(capsys.readouterr().out) == [
        {"ref": name, "bytes": 1_550_000, "files": ["x", "y"]} for name in names if name not in failing]


@pytest.mark.parametrize("flags, more", [
    ([], {"force": False, "threads": None, "allow_requantize": False}),
    (["--force", "--threads", "3", "--allow-requantize"], {"force": True, "threads": 3, "allow_requantize": True})])
@pytest.mark.parametrize("local", [False, True])
def test_quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, local: bool,
                  flags: list[str], more: dict[str, Any]) -> None:
    """A reference is resolved to its files, a path is used as it is, and a terminal shows each per cent once."""
    def quantize(*given: Any, progress: Any, **options: Any) -> Any:
        assert (given, options) == ((source, "out.gguf", "Q8_0"), more)
        for done in (0, 1, 199, 200):
            progress(done, 200)
        return SimpleNamespace(path="out.gguf", nbytes=2_250_000, types={"Q8_0": 3, "F32": 2})

    resolved = list[Any]()
    monkeypatch.setattr("mpool.cli.quantizing.write", quantize)
    monkeypatch.setattr("mpool.cli.quantizing.resolve", lambda name, offline: resolved.append((name, offline))
                        or SimpleNamespace(path="/files"))
    name = str(tmp_path) if local else "org/name"
    source = name if local else "/files"
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    command = ["quantize", name, "out.gguf", "--type", "Q8_0", *flags]
    assert main(command) == 0 and main([*command, "--offline", "--json"]) == 0
    text, _, rest = capsys.readouterr().out.partition("\n")
    assert text == "out.gguf: 2.2 MB, 2 F32, 3 Q8_0"
    assert json.loads(rest) == {"path": "out.gguf", "bytes": 2_250_000, "types": {"Q8_0": 3, "F32": 2}}
    shown = "\r0 %\r99 %\r100 %\n"
    assert errors.getvalue() == shown + ("" if local else "from /files\n") + shown
    assert resolved == ([] if local else [("org/name", None), ("org/name", True)])


@pytest.mark.parametrize("verify", [False, True])
def test_pull(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
              verify: bool) -> None:
    """A pulled model has a line with its size and path, which says if its hashes were verified."""
    (tmp_path / "file").write_bytes(b"x" * 2_500_000)
    found = SimpleNamespace(key=None, ref="org/name", source="hub", revision="r", path=str(tmp_path), kind="folder",
                            files=())
    given, verified = list[Any](), list[Any]()
    monkeypatch.setattr("mpool.cli.models.resolve", lambda name, **options: given.append((name, options)) or found)
    monkeypatch.setattr("mpool.cli.models.verify", verified.append)
    assert main(["pull", "a", *["--verify"] * verify]) == 0
    assert capsys.readouterr().out == f"org/name: 2 MB in {tmp_path}{', hashes verified' * verify}\n"
    found.key = "key"
    assert main(["pull", "a", "--offline", "--update", "-q", "--json", *["--verify"] * verify]) == 0
    row, = json.loads(capsys.readouterr().out)
    assert row.pop("seconds") >= 0
    assert row == {"key": "key", "ref": "org/name", "source": "hub", "revision": "r", "path": str(tmp_path),
                   "kind": "folder", "bytes": 2_500_000}
    assert given == [("a", {"offline": None, "progress": None, "update": False}),
                     ("a", {"offline": True, "progress": False, "update": True})]
    assert verified == [found] * 2 * verify


def test_sizes_of_files(tmp_path: Path) -> None:
    """The size is that of the listed files, of a file, or of all files in a folder."""
    (tmp_path / "in").mkdir()
    for name, size in (("a", 3), ("in/b", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    for path, files, size in ((tmp_path, (), 8), (tmp_path / "a", (), 3), (tmp_path, (str(tmp_path / "in/b"),), 5)):
        assert size_of(SimpleNamespace(path=str(path), files=files)) == size  # type: ignore[arg-type]


class _Endless(io.StringIO):
    """A file without line ends and without an end. It ends the test if everything is read."""

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self.read(size)

    def read(self, size: int | None = -1) -> str:
        assert size is not None and size >= 0, "an endless line is read to its end"
        return "x" * size

    def __next__(self) -> str:
        return self.read()


def test_input_without_line_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    """A line, and a prompt on standard input, are read up to a limit."""
    monkeypatch.setattr(common, "MAX_READ", 100, raising=False)
    monkeypatch.setattr("sys.stdin", _Endless())
    with pytest.raises(FileError, match="line 1 of standard input has more than 100 characters. A file has one text"):
        list(Texts([], ["-"]))
    for command in (["generate"], ["vision", "-", "-i", "x.png"], ["generate-image"],
                    ["capture", "--prompt", "-", "--out", "x"]):
        assert main(command) == 1
        assert capsys.readouterr().err.startswith("mpool: standard input has more than 100 characters"), command
    monkeypatch.setattr("sys.stdin", io.StringIO("a\r\n" + "b" * 100 + "\n\nc"))
    with pytest.raises(FileError, match="line 2 of "):  # the line end counts
        list(Texts([], ["-"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("a\r\n" + "b" * 99 + "\n\nc"))
    assert list(Texts([], ["-"])) == ["a", "b" * 99, "", "c"]


def test_places_of_texts(tmp_path: Path) -> None:
    """Lines of files are counted from 1 in each file; texts of the command line have no place."""
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_text("1\n2\n")
    paths[1].write_text("3\n")
    found = Texts([], list(map(str, paths)))
    assert list(found) == ["1", "2", "3"]
    assert [found.place(at) for at in range(3)] == [
        f"line 1 of {paths[0]}", f"line 2 of {paths[0]}", f"line 1 of {paths[1]}"]
    assert Texts(["x"]).place(0) == "text 1 of the command line"
    for given, said in ((None, f"line 2 of {paths[0]} is bad"), ([2], r"`texts\[1\]` is bad"),
                        ([0, 2], f"line 1 of {paths[1]} is bad")):
        with pytest.raises(mpool.InvalidArgument, match=said), found.named(given):
            raise mpool.InvalidArgument("`texts[1]` is bad", param="texts[1]")


# ---- servers ---------------------------------------------------------------------------------------------------------

def test_settings_of_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options reach the settings. There is a token if its file is named, and always if other machines have access."""
    def parsed(*arguments: str) -> argparse.Namespace:
        return make_parser().parse_args(["serve", *arguments])

    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "cache"))
    settings, file = serving.configured(parsed()).settings()
    assert (settings.host, settings.port, settings.token, file) == ("127.0.0.1", 11435, None, None)
    path = tmp_path / "token"
    given = parsed("--port", "5", "--allow-host", "a", "--allow-host", "b", "--allow-origin", "http://c",
                   "--max-n", "3", "--grace", "0.5", "--token-file", str(path))
    for new in (True, False):
        settings, file = serving.configured(given).settings()
        assert file is not None and (file.path, file.is_new, path.exists()) == (str(path), new, not new)
        file.write()
    assert (settings.port, settings.allowed_hosts, settings.allowed_origins, settings.max_n, settings.grace,
            settings.token) == (5, ("a", "b"), ("http://c",), 3, 0.5, path.read_text().strip())
    for _ in range(2):  # the second token replaces the first one
        settings, file = serving.configured(parsed("--host", "10.0.0.5")).settings()
        assert file is not None and (settings.host, settings.token, file.is_new) == ("10.0.0.5", file.token, True)
        assert file.path == str(tmp_path / "cache" / "server-token")
        assert not os.path.exists(file.path) or Path(file.path).read_text() != f"{file.token}\n"
        file.write()
        assert Path(file.path).read_text() == f"{file.token}\n" and os.stat(file.path).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "cache") == ["server-token"]


@pytest.mark.parametrize("arguments, pooled, served, loaded", [
    ([], {"threads": 0, "offline": None, "weights": "auto", "shutdown_grace": 5.0}, ([], True, "auto", []), []),
    (["a=x", "-m", "b=y", "--only", "--compute", "int8", "--adapter", "z", "--threads", "3", "--offline", "--weights",
      "mapped", "--grace", "2", "--load"], {"threads": 3, "offline": True, "weights": "mapped", "shutdown_grace": 2.0},
     (["b=y", "a=x"], False, "int8", ["z"]), [("model", None)]),
    (["a=x", "--draft", "d"], {"threads": 0, "offline": None, "weights": "auto", "shutdown_grace": 5.0},
     (["a=x"], True, "auto", []), [("model", "d")])])
def test_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
               pooled: dict[str, Any], served: tuple[Any, ...], loaded: list[Any]) -> None:
    """Every option of ``mpool serve`` reaches the pool or the server."""
    library, made = Library(load=lambda model, draft: loads.append((model, draft))), list[Any]()
    loads, ended, pinned = list[Any](), list[int](), list[str]()

    class Serving:
        url, port = "http://u", 7
        state = SimpleNamespace(models=SimpleNamespace(all=lambda: [SimpleNamespace(model="model")],
                                                       at_start=lambda given, param: pinned.extend(given) or []))

        def __init__(self, settings: Any, pool: Any, models: Any, catalogue: Any, compute: Any, adapters: Any) -> None:
            made.append((models, catalogue, compute, adapters))
            assert pool is library

        def run(self, ready: Any) -> None:
            ready()

    monkeypatch.setattr("mpool.server.serving.Serving", Serving)
    monkeypatch.setattr("mpool.pool.Pool", lambda config: configs.append(config) or library)
    monkeypatch.setattr("mpool.host.native_calls.end_process_if_busy", ended.append)
    monkeypatch.setattr(serving, "_announce", lambda server, file, as_json: announced.append((file, as_json)))
    configs, announced = list[mpool.PoolConfig](), list[Any]()
    assert main(["serve", *arguments, "--pin", "a", "--log-format", "json"]) == 0
    assert configs == [mpool.PoolConfig(**pooled)] and announced == [(None, True)] and pinned == ["a"]
    assert (made, loads, ended) == ([served], loaded, [0])


@pytest.mark.parametrize("models_of", [[], ["a=x", "b=y"]])
def test_a_draft_needs_one_model(capsys: pytest.CaptureFixture[str], models_of: list[str]) -> None:
    """The error has the number of models."""
    assert main(["serve", *models_of, "--draft", "d"]) == 1
    assert capsys.readouterr().err == \
        f"mpool: --draft must be used with exactly one --model, got {len(models_of)} models\n"


def test_worker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every option of ``mpool worker`` reaches the worker, and a failed load has its code in the log."""
    made = list[tuple[Any, ...]]()

    class Worker:
        name, pool, serving = "n", Library(), SimpleNamespace(url="http://u")

        def __init__(self, *given: Any) -> None:
            made.append(given)
            given[-1](25, "read the files")
            if given[0] == "wrong":
                raise mpool.errors.FormatError("no model")

        def run(self, ready: Any) -> None:
            ready()

    monkeypatch.setattr("mpool.server.worker.Worker", Worker)
    ended = list[int]()
    monkeypatch.setattr("mpool.host.native_calls.end_process_if_busy", ended.append)
    for name in serving._NO_THREADS:
        monkeypatch.setenv(name, "7")
    assert main(["worker", "-m", "x", "--port", "4"]) == 0
    assert capsys.readouterr() == ("mpool serves n on http://u\n", "mpool: loading 25 %: read the files\n")
    assert main(["worker", "-m", "x", "--port", "5", "--token-file", f"{tmp_path}/token", "--threads", "3", "--offline",
                 "--weights", "mapped", "--compute", "int8", "--busy", "refuse", "--timeout", "2.5", "--capture",
                 f"{tmp_path}/c"]) == 0
    (ref, settings, config, *rest, _), (_, other, changed, *more, _) = made
    assert (ref, settings.port, settings.token, rest) == ("x", 4, None, ["auto", "wait", None, None])
    assert (config.offline, config.weights) == (mpool.PoolConfig().offline, "auto")
    assert (other.port, other.token) == (5, (tmp_path / "token").read_text().strip())
    assert (changed.threads, changed.offline, changed.weights) == (3, True, "mapped")
    assert more[:3] == ["int8", "refuse", 2.5] and str(more[3].path) == f"{tmp_path}/c"
    capsys.readouterr()
    assert main(["worker", "-m", "wrong", "--port", "4"]) == 1
    assert ended == [0, 0]
    assert "mpool: MODEL_LOAD_FAILED\n" in capsys.readouterr().err and os.environ["OPENBLAS_NUM_THREADS"] == "7"


@pytest.mark.parametrize("count, levels", [(0, ["ERROR", "NOTSET"]), (1, ["WARNING", "INFO"]),
                                           (2, ["DEBUG", "NOTSET"])])
def test_verbose(monkeypatch: pytest.MonkeyPatch, count: int, levels: list[str]) -> None:
    """One ``-v`` shows the records of mpool, two also those of other libraries."""
    loggers = [logging.getLogger(), logging.getLogger("mpool")]
    before = [logger.level for logger in loggers]
    monkeypatch.setattr(loggers[0], "handlers", [])
    try:
        loggers[0].setLevel(logging.ERROR), loggers[1].setLevel(logging.NOTSET)
        cli._prepare(SimpleNamespace(verbose=count))
        assert [logging.getLevelName(logger.level) for logger in loggers] == levels
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


def test_end_of_the_input_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D ends the prompt's line, so that the shell's prompt begins a new one."""
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    talk = Conversation(Library(), make_parser().parse_args(["chat", "-m", "m"]))  # type: ignore[arg-type]
    assert line_reader(talk)() is None and out.getvalue() == "\n"


@pytest.mark.parametrize("variable", [None, "MPOOL_OFFLINE"])
@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "org/name@main", "pip:package==1.0/model.gguf"])
def test_show_of_a_model_that_is_not_downloaded(name: str, variable: str | None, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the command that downloads it. That downloads are disabled is said only if they are."""
    for one in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "MPOOL_OFFLINE"):
        monkeypatch.delenv(one, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    for one in ("HF_HOME", "MPOOL_CACHE"):
        monkeypatch.setenv(one, str(tmp_path))
    assert main(["show", name]) == 1
    text = capsys.readouterr().err
    assert "is not on this machine, and `mpool show` downloads nothing" in text
    assert "disabled" not in text and "not asked" not in text
    start = f"When online, unset {variable} and run: " if variable else "To download it, run: "
    assert f"{start}mpool pull {name}" in text
