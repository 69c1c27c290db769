"""The command ``mpool``, in processes of its own."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinymodels
from mpool.cli import main
from mpool.cli.common import for_output, print_json, table
from mpool.cli.parser import make_parser
from mpool.cli.talking import Conversation
from mpool.errors import ContextOverflow
from mpool.tasks.sampling import TABLE
from realmodels import real_path

#: Ctrl-C works also where the tests run in the background, where it starts out ignored.
START = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from mpool.cli import main; sys.exit(main())")


#: ``python -c`` imports from its working directory first, which must not be the one with the sources.
ELSEWHERE = Path(__file__).parent.parent


def command(*arguments: str) -> list[str]:
    """The command as a list, to be run in ELSEWHERE."""
    return [sys.executable, "-c", START, *arguments]


def run(*arguments: str, stdin: str | bytes = "", env: dict[str, str] | None = None,
        check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
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
    """A tiny text model."""
    return str(tinymodels.cached(tmp_path_factory, "llama"))


# ---- parsing --------------------------------------------------------------------------------------------------------

COMMANDS = ("embed", "generate", "chat", "pull", "models", "show", "demo")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and every command explains itself."""
    text = run("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", text, re.MULTILINE), name
        with pytest.raises(SystemExit) as left:
            make_parser().parse_args([name, "--help"])
        assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: mpool {name}")


def test_version_and_module() -> None:
    """``python -m mpool`` is the command too."""
    import mpool

    done = subprocess.run([sys.executable, "-m", "mpool", "--version"], capture_output=True, text=True, check=True,
                          cwd=ELSEWHERE)
    assert done.stdout == f"mpool {mpool.__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    """Neither numpy nor the core, so it answers at once."""
    probe = ("import sys; from mpool.cli.parser import make_parser; make_parser().format_help(); "
             "print([name for name in ('numpy', 'mpool._core', 'tokenizers', 'huggingface_hub') "
             "if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ELSEWHERE)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [(), ("embed", "--task", "other", "text"),
                                       ("generate", "--top-k", "many", "text"),
                                       ("generate", "--logit-bias", "x", "text"), ("pull",), ("nothing",)])
def test_wrong_usage_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """As everywhere."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and capsys.readouterr().err.startswith("usage: mpool")


def test_every_option_of_sampling_has_a_flag() -> None:
    """The table of options and the command line are the same."""
    flags = [flag for name, row in TABLE.items() for flag in
             ["-n" if name == "n" else "--" + name.replace("_", "-"), *([] if row.kind is bool else ["1"])]]
    found = vars(make_parser().parse_args(["generate", "text", *flags]))
    assert set(TABLE) <= set(found) and all(found[name] == 1 for name in TABLE)
    assert make_parser().parse_args(["generate", "text", "--max-tokens", "none"]).max_tokens is None
    assert not set(TABLE) & set(vars(make_parser().parse_args(["generate", "text"])))


@pytest.mark.parametrize(("arguments", "said"), [
    (("generate", "text", "--model", "SmolLM2-135M-Instrukt"), "the nearest"),
    (("generate", "text", "--model", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
    (("embed", "text", "--file", "-"), "or with --file, not both"),
    (("embed", "--file", "/nowhere/texts"), "/nowhere/texts"),
    (("show", "org/name"), "mpool pull org/name"),
    (("pull", "org/name", "--offline"), "not on this machine")])
def test_errors_are_one_line_and_1(arguments: tuple[str, ...], said: str, tmp_path: Path, bert: str) -> None:
    """What was wrong and what to do; never a traceback."""
    if arguments[:2] == ("embed", "--file"):
        arguments = (*arguments, "--model", bert)
    done = run(*arguments, env={"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("mpool: ") and said in done.stderr and done.stderr.count("\n") == 1


# ---- embed ----------------------------------------------------------------------------------------------------------

TEXTS = ["The quick brown fox.", "Zwölf Boxkämpfer", "日本語 \"quoted\" \\ text"]


def lines_of(text: str) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_embed_arguments_files_and_stdin_agree(bert: str, tmp_path: Path) -> None:
    """A line a text, the same bytes whatever they come from, and the API's vectors."""
    import mpool

    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    as_arguments = run("embed", "--model", bert, *TEXTS).stdout
    assert run("embed", "--model", bert, "--file", str(tmp_path / "texts")).stdout == as_arguments
    assert run("embed", "--model", bert, stdin="\r\n".join(TEXTS)).stdout == as_arguments
    found = lines_of(as_arguments)
    assert [line["text"] for line in found] == TEXTS
    assert np.array_equal(np.array([line["embedding"] for line in found], dtype=np.float32), mpool.embed(TEXTS, bert))


@pytest.mark.parametrize("precision", ["float32", "int8", "ubinary"])
def test_embed_to_npy(bert: str, tmp_path: Path, precision: str) -> None:
    """A file, whose header is right after many batches, and a pipe, which cannot be wound back."""
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


def test_embed_that_fails_leaves_the_old_file(bert: str, tmp_path: Path) -> None:
    """Complete or not at all."""
    path = tmp_path / "vectors.npy"
    path.write_bytes(b"old")
    done = run("embed", "--model", bert, "-o", str(path), stdin="one\n\nthree\n", check=False)
    assert done.returncode == 1 and "text 1 is empty" in done.stderr
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["vectors.npy"]


def test_embed_survives_a_bad_line(bert: str) -> None:
    """``--on-error null``: null, and every other text with its own vector."""
    found = lines_of(run("embed", "--model", bert, "--on-error", "null", stdin="one\n\nthree\n").stdout)
    assert [line["text"] for line in found] == ["one", "", "three"]
    assert found[1]["embedding"] is None
    assert found[2] == lines_of(run("embed", "--model", bert, "three").stdout)[0]


def test_embed_refuses_what_is_no_text(bert: str, tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and nothing at all."""
    done = run("embed", "--model", bert, stdin=b"good\nbad \xff\n", check=False)
    assert done.returncode == 1 and "standard input is not UTF-8" in done.stderr
    (tmp_path / "texts").write_bytes(b"bad \xff\n")
    done = run("embed", "--model", bert, "--file", str(tmp_path / "texts"), check=False)
    assert done.returncode == 1 and f"{tmp_path / 'texts'} is not UTF-8" in done.stderr
    done = run("embed", "--model", bert, check=False)
    assert done.returncode == 1 and "at least one text" in done.stderr


def test_embed_options_reach_the_model(bert: str) -> None:
    """Prompts, dimensions, normalisation."""
    import mpool

    line = lines_of(run("embed", "--model", bert, "--prompt", "find: ", "--dimensions", "8", "--no-normalize",
                        "--compute", "float32", "fox").stdout)[0]
    expected = mpool.embed("fox", bert, prompt="find: ", dimensions=8, normalize=False, compute="float32")
    assert np.array_equal(np.array(line["embedding"], dtype=np.float32), expected)


# ---- generate -------------------------------------------------------------------------------------------------------

def test_generate_is_deterministic(llama: str) -> None:
    """Greedy and seeded, printed as it is written or at once, from arguments or standard input: one text."""
    import mpool

    greedy = ("generate", "--model", llama, "--temperature", "0", "--max-tokens", "20")
    text = run(*greedy, "The quick").stdout
    assert text == mpool.generate("The quick", llama, temperature=0, max_tokens=20).text + "\n"
    assert run(*greedy, stdin="The quick").stdout == text
    assert json.loads(run(*greedy, "--json", "The quick").stdout)["text"] + "\n" == text
    seeded = ("generate", "--model", llama, "--seed", "5", "--temperature", "1.5", "--max-tokens", "20", "The quick")
    first = run(*seeded).stdout
    assert first == run(*seeded, "--threads", "1").stdout != text


def test_generate_refuses_what_is_no_text(llama: str) -> None:
    """Bytes that are not UTF-8; a file with them is named by embed."""
    done = run("generate", "--model", llama, stdin=b"caf\xe9", check=False)
    assert done.returncode == 1 and done.stderr.startswith("mpool: standard input is not UTF-8")


def test_generate_options(llama: str) -> None:
    """Several answers, log probabilities, a stop string, a bias; how fast it was goes to standard error."""
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


def test_a_reader_that_leaves(llama: str) -> None:
    """No traceback when whoever reads has enough."""
    with subprocess.Popen(command("generate", "--model", llama, "--ignore-eos", "--max-tokens", "1500", "The"),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ELSEWHERE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 1


# ---- talking, and Ctrl-C --------------------------------------------------------------------------------------------

class Talk:
    """A process of the command whose output is read as it comes."""

    def __init__(self, child: subprocess.Popen[bytes], read: int, write: int) -> None:
        self.child, self.read, self.write = child, read, write
        self.seen = b""

    def send(self, text: str) -> None:
        """Types."""
        os.write(self.write, text.encode())

    def until(self, wanted: str, timeout: float = 120) -> str:
        """All output up to and with a piece of it; what was read before does not count."""
        end = time.monotonic() + timeout
        while wanted.encode() not in self.seen:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.read], [], [], left)[0], f"{wanted!r} not in {self.seen!r}"
            try:
                more = os.read(self.read, 65536)
            except OSError:  # a terminal whose other side is closed
                more = b""
            assert more, f"{wanted!r} not in {self.seen!r}, and no more comes"
            self.seen += more
        head, piece, self.seen = self.seen.partition(wanted.encode())
        return (head + piece).decode(errors="replace")

    @staticmethod
    def settle() -> None:
        """Lets the child reach its wait for input: a signal between prompt and wait is only seen with the next key."""
        time.sleep(0.5)

    def some(self, count: int = 20) -> None:
        """Waits for some output, whatever it is."""
        while len(self.seen) < count:
            assert select.select([self.read], [], [], 120)[0]
            self.seen += os.read(self.read, 65536)
        self.seen = b""


@contextmanager
def talk(*arguments: str, terminal: bool = False) -> Iterator[Talk]:
    """Starts the command; both its outputs come as one."""
    if terminal:
        import fcntl
        import termios

        outer, inner = os.openpty()
        child = subprocess.Popen(command(*arguments), stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
                                 cwd=ELSEWHERE,
                                 preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                                 env={**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"})
        os.close(inner)
        read = write = outer
    else:
        child = subprocess.Popen(command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, bufsize=0, cwd=ELSEWHERE)
        assert child.stdout is not None and child.stdin is not None
        read, write = child.stdout.fileno(), child.stdin.fileno()
    try:
        yield Talk(child, read, write)
    finally:
        child.kill()
        child.wait()
        if terminal:
            os.close(read)
        else:
            child.stdin.close()
            child.stdout.close()


ENDLESS = ("--ignore-eos", "--max-tokens", "16000", "--seed", "3")


def test_generate_is_interrupted(llama: str) -> None:
    """Ctrl-C: 130 and no traceback."""
    with talk("generate", "--model", llama, *ENDLESS, "The") as session:
        session.some()
        session.child.send_signal(signal.SIGINT)
        assert "Traceback" not in session.until("mpool: interrupted")
        assert session.child.wait(30) == 130


def test_chat_over_pipes(llama: str) -> None:
    """An answer a line, remembered: the prompt grows; /clear forgets; the end of the input ends it."""
    stdin = "Hello\nAgain\n/clear\nHello\n\n/nothing\n/help\n"
    done = run("chat", "--model", llama, "--temperature", "0", "--max-tokens", "6", "--stats", "--system", "Be brief.",
               stdin=stdin)
    prompts = [int(found) for found in re.findall(r"(\d+) prompt tokens", done.stderr)]
    assert len(prompts) == 3 and prompts[0] == prompts[2] < prompts[1]
    assert "/nothing is not a command" in done.stderr and "/exit" in done.stderr
    assert ">" not in done.stdout.replace("|>", "")


def test_ctrl_c_stops_the_answer_and_not_the_program(llama: str) -> None:
    """Twice, and then the program leaves as asked, with success."""
    with talk("chat", "--model", llama, *ENDLESS) as session:
        for _ in range(2):
            session.send("The quick brown fox\n")
            session.some()
            session.child.send_signal(signal.SIGINT)
            assert "Traceback" not in session.until("(stopped)")
        session.send("/exit\n")
        assert session.child.wait(30) == 0


def test_chat_in_a_terminal(llama: str) -> None:
    """A prompt, lines between triple quotes, Ctrl-C while answering and while waiting, Ctrl-D."""
    with talk("chat", "--model", llama, "--stats", *ENDLESS, terminal=True) as session:
        session.until("> ")
        session.send('"""The quick\n')
        session.until("... ")
        session.send('brown fox"""\n')
        session.some(60)
        session.send("\x03")
        session.until("(stopped)")
        session.until("> ")
        session.settle()
        session.send("\x03")
        session.until("press Ctrl-C again or Ctrl-D, or enter /exit")
        session.until("> ")
        session.send("\x04")
        assert session.child.wait(30) == 0


@pytest.mark.parametrize("module", ["mpool.errors", "mpool.cli.parser", "mpool.cli.talking", "dataclasses", "numpy",
                                    "numpy.linalg", "mpool._core", "mpool.pool"])
def test_ctrl_c_while_it_starts(llama: str, module: str) -> None:
    """Just when a module is imported, also by C code: 130 and no traceback."""
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


def test_an_error_that_was_made_of_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Is one; others are not."""
    def imports(cause: BaseException) -> None:
        try:
            raise cause
        except BaseException:
            raise ImportError("failed to import")

    monkeypatch.setattr("mpool.cli._run", lambda argv: imports(KeyboardInterrupt()))
    assert main([]) == 130 and capsys.readouterr().err == "mpool: interrupted\n"
    monkeypatch.setattr("mpool.cli._run", lambda argv: imports(OSError()))
    with pytest.raises(ImportError):
        main([])


def test_second_ctrl_c_at_the_prompt_leaves(llama: str) -> None:
    """The first one says how."""
    with talk("chat", "--model", llama, terminal=True) as session:
        session.until("> ")
        session.settle()
        session.send("\x03")
        session.until("enter /exit")
        session.until("> ")
        session.settle()
        session.send("\x03")
        assert session.child.wait(30) == 130


def test_chat_with_one_failure_goes_on_and_says_so(llama: str) -> None:
    """A question that is too long for the model is an error; the next one is answered; the exit code tells."""
    done = run("chat", "--model", llama, "--temperature", "0", "--max-tokens", "4", "--stats",
               stdin="word " * 20000 + "\nHello\n", check=False)
    assert done.returncode == 1
    assert "tokens, the model takes" in done.stderr and done.stderr.count("prompt tokens") == 1


def test_a_conversation_that_outgrows_the_model() -> None:
    """The oldest questions go with their answers; the system message and the question stay."""
    asked: list[list[str]] = []

    class Small:
        """A pool whose model takes four messages."""

        def chat(self, messages: list[dict[str, str]], *_: Any, **__: Any) -> str:
            """Refuses a fifth."""
            asked.append([message["content"] for message in messages])
            if len(messages) > 4:
                raise ContextOverflow(tokens=5, limit=4)
            return "stream"

    conversation = Conversation(Small(), None, Namespace(stats=False, system="s", compute="auto"))  # type: ignore
    conversation.messages = [{"role": "user", "content": text} for text in "12345"]
    assert conversation.begin() == "stream"
    assert asked == [["s", "1", "2", "3", "4", "5"], ["s", "3", "4", "5"]]
    conversation.messages = [{"role": "user", "content": "x"}] * 2
    conversation.start *= 4
    with pytest.raises(ContextOverflow):
        conversation.begin()


# ---- images ---------------------------------------------------------------------------------------------------------

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
    out = tmp_path / "vectors.npy"
    run("embed-image", "-m", str(dino), "-o", str(out), "--dimensions", "5", "-q", *paths)
    assert np.array_equal(np.load(out), expected[:, :5])
    run("embed-image", "-m", str(dino), "-o", str(out), "--precision", "int8", *paths)
    assert np.load(out).dtype == np.int8
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    failed = run("embed-image", "-m", str(dino), paths[0], str(bad), check=False)
    assert failed.returncode == 1 and "`images[1]` must be a PNG" in failed.stderr
    rows = [json.loads(line) for line in
            run("embed-image", "-m", str(dino), "--on-error", "null", paths[0], str(bad)).stdout.splitlines()]
    assert rows[1]["embedding"] is None and rows[0]["embedding"] is not None
    for given, words in (((), "at least one image"), (("https://host/image.png",), "fetching is not allowed")):
        failed = run("embed-image", "-m", str(dino), *given, check=False)
        assert failed.returncode == 1 and words in failed.stderr
    facts = json.loads(run("show", str(dino), "--json").stdout)
    assert "embed_image" in facts["gives"]
    assert facts["capabilities"] == ["image_embedding"] and facts["patch_size"] == 14 and facts["any_size"] is True


# ---- models ---------------------------------------------------------------------------------------------------------

def test_models_lists_the_catalogue(tmp_path: Path) -> None:
    """Every row, in text and as JSON; on an empty machine nothing is here."""
    from mpool.models import load_catalogue

    empty = {"MPOOL_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    rows = json.loads(run("models", "--json", env=empty).stdout)
    assert [row["key"] for row in rows] == load_catalogue().keys()
    assert [row["key"] for row in rows if row["default"]] == list(load_catalogue().defaults.values())
    text = run("models", "--capability", "text_embedding", env=empty).stdout.splitlines()
    keys = load_catalogue().keys("text_embedding")  # the table of families follows behind an empty line
    assert [line.split()[0] for line in text[1:1 + len(keys)]] == keys and not "".join(text[1 + len(keys):][:1])
    assert os.listdir(tmp_path) == []


def test_show_a_model(bert: str, llama: str) -> None:
    """What its files say."""
    facts = json.loads(run("show", bert, "--json").stdout)
    assert (facts["capability"], facts["architecture"], facts["dimensions"]) == ("text_embedding", "bert", 32)
    assert facts["bytes"] == sum(path.stat().st_size for path in Path(bert).rglob("*") if path.is_file())
    text = run("show", llama).stdout
    assert re.search(r"^architecture +llama$", text, re.MULTILINE)
    assert re.search(r"^chat template +yes$", text, re.MULTILINE)


def test_show_a_model_that_is_not_here(tmp_path: Path) -> None:
    """The catalogue's row, and how to fetch it; nothing is fetched."""
    empty = {"MPOOL_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    text = run("show", "bge-small-en-v1.5", env=empty).stdout
    assert "mpool pull bge-small-en-v1.5" in text and "BAAI/bge-small-en-v1.5" in text


def test_show_the_installation() -> None:
    """In text, and the same as JSON."""
    from mpool import _core

    facts = json.loads(run("show", "--json").stdout)
    assert facts["version"] in run("show").stdout
    assert list(facts["options"]) == [row[0] for row in _core.options()]


def test_pull_tells_where_and_goes_on_after_a_failure(bert: str, tmp_path: Path) -> None:
    """A model that is here, one that is not."""
    done = run("pull", "--offline", "--json", "--verify", "org/name", bert, check=False,
               env={"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)})
    assert done.returncode == 1 and "org/name" in done.stderr
    (found,) = json.loads(done.stdout)
    assert found["path"] == bert and found["source"] == "local"


# ---- demo -----------------------------------------------------------------------------------------------------------

def test_demo() -> None:
    """Ranks what belongs to the question before what does not, answers, and says how fast."""
    facts = json.loads(run("demo", "--json", "--offline", "--embedding-model", str(real_path("minilm")),
                           "--text-model", str(real_path("smollm2"))).stdout)
    ranking = [row["text"] for row in facts["embedding"]["ranking"]]
    assert ranking[0].startswith(("Air scatters", "At sunset")) and ranking[1].startswith(("Air scatters", "At sunset"))
    assert "blue" in facts["text"]["answer"] and facts["text"]["completion_tokens"] > 20
    for number in (facts["embedding"]["texts_per_second"], facts["embedding"]["load_seconds"],
                   facts["text"]["tokens_per_second"], facts["text"]["load_seconds"]):
        assert number > 0


def test_demo_for_people(bert: str, llama: str) -> None:
    """The same in words, with models of one's own."""
    text = run("demo", "--embedding-model", bert, "--text-model", llama, "--question", "Who are you?").stdout
    assert text.count("Who are you?") == 2 and text.count("already downloaded") == 2
    assert "digits-clip: bundled with mpool" in text and "7.png  a handwritten seven" in text
    assert re.search(r"speed +[\d,]+ texts/s", text) and re.search(r"speed +[\d,]+ tokens/s", text)


def test_demo_without_weights_or_network(tmp_path: Path) -> None:
    """Says how to fetch them, and shows what comes with mpool all the same."""
    done = run("demo", "--offline", env={"MPOOL_CACHE": str(tmp_path)}, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "downloading" not in done.stdout
    for key in ("all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"):
        assert f"skipping {key}: " in done.stderr and f"mpool pull {key}" in done.stderr
    assert "10 of 10 are correct" in done.stdout
    assert re.search(r"^  7\.png +What digit is this\? +This is a seven\.$", done.stdout, re.MULTILINE)
    drawn = re.search(r"handwritten nine\n((?:.*\n){8})", done.stdout)
    assert drawn is not None and len(set(drawn[1])) > 5  # eight lines, of paper, ink, and shades between


# ---- writing for people ---------------------------------------------------------------------------------------------

def test_a_model_cannot_drive_the_terminal() -> None:
    """Control characters are shown as such there, and passed on as they are elsewhere."""

    class Terminal(io.StringIO):
        """One."""

        def isatty(self) -> bool:
            """Yes."""
            return True

    text = "a\x1b[31mb\r\x9b2J\tc\nd\x7f é"
    assert for_output(text, Terminal()) == "a\ufffd[31mb\ufffd\ufffd2J\tc\nd\ufffd é"
    assert for_output(text, io.StringIO()) == text


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    """What JSON has no word for is null."""
    print_json({"a": [1.5, float("-inf")], "b": (float("nan"), "text")})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": [None, "text"]}


def test_table() -> None:
    """Columns are aligned and no line ends in blanks."""
    assert table(("A", "BB"), [("long", "x"), ("y", "")]) == "A     BB\nlong  x\ny"
