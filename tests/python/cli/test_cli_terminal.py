"""The command line in a terminal: conversations, replies, lists and help. Other outputs stay exact."""

import io
import json
import os
import re
import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.cli import chatting, main
from mpool.cli.command_parser import Help, Parser
from mpool.cli.help_texts import EXAMPLES
from mpool.cli.layout import table, text_width
from mpool.cli.parser import make_parser
from mpool.cli.reply import faint, print_reply
from mpool.cli.terminal import Wrapped
from mpool.errors import MpoolError, WrongCapability
from mpool.results import Chunk
from terminals import talk

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
UP = "\x1b[A"
#: The prompt turns bracketed paste on when it begins to read, and off when it ends.
PROMPT_BEGINS, PROMPT_ENDS = "\x1b[?2004h", "\x1b[?2004l"


class Terminal(io.StringIO):
    """A stream of a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> Terminal:
    """Return a terminal that is standard output now. (pytest replaces the stream of a fixture.)"""
    monkeypatch.setattr("sys.stdout", found := Terminal())
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return found


# ---- conversations ---------------------------------------------------------------------------------------------------

def messages_of(path: Path) -> list[str]:
    """Return the messages of the user in a saved conversation."""
    return [one["content"] for one in json.loads(path.read_text())["messages"] if one["role"] == "user"]


def test_a_conversation_in_a_terminal(llama: Path, tmp_path: Path) -> None:
    """Pasted lines are one message, quotes too; what is typed during a reply waits, also if Ctrl-C ends it; a second
    Ctrl-C ends the program, unless something was typed between; the next conversation has the history, which Ctrl-R
    searches in any case."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    arguments = ("chat", "--model", str(llama), "--temperature", "0", "--max-tokens", "4", "--ignore-eos")
    with talk(*arguments, terminal="xterm", MPOOL_CACHE=str(tmp_path)) as session:
        def send(text: str, wanted: str) -> None:
            session.send(text)
            session.until(PROMPT_ENDS)
            session.until(wanted)

        def begin(text: str) -> None:
            session.send(text)
            session.until(PROMPT_ENDS)
            session.some(200)

        session.until(PROMPT_BEGINS)
        send(f"{PASTE}one\rtwo\r{PASTED}\r", "/set max_tokens 8")
        send('"""a\rb"""\r', "/set max_tokens 8")
        send("/set max_tokens 16000\r", "max_tokens")
        begin("long\r")
        session.send("\x03")
        session.until("(stopped)")
        send(f"/save {first}\r", "messages")
        send("/set max_tokens 2000\r", "max_tokens")
        begin("more\r")
        session.send("typed\nlater\n")
        session.until("/set max_tokens 4000")
        begin("!\r")
        session.send("\x03")
        session.until("(stopped)")
        send(f"/save {second}\r", "messages")
        begin("last\r")
        session.send("ahead\x03")
        session.until("(stopped)")
        session.until("ahead")
        begin("!\r")
        session.send("\x03")
        session.until("(stopped)")
        session.until(PROMPT_BEGINS)
        session.send("typed\x03")
        session.send("\x03")
        session.until(PROMPT_BEGINS)
        session.send("\x03")
        assert session.child.wait(30) == 130
    assert messages_of(first) == ["one\ntwo", "a\nb", "long"]
    assert messages_of(second)[3:] == ["more", "typed\nlater!"]
    assert (tmp_path / "chat-history").stat().st_mode & 0o777 == 0o600
    with talk(*arguments, terminal="xterm", MPOOL_CACHE=str(tmp_path)) as session:
        session.until(PROMPT_BEGINS)
        session.send(f"{UP}\r")
        session.until("/set max_tokens 8")
        session.until(PROMPT_BEGINS)
        session.send("\x12LONG\r\r")
        session.until("/set max_tokens 8")
        session.send(f"/save {second}\r")
        session.until("messages")
        session.until(PROMPT_BEGINS)
        session.send("\x04")
        assert session.child.wait(30) == 0
    assert messages_of(second) == ["ahead!", "long"]


class Model:
    """A model that replies with the text that it gets."""

    context_length = None

    def __init__(self, capability: str = "text_to_text") -> None:
        self.name, self.capability = "model", capability
        self.asked: list[list[dict[str, Any]]] = []
        self.options: dict[str, Any] = {}

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """Record the request, and return its stream."""
        self.asked.append(messages)
        self.options = dict(options)
        return Stream([Chunk(f"reply {len(self.asked)}", finish_reason="stop")])


class Stream(list[Any]):
    """A stream of chunks."""

    def close(self) -> None:
        """Do nothing."""

    def result(self) -> mpool.Completion:
        """Return the completion."""
        text = "".join(one.text for one in self)
        return mpool.Completion(text, "stop", None, (), None, mpool.results.Usage(1, 1),
                                mpool.results.Timings(0, 0, 0, 0), "model", 0, ())


def conversation(model: Model) -> chatting.Conversation:
    return chatting.Conversation(model, Namespace(stats=False, system=None))


def test_settings_of_a_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/set checks and sends options, also in Ollama's words; /save and /load keep them, and replace no other file."""
    model = Model()
    one = conversation(model)
    for line in ("/set temperature 0.5", "/set parameter num_predict 7", "/set stop END", "/set nothink",
                 "/set system Be brief.", "/set parameter num_ctx 4096", "/set top_k -5", "/set nothing 1", "Hello"):
        one.handle(line)
    wanted = {"temperature": 0.5, "max_tokens": 7, "stop": "END"}
    assert model.options == {**wanted, "template_options": {
        "enable_thinking": False, "thinking": False, "reasoning": False, "thinking_budget": 0}}
    assert [row["content"] for row in model.asked[-1]] == ["Be brief.", "Hello"]
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpool: ")]
    assert len(refused) == 2 and "top_k" in refused[0] and "-5" in refused[0]
    (tmp_path / "other.json").write_text("{}")
    for line in (f"/save {tmp_path / 'other'}", f"/save {tmp_path / 'one'}", "/clear", "/set temperature default"):
        one.handle(line)
    assert (tmp_path / "other.json").read_text() == "{}" and not one.messages and "temperature" not in one.options
    two = conversation(model)
    for line in (f"/load {tmp_path / 'other'}", f"/load {tmp_path / 'nothing'}", f"/load {tmp_path / 'one'}", "Again"):
        two.handle(line)
    assert [row["content"] for row in model.asked[-1]] == ["Be brief.", "Hello", "reply 1", "Again"]
    assert model.options == wanted


def test_images_in_messages(tmp_path: Path, image: bytes) -> None:
    """Paths of files are images, however a terminal writes them. Other words stay, and so do paths without a file."""
    paths = [tmp_path / name for name in ("a.png", "b c.JPG", "ü.webp")]
    for number, path in enumerate(paths):
        path.write_bytes(image + bytes([number]))
    a, b, c = map(str, paths)
    escaped = b.replace(" ", "\\ ")
    model = Model("vision")
    one = conversation(model)
    for text, content, count in ((f"What is {a}?", "What is ?", [0]),
                                 (f"'{b}' and \"{c}\" differ", "and  differ", [1, 2]),
                                 (escaped, "Describe the image.", [1]),
                                 (f"file://{a} why", "why", [0]),
                                 ("/no/x.png and a.png", "/no/x.png and a.png", [])):
        one.messages.clear()
        one.handle(text)
        message = model.asked[-1][-1]
        assert message["content"] == content, text
        assert [image[-1] for image in message.get("images", [])] == count, text
    for text, asked in (("What is ./no.png", 0), ("../no.png", 0), ("/no/x.png", 0), ("and/or.png", 1), ("no.png", 1)):
        model.asked.clear()
        one.failed = False
        one.turn(f"piped /no/y.png {text}", text)  # one prompt: no one can correct it
        assert (len(model.asked), one.failed) == (asked, not asked), text
    blind = conversation(Model())
    assert blind.message(f"What is {a}?") == {"role": "user", "content": f"What is {a}?"}  # a program wrote it
    blind.interactive = True
    with pytest.raises(WrongCapability):
        blind.message(f"What is {a}?")
    blind.interactive = False
    with pytest.raises(WrongCapability):
        blind.message(f"piped {a}", f"What is {a}?")


@pytest.mark.parametrize("name, command", [("bert", "mpool run"), ("digits-sd3", "mpool generate-image"),
                                           ("digits-clip", "mpool embed-image")])
def test_chat_refuses_models_that_cannot_chat(name: str, command: str, bert: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
    name = str(bert) if name == "bert" else name
    assert main(["chat", "--model", name]) == 1
    assert f"{command} " in (found := capsys.readouterr().err) and name in found


@pytest.fixture
def image() -> bytes:
    """The bytes of an image file."""
    return b"\x89PNG"


def test_run_refuses_images_that_a_model_does_not_see(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
    assert main(["run", str(llama), "What is", str(tmp_path / "a.png")]) == 1
    assert "does not see" in capsys.readouterr().err
    for command in (["chat", "Say hi"], ["run", "Say hi", "now"]):  # a prompt in place of the model
        assert main(command) == 1
        assert "mpool run SmolLM2-135M-Instruct 'Say hi" in capsys.readouterr().err


# ---- replies ---------------------------------------------------------------------------------------------------------

def printed(monkeypatch: pytest.MonkeyPatch, thinking: Any, **env: str) -> str:
    """Print a reply. Return what the terminal got, without the lines of the spinner."""
    terminal = screen(monkeypatch)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    print_reply(iter(CHUNKS), thinking)
    return re.sub(r"\r\x1b\[K[^\n\r]*?(?=\r)|\r\x1b\[K", "", terminal.getvalue())


CHUNKS = [Chunk("", reasoning="I think"), Chunk("", reasoning=" so."), Chunk("The"), Chunk(" answer.")]


def test_reasoning_is_folded_and_faint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasoning becomes one faint line, or is faint. Without colours and cursor there are no escapes at all."""
    found = printed(monkeypatch, "folded")
    assert re.fullmatch(r"\x1b\[2m\(thought for [\d.]+ s\)\x1b\[0m\nThe answer\.\n", found)
    found = printed(monkeypatch, "full")
    assert re.sub(r"\x1b\[[02]m", "", found) == "I think so.\n\nThe answer.\n" and "\x1b[2mthink" in found
    assert printed(monkeypatch, "full", NO_COLOR="1") == "I think so.\n\nThe answer.\n"
    assert printed(monkeypatch, "folded", TERM="dumb") == "The answer.\n"


def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of any width keep their order, and only wider ones than the terminal exceed it; code stays as it is."""
    terminal = screen(monkeypatch, 20)
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdé-.日"), random.integers(1, 24))) for _ in range(1000)]
    text = "".join(word + str(random.choice([" ", " ", "  ", "\n"])) for word in words)
    writer = Wrapped(terminal)
    for at in range(0, len(text), 7):
        writer.write(text[at:at + 7])
    writer.end()
    found = terminal.getvalue()
    assert "".join(found.split()) == "".join(text.split())
    for line in found.split("\n"):
        assert text_width(line) <= 20 or any(text_width(word) > 20 for word in line.split()), line
    for text in ("one two three four five six", "```py\n" + "x = 1 + " * 9 + "\n```\n"):
        terminal = screen(monkeypatch, 20)
        writer = Wrapped(terminal)
        writer.write(text)
        writer.end()
        assert terminal.getvalue() == text.replace("three four ", "three four \n")


def test_notes_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faint line, such as the first one of a chat, keeps its words, and the path of a model."""
    terminal = screen(monkeypatch, 40)
    path = "models/" + "x" * 50
    faint(f"Chat with {path}. Some more words that follow the path.", terminal)
    lines = re.sub(r"\x1b\[[02]m", "", terminal.getvalue()).splitlines()
    assert lines[1] == f"{path}." and all(len(line) <= 40 for line in lines if path not in line)


def test_the_spinner_is_one_line(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's path that is wider than the terminal loses its beginning: a frame cannot replace two lines."""
    path = tmp_path / ("x" * 80) / "m.gguf"
    path.parent.mkdir()
    path.symlink_to(llama)
    terminal = screen(monkeypatch, 40)

    def wait(*_: Any, **__: Any) -> None:
        while "m.gguf" not in terminal.getvalue():
            time.sleep(0.01)
        raise MpoolError("not loaded")

    monkeypatch.setattr("mpool.cli.talking.load", wait)
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
    assert main(["run", str(path), "x"]) == 1
    frames = re.findall(r"\r\x1b\[K([^\r]+)", re.sub(r"\x1b\[[02]m", "", terminal.getvalue()))
    assert frames and all(text_width(frame) < 40 and frame.endswith("m.gguf") for frame in frames)


# ---- lists -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("width", [40, 80])
def test_tables_fit(width: int) -> None:
    """Names are never cut: one that is too long has lines of its own. Without a terminal, a row is one line."""
    names = ["a", "org/" + "x" * 60, "日本語" * 20, "y" * 200, "tab\there", "e\u0301" * 70]
    rows = [(name, "generate-image", "15.7 GB", "bundled") for name in names]
    lines = table(("NAME", "TASK", "SIZE", "LOCAL"), rows, width).split("\n")
    assert all(text_width(line) <= width for line in lines)
    joined = "".join(line.split("generate-image")[0].strip() for line in lines[1:])
    assert joined == "".join(names).replace("\t", "\\t")
    assert len(table(("NAME", "TASK", "SIZE", "LOCAL"), rows).split("\n")) == len(rows) + 1


def test_lists_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mpool models` and `mpool list` have four columns, whose tasks are commands."""
    terminal = screen(monkeypatch)
    for command in (["models"], ["list"], ["models", "--task", "rerank", "--local"]):
        assert main(command) == 0
    lines = terminal.getvalue().splitlines()
    assert lines[0].split() == ["NAME", "TASK", "SIZE", "LOCAL"] and all(text_width(line) <= 80 for line in lines)
    assert {line.split()[1] for line in lines if line.startswith("digits-")} == {"embed-image", "vision",
                                                                                 "generate-image"}


def test_models_by_task_and_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--task and --fits select rows; --json has all facts of them."""
    monkeypatch.setattr("mpool.cli.listing._memory_limit", lambda: 200_000_000)
    assert main(["models", "--task", "rerank", "--fits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in found] == ["ms-marco-MiniLM-L6-v2"]
    assert found[0]["est_memory_allocation_mb"] <= 200 and found[0]["capability"] == "text_embedding"
    assert main(["models", "--task", "chat", "--json"]) == 0
    assert {fact["task"] for fact in json.loads(capsys.readouterr().out)} == {"chat", "vision"}  # these chat, too


# ---- help ------------------------------------------------------------------------------------------------------------

def commands(parser: Parser, name: str = "") -> Iterator[tuple[str, Parser]]:
    """Yield every command with its parser."""
    yield name, parser
    for one, inner in {**parser.commands, **({"compare": None} if name == "capture" else {})}.items():
        if one != "ls" and isinstance(inner, Parser):
            yield from commands(inner, f"{name} {one}".strip())


def test_every_help_has_two_examples_that_parse() -> None:
    """The help fits 80 columns, all commands are in its groups, and its examples are command lines of the command."""
    parser = make_parser()
    assert isinstance(parser, Parser)
    found = dict(commands(parser))
    assert sorted(one for names in parser.groups.values() for one in names) == sorted(set(parser.commands) - {"ls"})
    assert set(found) | {"capture compare"} == set(EXAMPLES)
    for name, command in found.items():
        command.formatter_class = lambda prog: Help(prog, width=80)  # type: ignore[assignment, misc]
        text = command.format_help()
        assert all(len(line) <= 80 for line in text.splitlines()[2:] if "mpool" not in line), name
        for example in EXAMPLES[name]:
            assert example in text
            assert "--compute" not in text or "--memory" in text or "MPOOL_MEMORY_MB" in text
            words = shlex.split(re.split(r" [|<>] ", example + " ")[-1 if " | " in example else 0])
            assert words[0] in ("mpool", "ls") and make_parser().parse_args(words[1:]).run


@pytest.mark.parametrize("arguments", [[], ["help"], ["help", "run"], ["ray"]])
def test_help_without_an_option(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    found = capsys.readouterr()
    assert left.value.code == 0 and "examples:\n" in found.out and not found.err


@pytest.mark.parametrize("arguments", [["embed"], ["search", "x"], ["rerank", "x"], ["classify", "-m", "m"],
                                       ["embed-image"], ["generate"], ["generate-image"]])
def test_a_missing_input_is_an_error_at_once(arguments: list[str], monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """A command without its input waits for no keys of a terminal, and loads nothing. With ``-``, it reads them."""
    class Keys(Terminal):
        def readline(self, *_: Any) -> str:
            raise AssertionError("the terminal was read")

        read = readline

    monkeypatch.setattr("sys.stdin", Keys())
    monkeypatch.setattr(mpool.Pool, "load", lambda *_, **__: pytest.fail("loaded a model"))
    assert main(arguments) == 1
    assert "at least" in capsys.readouterr().err
    if arguments[0] in ("embed", "generate"):
        with pytest.raises(AssertionError):
            main([*arguments, "-"])
        assert "Ctrl-D" in capsys.readouterr().err


# ---- a server --------------------------------------------------------------------------------------------------------

def test_conversations_with_a_server(llama: Path, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """`mpool run --server` and `mpool chat --server` print what the models of the server reply."""
    from servers import serving

    greedy = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    with serving([f"vectors={bert}", f"words={llama}"]) as server:
        for url, name, served in ((server.url, "words", True), (server.url, "nothing", False),
                                  ("127.0.0.1:9", "words", False)):  # without --server
            monkeypatch.setenv("MPOOL_URL", url)
            assert main(["run", name, "x"]) == 1
            assert ("--server" in capsys.readouterr().err) == served, (url, name)
        monkeypatch.setenv("MPOOL_URL", server.url)
        (tmp_path / "stdin").write_text("Hello\nAgain\n")
        monkeypatch.setattr("mpool.cli.talking.make_pool", lambda _: pytest.fail("made a pool"))
        monkeypatch.setattr("sys.stdin", open(tmp_path / "stdin", encoding="utf-8"))
        assert main(["chat", "--server", *greedy]) == 0
        start = [{"role": "user", "content": "Hello"}]
        first = mpool.chat(start, str(llama), **options)
        second = mpool.chat([*start, first.message, {"role": "user", "content": "Again"}], str(llama), **options)
        assert capsys.readouterr().out == f"{first.text}\n{second.text}\n"
        monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))
        assert main(["run", "--url", server.url, "words", "Hello", *greedy, "--stats"]) == 0
        found = capsys.readouterr()
        assert found.out == f"{first.text}\n" and f"{first.usage.prompt_tokens} prompt tokens" in found.err
        assert main(["run", "--server", "vectors", "A", "cat"]) == 0
        vector = np.array(json.loads(capsys.readouterr().out), np.float32)
        assert np.allclose(vector, mpool.embed("A cat", str(bert)), atol=1e-6)
        assert main(["run", "--server", "nothing", "x"]) == 1
        assert "nothing" in capsys.readouterr().err
        (tmp_path / "stdin").write_text("\n".join(["word " * 1500] * 4) + "\n")  # the context has 16,384 tokens
        monkeypatch.setattr("sys.stdin", open(tmp_path / "stdin", encoding="utf-8"))
        assert main(["chat", "--server", "words", "--max-tokens", "1"]) == 0
        assert "messages were dropped" in capsys.readouterr().err
    assert main(["run", "--server", "words", "x"]) == 1  # no server
    assert "mpool serve" in capsys.readouterr().err
