"""Request schemas: the compiler refuses wrong rows, and the generated code is visible to readers and debuggers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
EXPAND = CSRC / "models" / "requests" / "expand.py"

if not CSRC.is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)
if shutil.which("gcc") is None:
    pytest.skip("gcc is not installed", allow_module_level=True)

# A file with the structs and the check of one schema.
SOURCE = """
#include "models/requests/build.h"
#define MP_SCHEMA "schema.def"
typedef struct some_args {
#include "models/requests/passes/args.def"
} some_args;
mp_status check(const some_args *args, mp_error *error);
mp_status check(const some_args *args, mp_error *error) {
#include "models/requests/passes/check.def"
    return MP_OK;
}
"""
RIGHT = '''MP_COUNT(int32_t, n_words, 1, 100, "the number of words")
MP_ARRAY(int32_t, words, 2, n_words, 1, -5, 5, "words")
MP_INT(int8_t, mode, mode, -1, 1, 0, "mode")
MP_REAL(float, scale, scale, 0.5, 2, 1, "scale")
'''
WRONG = {
    "a lower bound above the upper one": ("mode, -1, 1, 0,", "mode, 1, -1, 0,",
                                          "the lower bound of mode is above its upper bound"),
    "floating bounds in the wrong order": ("0.5, 2,", "2.5, 2,", "the lower bound of scale is above its upper bound"),
    "a bound outside its type": ("mode, -1, 1, 0,", "mode, -1, 128, 0,", "a bound of mode is outside int8_t"),
    "a count outside its type": ("1, 100,", "1, 1LL << 31,", "a bound of n_words is outside int32_t"),
    "a bound of items outside their type": ("-5, 5,", "-5, 1LL << 40,", "a bound of words is outside int32_t"),
    "items in the wrong order": ("-5, 5,", "6, 5,", "the lower bound of words is above its upper bound"),
    "a default outside the bounds": ("scale, 0.5, 2, 1,", "scale, 0.5, 2, 3,",
                                        "the default of scale is outside its bounds"),
    "an array without its count": ("2, n_words,", "2, n_letters,", "has no member named .n_letters"),
    "a count that is not an integer": ("2, n_words,", "2, scale,", "the length of words is no count"),
}


def _compile(tmp_path: Path, schema: str, compiler: str = "gcc",
             source: str = SOURCE) -> subprocess.CompletedProcess[str]:
    (tmp_path / "schema.def").write_text(schema)
    (tmp_path / "some.c").write_text(source)
    return subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                           f"-I{CSRC}", f"-I{tmp_path}", str(tmp_path / "some.c")], capture_output=True, text=True)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_correct_schema_compiles(compiler: str, tmp_path: Path) -> None:
    """The compiler prints no warning."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    run = _compile(tmp_path, RIGHT, compiler)
    assert run.returncode == 0, run.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_compiler_refuses_a_wrong_schema(wrong: str, tmp_path: Path) -> None:
    """The error names the field. Clang refuses the same rows."""
    before, after, words = WRONG[wrong]
    assert RIGHT.count(before) == 1
    run = _compile(tmp_path, RIGHT.replace(before, after))
    assert run.returncode != 0
    assert re.search(words, run.stderr), run.stderr
    if shutil.which("clang"):
        assert _compile(tmp_path, RIGHT.replace(before, after), "clang").returncode != 0


# A wire file, and the request that it needs, whose results are integers.
WIRE = """
#include "models/capability.h"
#define MP_SCHEMA "schema.def"
typedef struct some_args {
#include "models/requests/passes/args.def"
} some_args;
typedef struct some_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} some_request;
mp_status some_create(const some_args *args, some_request **request, mp_error *error);
#define WIRE_ARGS    some_args
#define WIRE_REQUEST some_request
#define wire_create  some_create
#define WIRE_RESULTS sums
#define WIRE_EARLY   "early"
#define WIRE_OUTCOME "outcome"
static inline size_t wire_rows_at(const some_request *request, uint32_t n) { (void)request; return n; }
#include "isolation/passes/vectors.def"
extern const mp_request_wire some_wire;
const mp_request_wire some_wire = {WIRE_VECTORS};
"""


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_results_of_any_type_and_name_cross_to_another_process(compiler: str, tmp_path: Path) -> None:
    """isolation/passes/vectors.def is not for floats alone."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    schema = RIGHT + 'MP_OUTPUT(int32_t, sums, true, request->n_words, 3, 0, 9, "a sum")\nMP_PROGRESS(done)\n'
    run = _compile(tmp_path, schema, compiler, WIRE)
    assert run.returncode == 0, run.stderr


def test_one_command_prints_the_generated_c() -> None:
    """expand.py prints the code that declares, checks, copies, frees, sends and parses each field."""
    run = subprocess.run([sys.executable, str(EXPAND), "image_embedding"], capture_output=True, text=True, check=True)
    generated = " ".join(run.stdout.split())
    for words in ("const int32_t *sizes;", "int32_t *sizes;", 'mp_check_items_int32_t("sizes", args->sizes,',
                  "to->sizes = mp_request_copy(args->sizes,", "mp_free(request->sizes);", "mp_put(out, request->sizes,",
                  "args->sizes = mp_get_array(in,", "of_sizes = mp_entries_in(state, in_sizes,", "&in_sizes,",
                  "_Atomic int32_t done;"):
        assert words in generated, words
    assert "MP_ARRAY" not in generated
    vision = subprocess.run([sys.executable, str(EXPAND), "vision", "--part", "structs"], capture_output=True,
                            text=True, check=True).stdout
    assert "tile_keys" in vision and "float temperature;" in vision and "n_prompt" in vision


def test_a_debugger_shows_the_fields_of_a_request(tmp_path: Path) -> None:
    """gdb shows the names and types of the schema."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    (tmp_path / "some.c").write_text('#include "models/capability.h"\n'
                                     "static mp_image_generation_request request = {.width = 640, .n_noise = 4096};\n"
                                     "int main(void) { return request.width == 0; }\n")
    program = tmp_path / "some"
    subprocess.run(["gcc", "-g", "-std=c11", "-D_GNU_SOURCE", f"-I{CSRC}", "-o", str(program),
                    str(tmp_path / "some.c")], check=True)
    run = subprocess.run(["gdb", "-batch", "-nx", "-ex", "ptype mp_image_generation_request", "-ex", "print request",
                          str(program)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    for words in ("int32_t width;", "float *noise;", "uint8_t *previews;", "_Atomic int32_t steps_done;",
                  "width = 640", "n_noise = 4096"):
        assert words in run.stdout, run.stdout + run.stderr


def _listed(first: str, last: str) -> set[str]:
    """Return the files in the first column of the tables of csrc/README.md between two headings."""
    page = (CSRC / "README.md").read_text().split(f"### {first}\n")[1].split(f"\n{last}\n")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_readme_lists_the_files_of_the_core_that_name_a_capability() -> None:
    """csrc/README.md, "Adding a capability", step 1."""
    listed = {name.replace("<capability>", "image_embedding")
              for name in _listed("1. The request and its row", "### 2. The engine")}
    # does not match the types of the request, which engines use
    named = re.compile(r"image_embedding(_from_python)?\b|IMAGE_EMBEDDING\b|mp_image_embedding_from_python\b")
    found = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".def")
             and named.search(path.name + path.read_text(encoding="utf-8"))}
    assert found == listed
    assert len(found) == 12


def test_the_readme_lists_the_files_of_the_package_that_name_a_capability() -> None:
    """csrc/README.md, "Adding a capability", steps 4 and 5: none is missing, and all exist."""
    listed = _listed("4. The Python package", "### 5. Tests and documents")
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpool").rglob("*")
             if path.suffix in (".py", ".pyi", ".js", ".json") and "image_embedding" in path.read_text("utf-8")}
    assert found <= listed
    listed |= _listed("5. Tests and documents", "## Tests")
    assert [name for name in sorted(listed) if not (ROOT / name).is_file()] == []


def test_the_readme_lists_the_files_of_an_output_of_encoders() -> None:
    """csrc/README.md, "Adding an output of an encoder": the files of sparse vectors are in the lists, and all exist."""
    core = _listed("1. The array of an output", "### 2. The output in Python")
    assert {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".def")
            and "MP_EMBED_SPARSE" in path.read_text(encoding="utf-8")} <= core
    package = _listed("2. The output in Python", "## Adding a capability")
    layers = {"mpool/models/architectures.py", *(f"mpool/models/families/{name}.py" for name in (
        "deepseek", "nomic", "qwen_moe"))}  # "sparse" is a kind of layer of MoE there
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpool").rglob("*.py")
             if re.search(r'embed_sparse|"sparse"', path.read_text("utf-8"))}
    assert layers <= found and found - layers <= package
    assert [name for name in sorted(core) if not (CSRC / name).is_file()] == []
    assert [name for name in sorted(package) if not (ROOT / name).is_file()] == []
