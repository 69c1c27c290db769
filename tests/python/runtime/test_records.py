"""Log records: nothing that comes from outside can forge a record or control a terminal (CWE-117)."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpool
from mpool import records
import tinymodels

#: Characters that end a line for some reader of logs, control a terminal, or reorder a line.
UNSAFE = [*map(chr, (*range(32), *range(127, 160))), *"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ud800"]
FORGED = "x\n2026-11-29 12:00:00 WARNING mpool.server: forged \x1b[31m\x9b31m\r\u2028\u202e\x7f"
NAMES = ("mpool", "mpool.pool", "mpool.models", "mpool.server")


@pytest.fixture
def own() -> Iterator[io.StringIO]:
    """The output of a program's own handler and format."""
    import mpool.models.store
    import mpool.server.application  # noqa: F401 - all loggers exist

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root, level = logging.getLogger(), logging.getLogger("mpool").level
    root.addHandler(handler)
    logging.getLogger("mpool").setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    logging.getLogger("mpool").setLevel(level)


def _lines(stream: io.StringIO) -> list[str]:
    text = stream.getvalue()
    assert not set(text) & (set(UNSAFE) - {"\n"})
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_one_line(own: io.StringIO, name: str) -> None:
    log = logging.getLogger(name)
    log.warning("%s and %s", FORGED, ValueError(FORGED))
    log.warning("".join(UNSAFE).replace("%", ""))
    log.info("%(path)s", {"path": Path(FORGED)})
    log.warning("a name: %s, %d", "Zürich 東京 👩\u200d💻", 3)
    found = _lines(own)
    assert len(found) == 4 and found[3] == f"WARNING {name}: a name: Zürich 東京 👩\u200d💻, 3"
    assert r"x\n2026-11-29" in found[0] and r"\x1b[31m\x9b31m\r\u2028\u202e\x7f" in found[0]


def test_arguments_of_other_records_stay(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("mpool").warning("%s has %d", "a", 3)
    assert (caplog.records[-1].msg, caplog.records[-1].args) == ("%s has %d", ("a", 3))


def test_exceptions_of_clients(own: io.StringIO) -> None:
    """Each line of a traceback that begins at the margin is one of the interpreter's, or the one line of a message."""
    try:
        try:
            raise KeyError(FORGED)
        except KeyError as cause:
            raise mpool.InvalidArgument(FORGED, hint=FORGED) from cause
    except mpool.InvalidArgument:
        logging.getLogger("mpool.server").exception("%s failed", FORGED)
    found = _lines(own)
    allowed = r"  .*|Traceback \(most recent call last\):|The above exception was .*:||(ERROR|KeyError|mpool\.errors).*"
    assert all(re.fullmatch(allowed, line) for line in found)
    assert sum(line.startswith(("KeyError", "mpool.errors")) for line in found) == 2
    assert any("test_exceptions_of_clients" in line for line in found)


def test_every_logger_of_mpool_escapes() -> None:
    sources = Path(mpool.__file__).parent
    for path in sources.rglob("*.py"):
        made = re.findall(r"^\w+ = logging\.getLogger\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not made, f"{path.relative_to(sources)}: use records.logger()"
    assert [records.one_line(one) for one in "\n\x1b\u2028"] == [r"\n", r"\x1b", r"\u2028"]


def test_tables_and_errors_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come from hubs and files. A model's text keeps its line ends."""
    from mpool import cli
    from mpool.cli.common import say
    from mpool.cli.layout import table

    assert table(("MODEL", "B"), [(FORGED, "1")]).count("\n") == 1
    assert cli.main(["show", "./none\x1b[31m"]) == 1 and "\x1b" not in capsys.readouterr().err
    folder = tinymodels.bert(tmp_path / "hostile", prompts={FORGED: "", "a": FORGED})
    assert cli.main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "x\\n2026-11-29" in shown and "\n2026-11-29" not in shown and not set(shown) & {*UNSAFE} - {"\n"}
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say("one\ntwo \x1b[31m")
    assert "one\ntwo" in (said := capsys.readouterr().out) and "\x1b" not in said
