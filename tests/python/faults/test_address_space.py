"""A short address space (``ulimit -v``): every limit gives a typed error, and no library ends the process."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits the address space on Linux only")

PROGRAM = """
import json, resource, sys
limit, late, model, use = int(sys.argv[1]) << 20, sys.argv[2] == "late", sys.argv[3], sys.argv[4]
if late:
    import mpool, numpy, tokenizers, llguidance
    limit += int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    import mpool
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        if use == "embed":
            pool.embed("a b c", model, compute="float32-fast")
        else:
            pool.generate("a", model, max_tokens=20, response_format={"type": "json_object"})
    print("OK")
except MemoryError as error:
    print("MemoryError", error)
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("late", ["early", "late"])
@pytest.mark.parametrize("use", ["embed", "json"])
def test_every_limit_gives_a_typed_error(bert: Path, llama: Path, use: str, late: str) -> None:
    """OpenBLAS calls exit() or raises SIGINT, and Rust aborts, if they cannot allocate memory."""
    limits = range(60, 300, 40) if late == "early" else range(2, 130, 24)
    found = {}
    for limit in limits:
        run = subprocess.run([sys.executable, "-c", PROGRAM, str(limit), late, str(bert if use == "embed" else llama),
                              use], capture_output=True, text=True, timeout=120)
        found[limit] = (run.returncode, run.stdout.strip()[:200] or run.stderr[-300:])
    # a thread for which there is no memory cannot be started: SpawnFailed
    wrong = {limit: row for limit, row in found.items()
             if row[0] or not row[1].startswith(("OK", "MemoryError", "SpawnFailed"))}
    assert not wrong, wrong
    assert any(row[1].startswith("MemoryError") for row in found.values()), found


def test_an_installed_package_is_not_called_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic linker has no memory for a library: the error does not tell to install it."""
    import mpool
    from mpool.host.resources import error_of

    with mpool.Pool() as pool:
        def fail(name: str, *rest: object, **more: object) -> object:
            if name.startswith("llguidance"):
                raise ImportError("x.so: failed to map segment from shared object", name=name)
            return original(name, *rest, **more)

        import builtins

        original = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", fail)
        with pytest.raises(mpool.MemoryExhausted):
            pool.generate("a", llama, response_format={"type": "regex", "regex": "a"})
    assert isinstance(error_of(MemoryError("numpy needs 1 MB")), mpool.MemoryExhausted)
