"""Shared by all Python tests: the markers ``slow``, ``builds`` and ``sample``, the working directory, small models, a
pool."""

import collections
import gc
import os
import re
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).parent / "helpers"
#: Files whose tests need neither torch nor a server and take seconds: the marker ``light``.
LIGHT_FILES = frozenset((Path(__file__).parent / "light.txt").read_text("utf-8").split())
#: Files that take longest.
LONG_FILES = ("test_c_builds.py", "test_c_races.py")
pytest.register_assert_rewrite(*(path.stem for path in HELPERS.glob("*.py")))
# `python -m pytest` puts the working directory first on the path. Sources without the compiled core there would shadow
# the installed package.
if not any((ROOT / "mpool" / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
    sys.path[:] = [path for path in sys.path if Path(path or os.curdir).resolve() != ROOT]


def pytest_configure(config: pytest.Config) -> None:
    """Leave the folder with the sources: ``python -c`` in a child process imports from its working directory first, and
    would find the package without its compiled core there.

    A process that only starts others stays: they look for relative paths of the command line in its working directory.
    """
    for name in ("MPOOL_CACHE", "MPOOL_TEST_BUILD", "MPOOL_TEST_WEIGHTS"):
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(os.environ[name]))
    for name in ("ignore", "ignore_glob"):  # pytest reads these relative paths later
        setattr(config.option, name, [*map(os.path.abspath, getattr(config.option, name) or ())])
    if os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
    os.environ.pop("PYTHONUNBUFFERED", None)  # buffers are what users have: a failed flush changes the exit code
    if hasattr(config, "workerinput"):
        # There is a process per core. A second thread of OpenMP or OpenBLAS waits at every product for a core that
        # another process uses: small models of torch then take 7 to 30 times as long (benchmarks/NOTES.md).
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    starts_others = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_others:
        os.chdir(Path(__file__).parent)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores SIGINT in background jobs, and children inherit that: the tests of Ctrl-C need the default.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow`` and ``--builds``."""
    parser.addoption("--slow", action="store_true", default=False,
                     help="run the tests marked slow and builds too, and all cases of those marked sample")
    parser.addoption("--builds", action="store_true", default=False, help="run the tests marked builds too")


def _said(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "false", "off")


def _wanted(config: pytest.Config) -> dict[str, bool]:
    """Return the markers of tests that run only on demand, and whether they run."""
    slow = config.getoption("--slow") or _said("MPOOL_SLOW")
    return {"slow": slow, "builds": slow or config.getoption("--builds") or _said("MPOOL_BUILDS")}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: MPOOL_TEST_PROCESSES, or one per core for folders, and none beside this one for
    files and chosen tests."""
    if os.environ.get("MPOOL_TEST_PROCESSES"):
        return int(os.environ["MPOOL_TEST_PROCESSES"])
    chosen = [Path(name.partition("::")[0]) for name in config.option.file_or_dir]
    few = config.option.keyword or config.option.collectonly or not all(map(Path.is_dir, chosen))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if few else min(cores, 4)


def _is_light(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).as_posix() in LIGHT_FILES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m light``, import no other file: it may need a package that is not installed."""
    is_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.option.markexpr == "light" and is_file and not _is_light(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``slow`` or ``builds``, and most cases of those marked ``sample``, unless they were asked for.

    CI always runs ``builds``. pytest applies ``-k`` after this function.

    Files that take minutes come first: each file runs in one process, and the last one must be short.
    """
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        if _is_light(item.path):
            item.add_marker(pytest.mark.light)
    wanted = _wanted(config)
    if not wanted["slow"] and not _names_tests(config):
        for item in _beyond_samples(items):
            item.add_marker(pytest.mark.skip(reason="sample: run with --slow or MPOOL_SLOW=1"))
    for name, is_wanted in wanted.items():
        skip = pytest.mark.skip(reason=f"{name}: run with --{name} or MPOOL_{name.upper()}=1")
        for item in items:
            if not is_wanted and item.get_closest_marker(name):
                item.add_marker(skip)


def _names_tests(config: pytest.Config) -> bool:
    """Return True if the command line selects tests, by ``-k`` or as ``file::test``. A ``-k`` that begins with ``not``
    only leaves tests out."""
    keyword = config.option.keyword.strip()
    return (bool(keyword) and not re.match(r"not\b", keyword)
            or any("::" in name for name in config.option.file_or_dir))


def _beyond_samples(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that run only with ``--slow``.

    One in n of the collected cases of a test marked ``sample(n)`` runs always, and at least one. Checksums of names
    choose these cases, so that a sample has parameters of all kinds, and changes little with a new case.
    """
    cases = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, share), of_one_test in cases.items():
        of_one_test.sort(key=lambda item: zlib.crc32(item.name.encode()))
        yield from of_one_test[-(-len(of_one_test) // share):]


def pytest_collection_finish() -> None:
    """Exclude the objects of imports from garbage collection: with those of all tests, `gc.collect()` takes 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Undo `torch.set_num_threads`, which programs of benchmarks call: later tests would take five times as long."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    result = yield
    if torch and threads:
        torch.set_num_threads(threads)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the instruction sets that this CPU lacks, and by what else their kernels were tested."""
    import instructionsets

    instructionsets.write(terminalreporter.stats.get("passed", []), terminalreporter.section,
                          terminalreporter.write_line)


@pytest.fixture(scope="session")
def builds_wanted(pytestconfig: pytest.Config) -> bool:
    """True if tests marked ``builds`` run."""
    return _wanted(pytestconfig)["builds"]


@pytest.fixture(scope="session")
def out() -> Path:
    """Build folder of the variants of the C core: ``MPOOL_TEST_BUILD``, by default build/c."""
    return Path(os.environ.get("MPOOL_TEST_BUILD") or ROOT / "build" / "c")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small sentence-transformers BERT."""
    return _tiny(tmp_path_factory, "bert")


@pytest.fixture(scope="session")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small BERT with prompts, one of them the default, and Matryoshka dimensions."""
    return _tiny(tmp_path_factory, "prompted")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama with a chat template."""
    return _tiny(tmp_path_factory, "llama")


@pytest.fixture(scope="session")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small Llama with a short convolution in its first layer, which keeps a state."""
    return _tiny(tmp_path_factory, "lfm2")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Qwen2 with sampling defaults of its own."""
    return _tiny(tmp_path_factory, "qwen2")


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small FLUX.1 pipeline."""
    import pipelinemodels

    folder = tmp_path_factory.mktemp("flux")
    pipelinemodels.flux(folder, layers=1, singles=1)
    return folder


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small DINOv2, which takes images of any size."""
    import imagemodels

    return imagemodels.save(imagemodels.randomised("dinov2", 2), "dinov2", tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small BERT cross-encoder."""
    import rerankers

    return rerankers.make_reranker(tmp_path_factory.mktemp("ranker") / "model", "bert")


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token classifier."""
    import tokenclassifiers

    return tokenclassifiers.make_token_classifier(tmp_path_factory.mktemp("tagger") / "model", "bert")


@pytest.fixture(scope="session")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model with dense, sparse and token vectors, as BGE-M3."""
    import retrievalmodels

    return retrievalmodels.write_bge_m3(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small DistilBERT with a sparse head."""
    import retrievalmodels

    return retrievalmodels.write_splade(tmp_path_factory.mktemp("splade") / "model", "distilbert")


@pytest.fixture(scope="session")
def query_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small sparse encoder whose queries are looked up in a table."""
    import retrievalmodels

    return retrievalmodels.write_query_table(tmp_path_factory.mktemp("query_table") / "model")


@pytest.fixture(scope="session")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small ModernBERT with token vectors: markers, expanded queries, and words without vectors."""
    import retrievalmodels

    return retrievalmodels.write_colbert(
        tmp_path_factory.mktemp("colbert") / "model", [(48, 40), (40, 24)], "modernbert", query_prefix="[Q] ",
        document_prefix="[D] ", query_length=24, document_length=48, attend_to_expansion_tokens=False,
        skiplist_words=[".", ","])


@pytest.fixture(scope="session")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small RoBERTa that chooses one of three labels."""
    import rerankers

    return rerankers.make_classifier(tmp_path_factory.mktemp("sentiment") / "model", "xlm_roberta",
                                     ("negative", "neutral", "positive"))


@pytest.fixture(scope="session")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small BERT for natural language inference."""
    import rerankers

    return rerankers.make_classifier(tmp_path_factory.mktemp("nli") / "model", "bert",
                                     ("contradiction", "neutral", "entailment"))


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small ModernBERT that scores each of four labels on its own."""
    import rerankers

    return rerankers.make_classifier(tmp_path_factory.mktemp("topics") / "model", "modern_bert",
                                     ("sports", "politics", "music", "science"),
                                     problem_type="multi_label_classification")


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small DeBERTa v3 that labels tokens."""
    import tokenclassifiers

    return tokenclassifiers.make_token_classifier(tmp_path_factory.mktemp("names") / "model", "deberta_v3")


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of small static embeddings."""
    import staticmodels

    return staticmodels.write_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="session")
def llava() -> Path:
    """Folder of the demo model for vision."""
    import mpool

    return Path(mpool.__file__).parent / "demo_models" / "digits-llava"


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """A pool for one module of tests."""
    import mpool  # imported late: tests of the C core need no extension

    with mpool.Pool() as made:
        yield made


def _tiny(factory: pytest.TempPathFactory, name: str) -> Path:
    import tinymodels

    return tinymodels.cached(factory, name)
