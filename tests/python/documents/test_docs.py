"""The README and every page of docs/: code runs, links exist, tables match the code."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import docrunner
import pytest
from docrunner import ROOT, PageRun


from realmodels import catalogued_path

if not (ROOT / "README.md").exists() or not (ROOT / "csrc").is_dir():
    pytest.skip("needs the sources", allow_module_level=True)

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models of :func:`docrunner.write_substitutes`."""
    folder = tmp_path_factory.mktemp("substitutes")
    docrunner.write_substitutes(folder)
    return folder


@pytest.mark.builds
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path, models: Path, tmp_path: Path) -> None:
    """Every Python and console block runs, in order, and prints the output on the page."""
    for name in ("minilm", "smollm2"):
        catalogued_path(name)
    docrunner.copy_inputs(tmp_path)
    (tmp_path / "models").symlink_to(models)
    run = PageRun(page, tmp_path)
    try:
        run.run()
    finally:
        run.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    """Relative links name files that exist."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link


def test_storage_types_match_the_core() -> None:
    """docs/models/formats.md lists every storage type of GGUF that the core supports."""
    rows = re.findall(r"^MP_DTYPE\((\w+), *\d+,", (ROOT / "csrc/tensor/dtype.def").read_text(), re.MULTILINE)
    weights = {name for name in rows if not re.fullmatch(r"I\d+|F64", name)}
    text = (ROOT / "docs/models/formats.md").read_text(encoding="utf-8")
    found = re.search(r"^\| storage types \| (.*) \|$", text, re.MULTILINE)
    assert found is not None and set(re.findall(r"`(\w+)`", found[1])) == weights


def test_capabilities_match_the_core() -> None:
    """The README's table has a row for each capability."""
    from mpool import _core

    capabilities = {capability for _, capability in _core.architectures()}
    rows = set(re.findall(r"^\| `(\w+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert capabilities <= rows


def _rows(page: str) -> list[list[str]]:
    """Return the rows of all tables of a page, as lists of cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_variables_match_the_core() -> None:
    """docs/settings.md has the environment variables that the core reads, with their defaults and meanings."""
    from mpool import _core

    expected = [[f"`{name}`", f"`{default}`" if default else "empty", meaning]
                for name, _, default, meaning in _core.options()]
    names = {row[0] for row in expected}
    found = [row for row in _rows("docs/settings.md") if row[0] in names]
    assert found == expected, "docs/settings.md must have these rows:\n" + "\n".join(
        f"| {' | '.join(row)} |" for row in expected)


def test_sampling_options_match_the_table() -> None:
    """docs/guides/chat-and-streaming.md has the default of every sampling option."""
    from mpool.tasks.sampling import TABLE, THINKING_TOKENS

    found = set()
    for first, defaults in (row for row in _rows("docs/guides/chat-and-streaming.md") if len(row) == 2):
        names = [name for name in re.findall(r"`(\w+)`", first) if name in TABLE]
        found |= set(names)
        for name, default in zip(names, defaults.split(", ")):
            value = TABLE[name].default
            assert default == str(value) if isinstance(value, bool) else value is None or float(default) == value, name
    assert found == set(TABLE)
    guide = (ROOT / "docs" / "guides" / "chat-and-streaming.md").read_text(encoding="utf-8")
    assert f"models that can think, the default of `max_tokens` is {THINKING_TOKENS:,}." in guide


def test_health_check_of_the_load_balancer_is_answered() -> None:
    """The health check of HAProxy in docs/distributed.md passes the server's guards, which are those of a front."""
    from servers import Raw, serving

    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    command = re.search(r"`mpool ray serve --host 0\.0\.0\.0 --port (\d+) --allow-host (\S+)`", text)
    check = re.search(r"http-check send meth (\w+) uri (\S+) ver HTTP/1\.1 hdr Host (\S+)$", text, re.MULTILINE)
    assert command is not None and check is not None
    assert set(re.findall(r"^ +server \w+ [\d.]+:(\d+) ", text, re.MULTILINE)) == {command[1]}
    with serving([], allowed_hosts=(command[2],)) as made, Raw(made) as raw:
        assert raw.request(check[2], method=check[1], host=check[3]).answer()[0] == 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site. A warning is an error, and so is a role that names nothing."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"),
                           str(folder / "html")], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


@pytest.mark.builds
def test_site_builds(site: Path) -> None:
    assert (site / "cli.html").exists()


@pytest.mark.builds
def test_blocks_of_the_command_line_have_80_columns(site: Path) -> None:
    blocks = re.findall(r"<pre>(.*?)</pre>", (site / "cli.html").read_text("utf-8"), re.DOTALL)
    lines = [unescape(re.sub(r"<[^>]+>", "", line)) for block in blocks for line in block.splitlines()]
    assert len(blocks) > 10 and not [line for line in lines if len(line) > 80]


#: What a reader types into the search -> the page that must come first.
QUESTIONS = {
    "memory limit": "settings", "offline": "settings", "threads": "settings", "keep alive": "settings",
    "environment variables": "settings", "cache folder": "settings", "wheel": "installing", "windows": "installing",
    "bfloat16": "models/precision", "float32": "models/precision", "out of memory": "troubleshooting",
    "gpu": "troubleshooting", "docker": "server/deployment", "prometheus": "server/metrics",
    "api key": "server/security", "function calling": "guides/tools", "json schema": "guides/structured-output",
    "lora": "guides/adapters-and-tasks", "speculative decoding": "guides/draft-models", "download": "models/weights",
    "ollama": "coming-from/ollama", "asyncio": "guides/threads-and-asyncio", "embed": "api/embed",
}


@pytest.mark.builds
def test_search_finds_the_page_of_a_question_first(site: Path) -> None:
    """The site's own search, run by node."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    done = subprocess.run([node, str(Path(__file__).with_name("search_site.js")), str(site), *QUESTIONS],
                          capture_output=True, text=True, timeout=60, check=True)
    found = [json.loads(line)[:1] for line in done.stdout.splitlines()]
    assert dict(zip(QUESTIONS, found, strict=True)) == {question: [page] for question, page in QUESTIONS.items()}


#: Pages that are looked up and not read: tables of fields, formats and options.
REFERENCES = {"server/openai", "server/encoders", "models/formats", "models/families", "settings", "cli", "benchmarks",
              "troubleshooting", "changelog", "contributing"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name not in ("api", ROOT.name)],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_enough_to_be_read(page: Path) -> None:
    name = str(page.relative_to(ROOT / "docs").with_suffix(""))
    assert name in REFERENCES or len(page.read_text("utf-8").split()) <= 1500
