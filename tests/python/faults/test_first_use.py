"""First use of each lazily imported dependency, and of modules, by eight threads at once, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import mpool
import tinymodels

#: Releases eight threads at once and prints the results or errors of all. The switch interval is short, so that threads
#: see each other's half-imported modules.
SCRIPT = """
import faulthandler, json, sys, threading
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
import mpool
bert, llama = sys.argv[1:3]
{before}

def use(at):
    {use}

gate, found = threading.Barrier(8), [None] * 8

def run(at):
    gate.wait()
    try:
        found[at] = "returned " + str(use(at))
    except BaseException as error:
        found[at] = f"{{type(error).__name__}}: {{error}}"

threads = [threading.Thread(target=run, args=(at,)) for at in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(found))
"""
_IMAGE = ("import struct, zlib\n"
          "def chunk(kind, data):\n"
          "    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))\n"
          "png = (b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 8, 8, 8, 2, 0, 0, 0))\n"
          "       + chunk(b'IDAT', zlib.compress((b'\\0' + bytes(24)) * 8)) + chunk(b'IEND', b''))\n")
#: Another thread imports numpy, and pauses in the middle until the core is imported, or for 2 s.
_HALF_OF_NUMPY = """
import importlib.machinery, time
half, sought = threading.Event(), threading.Event()

class Pause:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mpool._core":
            sought.set()
        if name != "numpy.__config__":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def paused(module):  # not in find_spec: Python holds a lock of all imports there
            half.set()
            sought.wait(2)
            time.sleep(0.3)
            execute(module)

        spec.loader.exec_module = paused
        return spec

def first():
    import numpy

sys.meta_path.insert(0, Pause)
threading.Thread(target=first).start()
half.wait()
"""
#: Dependency -> code that runs before the threads start, and the function that each thread runs.
USES = {
    "image": (_IMAGE, "return mpool.embed_image([png, png], 'digits-clip').shape"),
    "image array": ("import numpy as np\nimage = np.zeros((8, 8, 3), np.uint8)",
                    "return mpool.embed_image(image, 'digits-clip').shape"),
    "text": ("", "return mpool.embed(f'text {at}', bert).shape"),
    "stream": ("", "return len(list(mpool.generate('a', llama, max_tokens=2, seed=1, stream=True))) > 0"),
    "grammar": ("", "return mpool.generate('a', llama, seed=1, max_tokens=40, temperature=0,\n"
                    "                          response_format={'type': 'regex', 'regex': 'aa'}).text"),
    "chat": ("", "return mpool.chat([{'role': 'user', 'content': 'a'}], llama, seed=1, max_tokens=2).finish_reason"),
    "tokenizer": ("", "return len(mpool.tokenize('a b c', llama))"),
    "hub": ("", "try:\n        mpool.embed('a', 'absent/nothing-of-this-name')\n"
                "    except mpool.MpoolError as error:\n        return type(error).__name__"),
    "server": ("", "from mpool.server import create_app\n    return type(create_app([], catalogue=False)).__name__"),
    "metrics": ("", "return 'mpool_memory_limit' in mpool.metrics('prometheus')"),
    "aio": ("", "import asyncio\n    return asyncio.run(mpool.aio.embed('a', bert)).shape"),
    "jobs": ("", "return mpool.submit('text_embedding', inputs='a', model=bert).result().shape"),
    "health": ("", "return mpool.health().status"),
    "half of numpy": (_HALF_OF_NUMPY, "return mpool.health().status"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")


@pytest.mark.parametrize("name", USES)
def test_first_use_by_eight_threads(name: str, models: tuple[Path, Path]) -> None:
    """The import system lets a thread see a module that another thread is still importing, if it looks in
    ``sys.modules`` or reads an attribute of a package."""
    before, use = USES[name]
    script = SCRIPT.format(before=before, use=use)
    for _ in range(3 if name == "image" else 1):
        done = subprocess.run([sys.executable, "-c", script, *map(str, models)], capture_output=True, text=True,
                              timeout=120, cwd=tempfile.gettempdir())
        assert done.returncode == 0 and not done.stderr.strip(), done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(set(found)) == 1 and found[0].startswith("returned "), found


#: Eight threads import all modules that the arguments name, each in another order, and print their errors.
IMPORTS = """
import faulthandler, importlib, random, sys, threading
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
import mpool
gate, errors = threading.Barrier(8), []

def run(seed):
    names = sys.argv[2:]
    random.Random(seed).shuffle(names)
    gate.wait()
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if not isinstance(error, ModuleNotFoundError) or error.name.startswith("mpool"):  # else an optional package
                errors.append(f"{name}: {error!r}")

threads = [threading.Thread(target=run, args=(8 * int(sys.argv[1]) + at,)) for at in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\\n".join(sorted(set(errors))))
"""


@pytest.mark.parametrize("seed", range(4))
def test_modules_can_be_imported_in_any_order(seed: int) -> None:
    """Without server and command line, which one thread imports: uvicorn's own modules have this fault."""
    root = Path(mpool.__file__).parent
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
             for path in sorted(root.rglob("*.py"))
             if path.relative_to(root).parts[0] not in ("__main__.py", "cli", "integrations", "server")]
    assert len(names) > 150
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(seed), *names], capture_output=True, text=True,
                          timeout=120, cwd=tempfile.gettempdir())
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
