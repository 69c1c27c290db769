"""Cost and content of ``import mpool``. The cost is counted in modules, which does not depend on the machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import mpool

HEAVY = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "PIL", "asyncio", "tqdm", "mpool._core",
         "concurrent.futures", "multiprocessing", "ssl", "http")


def _modules(code: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {code}; print('\\n'.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          cwd=tempfile.gettempdir())  # outside a source tree without the extension
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = _modules("import mpool")
    assert "mpool" in loaded
    assert not loaded.intersection(HEAVY)
    assert len(loaded) < 60, sorted(loaded)


def test_errors_load_nothing_heavy() -> None:
    assert not _modules("import mpool; mpool.ContextOverflow; mpool.PoolConfig(); mpool.models").intersection(HEAVY)


def test_reading_metadata_loads_no_torch(llama: Path, tmp_path: Path) -> None:
    """The description of a folder and the header of a GGUF file need neither torch nor libraries of other features."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = _modules(f"import mpool; pool = mpool.Pool(); assert pool.get({str(llama)!r}).description.spec; "
                      f"found = mpool._core.read_gguf({str(tmp_path / 'm.gguf')!r}); assert found; pool.close()")
    assert not loaded.intersection(("torch", "transformers", "jinja2", "huggingface_hub", "PIL", "llguidance",
                                    "starlette"))
    assert "mpool.models.formats.hf_folder" in loaded


#: Modules that a first token does without: each took at least a millisecond of it.
NOT_FOR_A_TOKEN = (
    "asyncio", "bz2", "decimal", "fractions", "html", "lzma", "random", "secrets", "shutil", "statistics",
    "subprocess", "tempfile", "uuid", "jinja2", "llguidance", "huggingface_hub", "PIL",
    "mpool.host.child_processes", "mpool.conversation.grammar", "mpool.conversation.tools", "mpool.debug.show",
    "mpool.images", "mpool.models.formats.hf_parts", "mpool.models.formats.pipeline_tensors",
    "mpool.models.formats.scoring", "mpool.models.formats.vision_gguf", "mpool.tokenizers.isolated")


def test_a_first_token_loads_only_what_it_needs(tmp_path: Path) -> None:
    import paritymodels
    import tinygguf

    model = paritymodels.decoder("llama", 2, vocab=157)
    path = str(tinygguf.write(tmp_path / "m.gguf", model))
    loaded = _modules(f"import numpy; before = set(sys.modules); import mpool; "
                      f"assert mpool.generate('w5 w6', model={path!r}, max_tokens=1, ignore_eos=True).token_ids")
    assert "mpool.tasks.text_to_text" in loaded
    assert not loaded.intersection(NOT_FOR_A_TOKEN)
    # the rows of all families are read, each from a module of its own
    own = sorted(name for name in loaded if name.startswith("mpool") and not name.startswith("mpool.models.families."))
    assert len(own) <= 112, own


#: Sends SIGINT when the n-th extension module of numpy has been initialised, during the first request.
INTERRUPTED = """
import signal, sys, threading
import mpool
left = int(sys.argv[1])
def profile(frame, event, arg):
    global left
    if event != "c_return" or arg.__name__ != "exec_dynamic" or "numpy" not in repr(frame.f_locals.get("args")):
        return
    left -= 1
    if not left:
        sys.setprofile(None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.setprofile(profile)
sys.setprofile(profile)
try:
    mpool.embed("a", sys.argv[2])
except KeyboardInterrupt:
    print("interrupted")
print(mpool.embed("a", sys.argv[2]).shape)
"""


@pytest.mark.parametrize("module", [1, 2])
def test_requests_after_a_first_one_that_was_interrupted(bert: Path, module: int) -> None:
    """numpy's extension modules can be initialised once per process: Ctrl-C must not cut their import short."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(module), str(bert)], capture_output=True, text=True,
                          cwd=tempfile.gettempdir())
    assert done.stdout == "interrupted\n(32,)\n", done.stdout + done.stderr


@pytest.mark.parametrize("name", mpool.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(mpool, name) is not None
    assert name in dir(mpool)


@pytest.mark.parametrize("module", ["mpool", "mpool.aio", "mpool.debug", "mpool.errors", "mpool.models",
                                    "mpool.results", "mpool.search", "mpool.tokenizers"])
def test_completion_offers_public_names_only(module: str) -> None:
    """Also in a program that has used mpool: modules that were imported are attributes of the package."""
    found = importlib.import_module(module)
    mpool.Pool, mpool.embed  # noqa: B018
    assert {name for name in dir(found) if not name.startswith("__")} == {
        name for name in found.__all__ if not name.startswith("__")}
    assert "__doc__" in dir(found)


def test_errors_at_the_top_are_those_of_the_module() -> None:
    assert all(getattr(mpool, name) is getattr(mpool.errors, name) for name in mpool.errors.__all__
               if name in mpool.__all__)
    assert "MpoolError" in mpool.__all__


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'emebd'"):
        mpool.emebd  # noqa: B018


def test_imports_of_mpool_need_no_hook() -> None:
    """Python's own finders find every module. A name that mpool does not have is an ordinary ImportError."""
    assert not [one for one in sys.meta_path if type(one).__module__.partition(".")[0] == "mpool"]
    assert importlib.util.find_spec("mpool.Llama") is None
    with pytest.raises(ImportError, match="cannot import name 'Llama' from 'mpool'"):
        exec("from mpool import Llama", {})


def test_importing_an_unknown_name() -> None:
    with pytest.raises(ImportError, match="cannot import name 'emebd' from 'mpool' "):
        exec("from mpool import emebd", {})
    with pytest.raises(ModuleNotFoundError, match="No module named 'mpool.emebd'"):
        importlib.import_module("mpool.emebd")
    assert not hasattr(mpool, "SentenceTransformer")


def test_sources_without_the_core_explain_how_to_build(tmp_path: Path) -> None:
    """Python started inside a clone imports the sources and not the installed package."""
    shutil.copytree(Path(mpool.__file__).parent, tmp_path / "mpool",
                    ignore=shutil.ignore_patterns("*.so", "_libs", "__pycache__"))
    # The finder of an editable install would find the core of its clone.
    script = ("import sys\n"
              "sys.meta_path = [one for one in sys.meta_path if 'editable' not in getattr(one, '__module__', '')]\n"
              "import mpool; mpool.embed('A text.', 'all-MiniLM-L6-v2')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'mpool'} contains the sources of mpool without the compiled core")
    assert "pip install -e ." in last


def test_versions_of_package_project_and_core_agree() -> None:
    from mpool import _core

    assert mpool.__version__ == _core.__version__
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    stated = re.search(r'^version = "([^"]+)"$', project.read_text(encoding="utf-8"), re.M)
    assert stated is not None and stated[1] == mpool.__version__


def test_the_package_has_a_typed_marker() -> None:
    assert (Path(mpool.__file__).parent / "py.typed").exists()
