"""Failures injected at lines of the Python layer, one at a time: imports, starts of threads, calls of the core and of
the operating system, allocations. helpers/injection.py has the program that runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "helpers" / "injection.py"


def sweep(bert: Path, llama: Path, stride: int, offset: int, *named: str, way: str = "texts", least: int = 500) -> int:
    """Let every ``stride``-th site fail. Returns the number of failures; checks that each is harmless."""
    done = subprocess.run([sys.executable, PROGRAM, way, bert, llama, str(stride), str(offset), *named],
                          capture_output=True, text=True, timeout=3600, env={**os.environ, "PYTHONHASHSEED": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    sites, count, wrong = json.loads(done.stdout.splitlines()[-1])
    assert named or sites >= least
    assert not wrong, "\n".join(map(str, wrong)) + done.stderr[-3000:]
    return int(count)


def test_a_failure_at_a_line_is_one_error_and_the_pool_serves_on(bert: Path, llama: Path) -> None:
    """A sample of the sites. Each call ends with its result or one error of mpool that names its cause; the same work
    succeeds afterwards, and its events arrive."""
    assert sweep(bert, llama, 250, 3) >= 3


def test_a_failed_description_for_the_core_leaves_the_model_usable(bert: Path, llama: Path) -> None:
    """The files have been read by then. Files that cannot be read or closed are errors of mpool, too."""
    assert sweep(bert, llama, 1, 0, "runtime/core_keys.py:_core.add", "runtime/core_keys.py:_core.note_files",
                 "models/files.py:posix.pread", "models/files.py:posix.close") >= 4


def test_a_thread_without_memory_takes_its_next_call(bert: Path, llama: Path) -> None:
    """The only thread of a group stays if it cannot take or begin a call: otherwise this call or every later one would
    wait forever."""
    names = "host/native_calls.py:_queue.get", "host/native_calls.py:time.monotonic"
    assert sweep(bert, llama, 1, 0, *names, way="images") > 1


def test_a_method_without_memory_for_its_signature_is_an_error_of_mpool(bert: Path, llama: Path) -> None:
    """Methods of verbs are generated when they are used first."""
    assert sweep(bert, llama, 1, 0, "api/methods.py:builtins.setattr", "api/methods.py:builtins.get") > 1


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(8))
def test_failures_at_every_line(bert: Path, llama: Path, offset: int) -> None:
    assert sweep(bert, llama, 8, offset) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("way", "stride", "least"), [("images", 4, 400), ("names", 1, 30), ("conversations", 1, 80)])
def test_failures_at_lines_of_other_ways_in(bert: Path, llama: Path, way: str, stride: int, least: int) -> None:
    """At lines that a request for texts does not reach."""
    assert sweep(bert, llama, stride, 0, way=way, least=least) >= least // stride
