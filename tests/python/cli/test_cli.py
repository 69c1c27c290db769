"""The command ``mpool``, run in subprocesses."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mpool
import tinymodels
from mpool.cli import main
from mpool.cli.common import for_output, print_json
from mpool.cli.layout import table
from mpool.cli.parser import make_parser
from mpool.cli.chatting import Conversation
from mpool.errors import ContextOverflow
from terminals import ELSEWHERE, command, talk

def run(*arguments: str, stdin: str | bytes = "", env: dict[str, str] | None = None,
        check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command to completion."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command(*arguments), input=data, capture_output=True, timeout=300, cwd=ELSEWHERE,
                          env={**os.environ, **(env or {})})
    text = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(errors="surrogateescape"),
                                       done.stderr.decode(errors="replace"))
    if check:
        assert text.returncode == 0, text.stderr
    return text


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny embedding model."""
    return str(tinymodels.cached(tmp_path_factory, "bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny language model."""
    return str(tinymodels.cached(tmp_path_factory, "llama"))


# ---- parsing --------------------------------------------------------------------------------------------------------

COMMANDS = ("embed", "generate", "chat", "pull", "models", "show", "demo")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` lists all commands, and every command has its own help."""
    text = run("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", text, re.MULTILINE), name
        with pytest.raises(SystemExit) as left:
            make_parser().parse_args([name, "--help"])
        assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: mpool {name}")


def test_version_and_module() -> None:
    """``python -m mpool`` runs the command."""
    import mpool

    done = subprocess.run([sys.executable, "-m", "mpool", "--version"], capture_output=True, text=True, check=True,
                          cwd=ELSEWHERE)
    assert done.stdout == f"mpool {mpool.__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    """Printing the help imports neither numpy nor the core."""
    probe = ("import sys; from mpool.cli.parser import make_parser; make_parser().format_help(); "
             "print([name for name in ('numpy', 'mpool._core', 'tokenizers', 'huggingface_hub') "
             "if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ELSEWHERE)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [("embed", "--task", "other", "text"),
                                       ("generate", "--top-k", "many", "text"),
                                       ("generate", "--logit-bias", "x", "text"), ("pull",), ("nothing",)])
def test_wrong_usage_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of wrong usage is 2, by convention."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and capsys.readouterr().err.startswith("usage: mpool")


@pytest.mark.parametrize(("arguments", "said"), [
    (("generate", "text", "--model", "SmolLM2-135M-Instrukt"), "Did you mean SmolLM2-135M-Instruct"),
    (("generate", "text", "--model", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
    (("embed", "text", "--file", "-"), "either from arguments or from --file, got both"),
    (("embed", "--file", "/nowhere/texts"), "/nowhere/texts"),
    (("show", "org/name"), "mpool pull org/name"), (("pull", "org/name", "--offline"), "not on this machine")])
def test_errors_are_one_line_with_exit_code_1(arguments: tuple[str, ...], said: str, tmp_path: Path, bert: str) -> None:
    """An error is one line with the reason, without a traceback."""
    if arguments[:2] == ("embed", "--file"):
        arguments = (*arguments, "--model", bert)
    done = run(*arguments, env={"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("mpool: ") and said in done.stderr and done.stderr.count("\n") == 1


IMAGE = str(Path(mpool.__file__).parent / "demo_models" / "images" / "7.png")


@pytest.mark.parametrize(("arguments", "said"), [
    (("run", "qwen3:1.7b", f"what is this? {IMAGE}"), "qwen3-1.7b: does not see images, and the message names"),
    (("vision", "what is this?", "--image", IMAGE, "-m", "qwen3:1.7b"), "SmolVLM-256M-Instruct sees images"),
    (("run", "FLUX.1-schnell", "a cat"), "mpool generate-image --model FLUX.1-schnell"),
    (("chat", "all-mpnet-base-v2"), "returns vectors and cannot chat"),
    (("generate", "a", "-m", "all-mpnet-base-v2"), "capability is text_embedding, not text_to_text"),
    (("embed", "a", "-m", "qwen3.5:4b"), "capability is vision, not text_embedding"),
    # these can: only the download is missing
    (("run", "qwen3.5:4b", f"what is this? {IMAGE}"), "mpool pull Qwen3.5-4B"),
    (("run", "all-mpnet-base-v2", "a"), "mpool pull all-mpnet-base-v2"),
    (("generate", "a", "-m", "gemma3:4b"), "mpool pull gemma-3-4b-it")])
def test_what_a_model_cannot_do_is_said_before_a_download(
        arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "MPOOL_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert main([*arguments, "--offline"]) == 1
    shown = capsys.readouterr().err
    assert said.lower() in shown.lower() and ("mpool pull" in shown) == ("pull" in said)


# ---- embed ----------------------------------------------------------------------------------------------------------

TEXTS = ["The quick brown fox.", "Zwölf Boxkämpfer", "日本語 \"quoted\" \\ text"]


def lines_of(text: str) -> list[dict[str, Any]]:
    """Parse JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.builds
def test_embed_arguments_files_and_stdin_agree(bert: str, tmp_path: Path) -> None:
    """All inputs give the same output: one line per text, with the vectors of the Python API."""
    import mpool

    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    as_arguments = run("embed", "--model", bert, *TEXTS).stdout
    assert run("embed", "--model", bert, "--file", str(tmp_path / "texts")).stdout == as_arguments
    assert run("embed", "--model", bert, stdin="\r\n".join(TEXTS)).stdout == as_arguments
    assert run("embed", "--model", bert, "-", stdin="\n".join(TEXTS)).stdout == as_arguments
    found = lines_of(as_arguments)
    assert [line["text"] for line in found] == TEXTS
    assert np.array_equal(np.array([line["embedding"] for line in found], dtype=np.float32), mpool.embed(TEXTS, bert))


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["float32", "int8", "ubinary"])
def test_embed_to_npy(bert: str, tmp_path: Path, precision: str) -> None:
    """A file has the correct header after many batches; a pipe, which is not seekable, works too."""
    import mpool

    texts = [f"Text number {number}." for number in range(700)]
    stdin, path = "\n".join(texts), tmp_path / "vectors.npy"
    run("embed", "--model", bert, "--precision", precision, "-o", str(path), stdin=stdin)
    expected = mpool.embed(texts, bert, precision=precision)
    found = np.load(path, allow_pickle=False)
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert os.listdir(tmp_path) == ["vectors.npy"]
    piped = subprocess.run(command("embed", "--model", bert, "--precision", precision, "--format", "npy"),
                           input=stdin.encode(), capture_output=True, check=True, cwd=ELSEWHERE).stdout
    assert np.array_equal(np.load(io.BytesIO(piped), allow_pickle=False), expected)


def test_failed_embed_keeps_the_old_file(bert: str, tmp_path: Path) -> None:
    """The output file is replaced only when it is complete."""
    path = tmp_path / "vectors.npy"
    path.write_bytes(b"old")
    done = run("embed", "--model", bert, "-o", str(path), stdin=f"one\n{'x' * 1_000_001}\nthree\n", check=False)
    assert done.returncode == 1
    assert ": line 2 of standard input must be a str of 0 to 1,000,000 characters, got 1,000,001 " in done.stderr
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["vectors.npy"]


def test_errors_name_the_line_and_the_file(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is counted within its file, whatever the batch. A text of the command line has no line."""
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    Path(files[0]).write_text("x\n" * 300)
    Path(files[1]).write_text("x\nx\n" + "word " * 2000 + "\nx\n")
    base = ["embed", "-m", bert, "--no-truncate", "-q"]
    for more in ([], ["--precision", "int8"], ["--vectors", "tokens"]):
        assert main([*base, *more, "-f", files[0], "-f", files[1]]) == 1
        assert f": line 3 of {files[1]} has " in capsys.readouterr().err, more
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n" + "word " * 2000))
    assert main([*base, "-f", "-"]) == 1 and ": line 2 of standard input has " in capsys.readouterr().err
    assert main([*base, "x", "word " * 2000]) == 1
    assert ": text 2 of the command line has " in capsys.readouterr().err
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{tmp_path / 'a.png'}\nnone.png\n"))
    monkeypatch.setattr("mpool.cli.embedding._BATCH", 1)
    assert main(["embed-image", "-m", "digits-clip", "-q"]) == 1
    assert ": line 2 of standard input: none.png: No such file or" in capsys.readouterr().err


@pytest.mark.builds
def test_embed_survives_a_bad_line(bert: str) -> None:
    """``--on-error null`` writes null for a bad text, and the vectors of all other texts."""
    found = lines_of(run("embed", "--model", bert, "--on-error", "null", stdin="one\n\nthree\n").stdout)
    assert [line["text"] for line in found] == ["one", "", "three"]
    assert found[1]["embedding"] is None
    assert found[2] == lines_of(run("embed", "--model", bert, "three").stdout)[0]


@pytest.mark.builds
def test_embed_refuses_invalid_input(bert: str, tmp_path: Path) -> None:
    """Input that is not UTF-8, or empty, is an error."""
    done = run("embed", "--model", bert, stdin=b"good\nbad \xff\n", check=False)
    assert done.returncode == 1 and "standard input is not UTF-8" in done.stderr
    (tmp_path / "texts").write_bytes(b"bad \xff\n")
    done = run("embed", "--model", bert, "--file", str(tmp_path / "texts"), check=False)
    assert done.returncode == 1 and f"{tmp_path / 'texts'} is not UTF-8" in done.stderr
    done = run("embed", "--model", bert, check=False)
    assert done.returncode == 1 and "at least one text" in done.stderr


@pytest.mark.builds
def test_a_byte_order_mark_is_no_part_of_the_text(bert: str, llama: str, tmp_path: Path) -> None:
    """Editors on Windows write it at the start of files. It would change the first vector without a notice."""
    data = b"\xef\xbb\xbfone\r\ntwo\r\n"
    (tmp_path / "texts").write_bytes(data)
    wanted = run("embed", "--model", bert, "one", "two").stdout
    assert run("embed", "--model", bert, "--file", str(tmp_path / "texts")).stdout == wanted
    assert run("embed", "--model", bert, stdin=data).stdout == wanted
    greedy = ("generate", "--model", llama, "--temperature", "0", "--max-tokens", "20")
    assert run(*greedy, stdin=b"\xef\xbb\xbfThe quick").stdout == run(*greedy, "The quick").stdout


# ---- generate -------------------------------------------------------------------------------------------------------

@pytest.mark.builds
def test_generate_is_deterministic(llama: str) -> None:
    """The text does not depend on streaming, on the source of the prompt, or on the number of threads."""
    import mpool

    greedy = ("generate", "--model", llama, "--temperature", "0", "--max-tokens", "20")
    text = run(*greedy, "The quick").stdout
    assert text == mpool.generate("The quick", llama, temperature=0, max_tokens=20).text + "\n"
    assert run(*greedy, stdin="The quick").stdout == text
    assert json.loads(run(*greedy, "--json", "The quick").stdout)["text"] + "\n" == text
    seeded = ("generate", "--model", llama, "--seed", "5", "--temperature", "1.5", "--max-tokens", "20", "The quick")
    first = run(*seeded).stdout
    assert first == run(*seeded, "--threads", "1").stdout != text


@pytest.mark.slow
def test_arguments_that_are_not_utf8(bert: str, llama: str) -> None:
    text = os.fsdecode(b"caf\xe9")
    for arguments in (("embed", "--model", bert, text), ("generate", "--model", llama, text),
                      ("search", "--model", bert, text, "a"), ("embed", "--model", bert, "--prompt", text, "a")):
        done = run(*arguments, check=False)
        assert done.returncode == 1 and "half of a surrogate pair (U+DCE9)" in done.stderr
        assert done.stderr.endswith("The locale has the encoding UTF-8, in which the argument is no valid text. "
                                    "Convert the argument to UTF-8\n")


@pytest.mark.builds
def test_generate_options(llama: str) -> None:
    """Several choices, log probabilities, logit bias, a stop string, and the speed on standard error."""
    done = json.loads(run("generate", "--model", llama, "-n", "2", "--logprobs", "2", "--max-tokens", "3", "--seed",
                          "1", "--json", "The").stdout)
    assert len(done["choices"]) == 2 and len(done["logprobs"][0]["top"]) == 2
    numbered = run("generate", "--model", llama, "-n", "2", "--max-tokens", "3", "--seed", "1", "The").stdout
    assert numbered == "".join(f"--- {choice['index'] + 1} of 2, {choice['finish_reason']}\n{choice['text']}\n"
                               for choice in done["choices"])
    biased = json.loads(run("generate", "--model", llama, "--logit-bias", "70=100", "--temperature", "0",
                            "--max-tokens", "3", "--json", "The").stdout)
    assert biased["token_ids"] == [70, 70, 70]
    greedy = ("generate", "--model", llama, "--temperature", "0", "--max-tokens", "20", "The quick")
    text = run(*greedy).stdout[:-1]
    middle = text[len(text) // 2:len(text) // 2 + 3]
    stopped = run(*greedy, "--stop", middle, "--stats")
    assert stopped.stdout[:-1] == text[:text.index(middle)]
    assert re.search(r"prompt tokens in .* completion tokens.* stop$", stopped.stderr.strip())


def test_streams_that_the_shell_closed(bert: str, tmp_path: Path) -> None:
    """``<&-`` is empty input, ``>&-`` and ``2>&-`` discard the output. None of them ends in a traceback."""
    path = str(tmp_path / "vectors.npy")
    for redirect, arguments, code in ((">&-", ["a"], 0), ("<&-", [], 1), ("2>&-", ["a"], 0), ("2>&-", ["-f", "/"], 1),
                                      ("<&- >&- 2>&-", ["a", "-o", path], 0)):
        done = subprocess.run(["sh", "-c", f'"$@" {redirect}', "sh", *command("embed", "--model", bert, *arguments)],
                              capture_output=True, timeout=300, cwd=ELSEWHERE)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), (redirect, done.stderr)
        if redirect == "<&-":
            assert done.stderr.startswith(b"mpool: at least one text")
    assert np.load(path).shape[0] == 1


def test_closed_output(llama: str) -> None:
    """There is no traceback when the reader has closed the pipe."""
    read, write = os.pipe()
    with subprocess.Popen(command("generate", "--model", llama, "--ignore-eos", "--max-tokens", "1500", "The"),
                          stdout=write, stderr=subprocess.PIPE, cwd=ELSEWHERE) as child:
        os.close(write)
        os.close(read)  # before the child writes: a busy machine may let it write everything before this process runs
        assert child.stderr is not None and child.stderr.read() == b""
        assert child.wait(60) == 1


# ---- chat and Ctrl-C ------------------------------------------------------------------------------------------------

ENDLESS = ("--ignore-eos", "--max-tokens", "16000", "--seed", "3")


def test_interrupted_generate(llama: str) -> None:
    """After Ctrl-C the exit code is 130, without a traceback."""
    with talk("generate", "--model", llama, *ENDLESS, "The") as session:
        session.some()
        session.child.send_signal(signal.SIGINT)
        assert "Traceback" not in session.until("mpool: interrupted")
        assert session.child.wait(30) == 130


def test_chat_over_pipes(llama: str) -> None:
    """Each line is a message; the prompt grows until /clear; the end of the input ends the chat."""
    stdin = "Hello\nAgain\n/clear\nHello\n\n/nothing\n/help\n"
    done = run("chat", "--model", llama, "--temperature", "0", "--max-tokens", "6", "--stats", "--system", "Be brief.",
               stdin=stdin)
    prompts = [int(found) for found in re.findall(r"(\d+) prompt tokens", done.stderr)]
    assert len(prompts) == 3 and prompts[0] == prompts[2] < prompts[1]
    assert "/nothing is not a command" in done.stderr and "/exit" in done.stderr
    assert ">" not in done.stdout.replace("|>", "")


def test_ctrl_c_stops_the_reply_but_not_the_program(llama: str) -> None:
    """Ctrl-C stops two replies, and /exit then exits with success."""
    with talk("chat", "--model", llama, *ENDLESS) as session:
        for _ in range(2):
            session.send("The quick brown fox\n")
            session.some()
            session.child.send_signal(signal.SIGINT)
            assert "Traceback" not in session.until("(stopped)")
        session.send("/exit\n")
        assert session.child.wait(30) == 0


@pytest.mark.builds
def test_chat_in_a_terminal(llama: str) -> None:
    """In a terminal that cannot move its cursor: a prompt, lines between triple quotes, Ctrl-C, Ctrl-D."""
    with talk("chat", "--model", llama, "--stats", *ENDLESS, terminal="dumb") as session:
        session.until("> ")
        session.send('"""The quick\n')
        session.until(". ")
        session.send('brown fox"""\n')
        session.some(60)
        session.send("\x03")
        session.until("(stopped)")
        session.until("> ")
        session.send("\x04")
        assert session.child.wait(30) == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("module", ["mpool.errors", "mpool.cli.parser", "mpool.cli.talking", "dataclasses", "numpy",
                                    "numpy.linalg", "mpool._core", "mpool.pool"])
def test_ctrl_c_during_start(llama: str, module: str) -> None:
    """Ctrl-C while a module is imported, also by C code: exit code 130, without a traceback."""
    program = """if True:
        import os, signal, sys
        from mpool.cli import main
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Finder:
            def find_spec(name, path=None, target=None):
                if name == sys.argv[1]:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.modules.pop(sys.argv[1], None)
        sys.meta_path.insert(0, Finder)
        sys.exit(main(sys.argv[2:]))
    """
    arguments = ("generate", "--model", llama, "--max-tokens", "1", "A")
    done = subprocess.run([sys.executable, "-c", program, module, *arguments], capture_output=True, text=True,
                          timeout=120, cwd=ELSEWHERE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "mpool: interrupted\n")


def test_import_error_that_ctrl_c_caused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An ImportError that a KeyboardInterrupt caused counts as an interrupt; others do not."""
    def imports(cause: BaseException) -> None:
        try:
            raise cause
        except BaseException:
            raise ImportError("failed to import")  # noqa: B904 - its context decides

    monkeypatch.setattr("mpool.cli._run", lambda argv: imports(KeyboardInterrupt()))
    assert main([]) == 130 and capsys.readouterr().err == "mpool: interrupted\n"
    monkeypatch.setattr("mpool.cli._run", lambda argv: imports(OSError()))
    with pytest.raises(ImportError):
        main([])


@pytest.mark.slow
def test_second_ctrl_c_at_the_prompt_exits(llama: str) -> None:
    """The first Ctrl-C prints how to exit."""
    with talk("chat", "--model", llama, terminal="dumb") as session:
        session.until("> ")
        session.wait_for_input()
        session.send("\x03")
        session.until("enter /exit")
        session.until("> ")
        session.wait_for_input()
        session.send("\x03")
        assert session.child.wait(30) == 130


@pytest.mark.slow
def test_chat_continues_after_a_failure(llama: str) -> None:
    """A message that exceeds the context is an error; the next one gets a reply; the exit code is 1."""
    done = run("chat", "--model", llama, "--temperature", "0", "--max-tokens", "4", "--stats",
               stdin="word " * 20000 + "\nHello\n", check=False)
    assert done.returncode == 1
    assert "tokens, but the model supports at most" in done.stderr and done.stderr.count("prompt tokens") == 1


def test_a_conversation_that_exceeds_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest messages and replies are dropped; the system message and the last message stay."""
    asked: list[list[str]] = []

    class Small:
        """A model with a context of four messages."""

        limit = 4

        def chat(self, messages: list[dict[str, str]], *_: Any, **__: Any) -> str:
            """Raise ContextOverflow for a fifth message."""
            asked.append([message["content"] for message in messages])
            if len(messages) > self.limit:
                raise ContextOverflow(tokens=5, limit=4)
            return "stream"

    conversation = Conversation(Small(), Namespace(stats=False, system="s"))  # type: ignore
    conversation.messages = [{"role": "user", "content": text} for text in "12345"]
    assert conversation.begin() == "stream"
    assert asked == [["s", "1", "2", "3", "4", "5"], ["s", "3", "4", "5"]]
    conversation.messages = [{"role": "user", "content": "x"}] * 2
    monkeypatch.setattr(Small, "limit", 1)
    with pytest.raises(ContextOverflow):
        conversation.begin()


# ---- images ---------------------------------------------------------------------------------------------------------

@pytest.mark.builds
def test_embed_image_files_and_stdin_agree(dino: Path, tmp_path: Path) -> None:
    import mpool
    from PIL import Image

    import imagemodels

    paths = []
    for seed in range(3):
        paths.append(str(tmp_path / f"{seed}.png"))
        Image.fromarray(imagemodels.image(seed, 60 + seed, 70)).save(paths[-1])
    with mpool.Pool() as pool:
        expected = pool.embed_image(paths, dino)
    lines = run("embed-image", "-m", str(dino), *paths).stdout
    found = [json.loads(line) for line in lines.splitlines()]
    assert [one["image"] for one in found] == paths
    assert np.allclose([one["embedding"] for one in found], expected, rtol=1e-7)
    assert run("embed-image", "-m", str(dino), stdin="\n".join(paths) + "\n").stdout == lines
    assert run("embed-image", "-m", str(dino), "-", stdin="\n".join(paths) + "\n").stdout == lines
    out = tmp_path / "vectors.npy"
    run("embed-image", "-m", str(dino), "-o", str(out), "--dimensions", "5", "-q", *paths)
    assert np.array_equal(np.load(out), expected[:, :5])
    run("embed-image", "-m", str(dino), "-o", str(out), "--precision", "int8", *paths)
    assert np.load(out).dtype == np.int8
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    failed = run("embed-image", "-m", str(dino), paths[0], str(bad), check=False)
    assert failed.returncode == 1 and "image 2 of the command line must be a PNG" in failed.stderr
    rows = [json.loads(line) for line in
            run("embed-image", "-m", str(dino), "--on-error", "null", paths[0], str(bad)).stdout.splitlines()]
    assert rows[1]["embedding"] is None and rows[0]["embedding"] is not None
    for given, words in (((), "at least one image"), (("https://host/image.png",), "fetching is not allowed")):
        failed = run("embed-image", "-m", str(dino), *given, check=False)
        assert failed.returncode == 1 and words in failed.stderr
    facts = json.loads(run("show", str(dino), "--json").stdout)
    assert "embed_image" in facts["purpose"]
    assert facts["capabilities"] == ["image_embedding"] and facts["patch_size"] == 14 and facts["any_size"] is True


# ---- models ---------------------------------------------------------------------------------------------------------

def test_models_lists_the_catalogue(tmp_path: Path) -> None:
    """The list has every row, as text and as JSON. Without downloads, it creates no files."""
    from mpool.models import load_catalogue

    empty = {"MPOOL_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    rows = json.loads(run("models", "--json", env=empty).stdout)
    assert [row["key"] for row in rows] == load_catalogue().keys()
    assert {row["key"] for row in rows if row["default"]} == set(load_catalogue().defaults.values())
    text = run("models", "--capability", "text_embedding", env=empty).stdout.splitlines()
    keys = load_catalogue().keys("text_embedding")  # the table of families follows behind an empty line
    assert [line.split()[0] for line in text[1:1 + len(keys)]] == keys and not "".join(text[1 + len(keys):][:1])
    assert os.listdir(tmp_path) == []


def test_models_prints_hashes_and_default_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row says if its hashes are pinned, and the options that its calls have by default; so does `show`."""
    from mpool.models import load_catalogue

    assert main(["models", "--wide", "--capability", "text_to_image"]) == 0
    text = capsys.readouterr().out.partition("\n\n")[0]
    header, *lines = (re.split(r"  +", line.strip()) for line in text.splitlines())
    rows = {line[0].removesuffix(" (default)"): dict(zip(header, line)) for line in lines}
    assert {name: (row["HASHES"], row["DEFAULT OPTIONS"]) for name, row in rows.items()} == {
        "FLUX.1-schnell": ("unpinned", "num_inference_steps=4, guidance_scale=0"),
        "stable-diffusion-3.5-large-turbo": ("unpinned", "num_inference_steps=4, guidance_scale=0"),
        "stable-diffusion-3.5-medium": ("unpinned", "-"), "digits-sd3": ("pinned", "-")}
    assert [line[0] for line in lines if "(default)" in line[0]] == ["FLUX.1-schnell (default)"]
    assert main(["models", "--wide"]) == 0
    out = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    catalogue = load_catalogue()
    assert [re.search(r"  (un)?pinned  ", line).group().strip() for line in out] == [  # type: ignore[union-attr]
        "unpinned" if catalogue.require(key).unpinned else "pinned" for key in catalogue.keys()]
    assert main(["show", "FLUX.1-schnell"]) == 0
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (facts["unpinned"], facts["options"]) == ("yes", "num_inference_steps: 4, guidance_scale: 0.0")


def test_show_the_tasks_of_a_model(tmp_path: Path) -> None:
    """The adapters in a model's files are listed, and do not count as parameters of the model."""
    from taskmodels import V3_TASKS, adapters_v3, make_v3, write_v3

    model = make_v3(1)
    facts = json.loads(run("show", str(write_v3(tmp_path, model, adapters_v3(model))), "--json").stdout)
    assert facts["adapters"] == list(V3_TASKS) and facts["default_adapter"] is None
    assert sorted(facts["adapter_modules"]) == ["Wqkv", "fc1", "fc2", "out_proj"]
    assert facts["parameters"] == sum(one.numel() for one in model.parameters())


@pytest.mark.builds
def test_show_a_model(bert: str, llama: str) -> None:
    """The output has facts from the files."""
    facts = json.loads(run("show", bert, "--json").stdout)
    assert (facts["capability"], facts["architecture"], facts["dimensions"]) == ("text_embedding", "bert", 32)
    assert facts["adapter_modules"] == ["query", "key", "value", "dense"]
    assert facts["bytes"] == sum(path.stat().st_size for path in Path(bert).rglob("*") if path.is_file())
    text = run("show", llama).stdout
    assert re.search(r"^architecture +llama$", text, re.MULTILINE)
    assert re.search(r"^adapter modules +q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj$", text,
                     re.MULTILINE)
    assert re.search(r"^chat template +yes$", text, re.MULTILINE)


def test_show_the_installation() -> None:
    """The configuration is printed as text and as JSON."""
    from mpool import _core

    facts = json.loads(run("show", "--json").stdout)
    assert facts["version"] in run("show").stdout
    assert list(facts["options"]) == [row[0] for row in _core.options()]


# ---- demo -----------------------------------------------------------------------------------------------------------

@pytest.mark.builds
def test_demo_without_weights_or_network(tmp_path: Path) -> None:
    """The demo prints the download commands, and still runs the bundled models."""
    done = run("demo", "--offline", env={"MPOOL_CACHE": str(tmp_path)}, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "downloading" not in done.stdout
    for key in ("all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"):
        assert f"skipping {key}: " in done.stderr and f"mpool pull {key}" in done.stderr
    assert "10 of 10 are correct" in done.stdout
    assert re.search(r"^  7\.png +What digit is this\? +This is a seven\.$", done.stdout, re.MULTILINE)
    generated = re.search(r"handwritten nine\n((?:.*\n){8})", done.stdout)
    assert generated is not None and len(set(generated[1])) > 5  # eight lines of characters, with shades of grey


# ---- output ---------------------------------------------------------------------------------------------------------

def test_control_characters_do_not_reach_a_terminal() -> None:
    """Control characters are replaced for a terminal, and written unchanged to files and pipes."""

    class Terminal(io.StringIO):
        """A stream that is a terminal."""

        def isatty(self) -> bool:
            """Return True."""
            return True

    text = "a\x1b[31mb\r\x9b2J\tc\nd\x7f é"
    assert for_output(text, Terminal()) == "a\ufffd[31mb\ufffd\ufffd2J\tc\nd\ufffd é"
    assert for_output(text, io.StringIO()) == text


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinities become null."""
    print_json({"a": [1.5, float("-inf")], "b": (float("nan"), "text")})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": [None, "text"]}


def test_table() -> None:
    """Columns are aligned, without trailing spaces."""
    assert table(("A", "BB"), [("long", "x"), ("y", "")]) == "A     BB\nlong  x\ny"
