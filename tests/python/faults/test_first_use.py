"""First use of each lazily imported dependency, and of modules, by eight threads at once, in fresh processes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tinymodels

#: Releases eight threads at once and prints the results or errors of all. The switch interval is short, so that threads
#: see each other's half-imported modules.
SCRIPT = """
import faulthandler, sys, threading
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
import json
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
#: Without server and command line, which one thread imports: uvicorn's own modules have this fault. Without the
#: modules of debug and search, which the package imports only through these packages: if one thread imports a package
#: and another one a module that the package's own __init__ imports, Python gives one of them an unfinished module.
_ALL_MODULES = """
import importlib, os, random
home = os.path.dirname(mpool.__file__)
files = [os.path.relpath(os.path.join(folder, file), home) for folder, _, found in os.walk(home) for file in found]
names = sorted("mpool." + file[:-3].replace(os.sep, ".").removesuffix("__init__").removesuffix(".") for file in files
               if file.endswith(".py") and file != "__init__.py"
               and file.split(os.sep)[0] not in ("__main__.py", "cli", "integrations", "server")
               and (file.split(os.sep)[0] not in ("debug", "search") or file.endswith("__init__.py")))
assert len(names) > 150

def import_all(seed):
    errors, order = [], random.Random(seed).sample(names, len(names))
    for name in order:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if not isinstance(error, ModuleNotFoundError) or error.name.startswith("mpool"):  # else an optional package
                errors.append(f"{name}: {error!r}")
    if errors:
        raise ImportError(errors)
    return len(names)
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
    **{f"modules in orders from {seed}": (_ALL_MODULES, f"return import_all({seed} + at)") for seed in range(0, 32, 8)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")


@pytest.mark.sample(3)
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
