"""Run the code blocks of a Markdown page in order, as a reader would.

Python blocks of a page share one interpreter. If a ``print(...)`` line ends in ``  # text``, the text is the expected
output. In a ``console`` block each line after ``$ `` is a command and the lines below it are its output; a line ``...``
matches any lines. A block below ``<!-- needs NAME -->`` is skipped if that package is missing, or fails if
``MPOOL_CLIENT_TESTS`` is set. A block below ``<!-- file NAME -->`` is written to that file. A command that ends in
``&`` is a server: it runs until the page ends, and the next block waits until its port accepts connections.

The default port of ``mpool serve`` is replaced by a free one, so that several runs can share a machine. A page's models
in folders below ``models/`` are replaced by small ones with random weights (:func:`write_substitutes`), and so are the
published models in ``STAND_INS``.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PORT = "11435"
#: Languages whose blocks are not run.
SHOWN = ("text", "ini", "nginx", "dockerfile", "yaml", "toml", "javascript", "c", "mermaid")
#: Commands that install or administer; they are not run. ``.ci/run`` runs the two commands of the README.
INSTALLS = re.compile(r"^(pip|pipx|git|cd|sudo|systemctl|docker|podman|ray|serve|export|python -m (venv|build)|\. "
                      r"|source )")
#: Code of the tutorials -> the code in its place: fewer texts; a random model calls functions only if it must.
REPLACED = {"COUNT = 1_000_000": "COUNT = 1_000", "FILES = 100": "FILES = 4",
            "iterdir())))  # 100": "iterdir())))  # 4",
            "temperature=0, max_tokens=150)": 'tool_choice="required", seed=1, max_tokens=400)'}
#: Published model in a block -> the small model that runs in its place.
STAND_INS = {"ibm-granite/granite-embedding-30m-sparse": "models/granite-embedding-30m-sparse",
             "ms-marco-MiniLM-L6-v2": "models/ms-marco-MiniLM-L6-v2",
             "distilbert-base-uncased-finetuned-sst-2-english": "models/sentiment",
             "LFM2.5-350M": "models/LFM2.5-350M", "bert-base-NER": "models/ner",
             "Qwen2.5-0.5B-Instruct": "models/Qwen2.5-0.5B-Instruct",
             "Qwen2.5-Coder-0.5B-Instruct": "models/Qwen2.5-0.5B-Instruct"}
#: Seconds that a command may take.
TIMEOUT = 300
_END = "----end of block----"
_CHILD = f"""import sys, json, traceback
namespace = {{"__name__": "__main__"}}
for line in sys.stdin:
    page, number, code = json.loads(line)
    try:
        exec(compile("\\n" * (number - 1) + code, page, "exec"), namespace)
        state = "ok"
    except BaseException:
        traceback.print_exc()
        state = "failed"
    sys.stderr.flush()
    print("\\n{_END}" + state, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and first line in the page, the package that it needs, and the file that it is
    saved as."""

    language: str
    text: str
    line: int
    needs: str | None = None
    file: str | None = None


def blocks_of(page: Path) -> list[Block]:
    """Return every fenced block of a page except directives."""
    found, text = [], page.read_text(encoding="utf-8")
    for match in re.finditer(r"^(?:<!-- (needs|file) ([\w.]+) -->\n\n)?(`{3,})([^\n`]*)\n(.*?)^\3$", text,
                             re.MULTILINE | re.DOTALL):
        language = match[4].strip()
        if not language.startswith("{"):
            found.append(Block(language, match[5], text.count("\n", 0, match.start(5)) + 1,
                               **({match[1]: match[2]} if match[1] else {})))
    return found


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_stand_ins(code: str) -> str:
    """Return code or a command with ``REPLACED`` and the names of ``STAND_INS`` replaced; a name within a longer one
    is kept."""
    for part, other in REPLACED.items():
        code = code.replace(part, other)
    for published, small in STAND_INS.items():
        code = re.sub(rf"(?<![\w./-]){re.escape(published)}(?![\w./-])", small, code)
    return code


class PageRun:
    """A run of one page: its folder, interpreter and servers."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder, self.port = page, folder, str(free_port())
        self.servers: list[subprocess.Popen[bytes]] = []
        self.child: subprocess.Popen[str] | None = None
        self.checked = 0
        self.skipped: list[str] = []
        binaries = folder / "bin"
        binaries.mkdir()
        for name in ("mpool", "llm", "uvicorn"):
            shim = binaries / name
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
            shim.chmod(0o755)
        (binaries / "python").symlink_to(sys.executable)
        self.env = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PORT": self.port,
                    "LLM_USER_PATH": str(folder / "llm"), "OLLAMA_HOST": f"http://127.0.0.1:{self.port}"}

    def run(self) -> None:
        """Run every block.

        Raises:
            AssertionError: output that differs from the page, with the file and line of the first difference.
        """
        for block in blocks_of(self.page):
            self.run_block(block)

    def run_block(self, block: Block) -> None:
        """Run one block, as :meth:`run` does."""
        if block.file is not None:
            (self.folder / block.file).write_text(with_stand_ins(block.text), encoding="utf-8")
        elif block.needs is not None and importlib.util.find_spec(block.needs) is None:
            assert not os.environ.get("MPOOL_CLIENT_TESTS"), f"{self._at(block)}: needs the package {block.needs}"
            self.skipped.append(block.needs)
        elif block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        elif block.language == "json":
            import json

            json.loads(block.text)
        else:
            assert block.language in SHOWN, f"{self._at(block)}: the block's language `{block.language}` is unknown"

    def close(self) -> None:
        """End the interpreter and the servers."""
        if self.child is not None:
            assert self.child.stdin is not None
            self.child.stdin.close()
            self.child.wait(60)
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
        for server in self.servers:
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                raise

    def _at(self, block: Block, offset: int = 0) -> str:
        return f"{self.page.relative_to(ROOT)}:{block.line + offset}"

    def _python(self, block: Block) -> None:
        import json

        if self.child is None:
            (self.folder / "child.py").write_text(_CHILD)
            self.child = subprocess.Popen([sys.executable, "-u", str(self.folder / "child.py")], cwd=self.folder,
                                          env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=open(self.folder / "errors.txt", "w"), text=True)
        assert self.child.stdin is not None and self.child.stdout is not None
        code = with_stand_ins(block.text.replace(PORT, self.port))
        self.child.stdin.write(json.dumps([str(self.page), block.line, code]) + "\n")
        self.child.stdin.flush()
        lines: list[str] = []
        for line in self.child.stdout:
            if line.startswith(_END):
                assert line.strip() == _END + "ok", \
                    f"{self._at(block)}:\n{(self.folder / 'errors.txt').read_text()[-3000:]}"
                break
            lines.append(line)
        else:
            raise AssertionError(f"{self._at(block)}: the interpreter ended\n"
                                 f"{(self.folder / 'errors.txt').read_text()[-3000:]}")
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
        if expected:
            found = "".join(lines).rstrip("\n").split("\n")
            assert found == expected, f"{self._at(block)}: printed {found}, the page says {expected}"
            self.checked += len(expected)

    def _console(self, block: Block) -> None:
        lines, at = block.text.splitlines(), 0
        while at < len(lines):
            start, line = at, lines[at]
            assert line.startswith("$ "), f"{self._at(block, at)}: output without a command"
            command = line[2:]
            at += 1
            while command.endswith("\\") and at < len(lines):
                command = command[:-1] + lines[at].removeprefix("> ")
                at += 1
            output = []
            while at < len(lines) and not lines[at].startswith("$ "):
                output.append(lines[at])
                at += 1
            self._command(block, start, with_stand_ins(command.replace(PORT, self.port)), output)

    def _command(self, block: Block, offset: int, command: str, output: list[str]) -> None:
        if INSTALLS.match(command):
            return
        if command.endswith("&"):
            if "serve" in command and "--port" not in command:
                command = command.removesuffix("&") + f" --port {self.port} &"
            with open(self.folder / f"server{len(self.servers)}.log", "wb") as log:
                self.servers.append(subprocess.Popen(["bash", "-c", "exec " + command.removesuffix("&").strip()],
                                                     cwd=self.folder, env=self.env, stdout=log, stderr=log))
            self._wait(block, offset)
            return
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=self.folder, env=self.env, text=True,
                              capture_output=True, timeout=TIMEOUT)
        assert done.returncode == 0, f"{self._at(block, offset)}: {command}\n{done.stdout}{done.stderr}"
        if output:
            pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"[ ]*\n"
                              for line in output)
            found = re.sub(r"[ \t]+\n", "\n", done.stdout.replace(self.port, PORT).rstrip("\n") + "\n")
            assert re.fullmatch(pattern, found), f"{self._at(block, offset)}: {command}\nprinted:\n{found}"
            self.checked += 1

    def _wait(self, block: Block, offset: int) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            assert self.servers[-1].poll() is None, \
                (self.folder / f"server{len(self.servers) - 1}.log").read_text(errors="replace")[-2000:]
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", int(self.port))) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{self._at(block, offset)}: the server does not accept connections after 120 s")


def write_substitutes(folder: Path) -> None:
    """Write tiny random models with the folder names used in pages: cross-encoders, classifiers, a sparse encoder,
    and a chat model with tools."""
    import tinymodels
    from docmodels import chat_model, cross_encoder
    from retrievalmodels import write_splade
    from tokenclassifiers import make_token_classifier

    cross_encoder(folder / "ms-marco-MiniLM-L6-v2")
    cross_encoder(folder / "sentiment", ("negative", "neutral", "positive"))
    cross_encoder(folder / "nli", ("contradiction", "neutral", "entailment"))
    write_splade(folder / "granite-embedding-30m-sparse", "roberta")
    make_token_classifier(folder / "ner", "bert")
    chat_model(folder / "Qwen2.5-0.5B-Instruct")
    tinymodels.lfm2(folder / "LFM2.5-350M")


def copy_inputs(folder: Path) -> None:
    """Copy the files that pages read: images of digits as ``photo.png`` and ``digit-N.png``."""
    import mpool

    images = Path(mpool.__file__).parent / "demo_models" / "images"
    for digit in range(10):
        shutil.copy(images / f"{digit}.png", folder / f"digit-{digit}.png")
    shutil.copy(images / "7.png", folder / "photo.png")
