"""The file of the numbers of threads that saturate memory (mpool/runtime/saturation.py)."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpool import _core
from mpool.runtime import saturation

#: A process that creates a pool, prints the numbers, and measures others (as if) if it gets arguments.
PROCESS = """
import json, sys, mpool
from mpool import _core
mpool.Pool().init_maintenance()
print(json.dumps([_core.learned_threads(), mpool.show_config("dicts")["decode_threads"]]))
if sys.argv[1:]:
    _core.set_learned_threads(tuple(map(int, sys.argv[1:])))
"""


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """An empty cache folder, for a process that has read nothing yet."""
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(saturation, "_known", None)
    before = _core.learned_threads()
    _core.set_learned_threads((0, 0, 0))
    yield tmp_path / "cache"
    _core.set_learned_threads(before)


def write(content: object) -> None:
    """Write the file of this machine."""
    path = pathlib.Path(saturation._path(saturation._machine()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def run(*numbers: int) -> list[object]:
    done = subprocess.run([sys.executable, "-c", PROCESS, *map(str, numbers)], capture_output=True, text=True,
                          timeout=60, check=True)
    return json.loads(done.stdout)


def test_a_later_process_begins_with_the_numbers(cache: pathlib.Path) -> None:
    """The end of a process writes what it measured; a process that measured nothing else writes nothing."""
    assert run(1, 0, 2) == [[0, 0, 0], {}]
    path, = (cache / "threads").iterdir()
    written = path.stat().st_mtime_ns
    assert run() == [[1, 0, 2], {"1": {"threads": 1, "from": "file"}, "4-7": {"threads": 2, "from": "file"}}]
    assert path.stat().st_mtime_ns == written
    assert json.loads(path.read_text())["threads"] == _core.machine()["compute_threads"]


@pytest.mark.parametrize("content, numbers", [
    ({"1": 1, "2-3": 2}, (1, 2, 0)), ({"1": 0, "2-3": -1, "4-7": 2}, (0, 0, 2)),
    ({"1": True, "2-3": 1.0, "4-7": "1"}, (0, 0, 0)), ({"1": 10**6, "2-3": None, "4-7": 1}, (0, 0, 1)),
    ([1, 2, 3], (0, 0, 0)), ("{", (0, 0, 0)), ("", (0, 0, 0)), ({"1": [1], "2-3": {}}, (0, 0, 0))])
def test_implausible_numbers_are_ignored(cache: pathlib.Path, content: object, numbers: tuple[int, ...]) -> None:
    """Plausible are whole numbers up to that of the CPUs. They are read once."""
    write(content)
    saturation.recall()
    assert _core.learned_threads() == numbers
    write({"1": 1, "2-3": 1, "4-7": 1})
    saturation.recall()
    assert _core.learned_threads() == numbers


def test_a_folder_that_cannot_be_used(cache: pathlib.Path) -> None:
    """Neither reading nor writing raises, and the next end of a process tries again."""
    cache.write_text("a file")
    saturation.recall()
    _core.set_learned_threads((1, 0, 0))
    saturation.remember()
    os.remove(cache)
    saturation.remember()
    assert json.loads(pathlib.Path(saturation._path(saturation._machine())).read_text())["1"] == 1


def test_the_origin_of_a_number(cache: pathlib.Path) -> None:
    """A number that differs from the file's was measured by this process."""
    write({"1": 2, "2-3": 1})
    saturation.recall()
    _core.set_learned_threads((1, 1, 0))
    assert saturation.shown() == {"1": {"threads": 1, "from": "measured"}, "2-3": {"threads": 1, "from": "file"}}
