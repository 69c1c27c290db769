#!/usr/bin/env python3
"""Prints the C that the preprocessor generates from the schema of a capability.

    python csrc/models/requests/expand.py text_embedding             # all of it
    python csrc/models/requests/expand.py text_to_image --part wire  # structs, request, wire or python

Formatted with clang-format if that is installed, else by a simple rule: one statement per line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2]
REQUESTS = Path(__file__).resolve().parent
SHARES = {"vision": "text_to_text"}  # capabilities with the schema of another one
SCHEMAS = {"text_to_text": {"text_to_text.def", "sampling.def", "text_images.def"}}  # where they are several
MARKER = re.compile(r'^# \d+ "([^"]*)"([ \d]*)')
TRY = re.compile(r"do \{ mp_status mp_try_status = \((.*?)\); if \(mp_try_status != MP_OK\) return mp_try_status; \}"
                 r"\s+while \(0\)", re.DOTALL)


def preprocess(source: Path) -> list[tuple[list[str], str]]:
    """The lines of a preprocessed file, each with the names of the files that it was included through."""
    includes = [f"-I{CSRC}"]
    if source.parent.name == "python":
        import numpy  # optional: the other parts do not need it

        includes += [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
    compiler = os.environ.get("CC", "cc").split()
    run = subprocess.run([*compiler, "-E", "-std=c11", "-D_GNU_SOURCE", *includes, str(source)], capture_output=True,
                         text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{source} does not pass the preprocessor:\n{run.stderr}")
    lines, files = [], [source.name]
    for line in run.stdout.splitlines():
        marker = MARKER.match(line)
        if marker and "1" in marker.group(2).split():
            files = [*files, Path(marker.group(1)).name]
        elif marker and "2" in marker.group(2).split():
            files = files[:-1]
        elif not marker and line.strip():
            lines.append((files, line))
    return lines


def structs(lines: list[tuple[list[str], str]], schemas: set[str]) -> list[str]:
    """The structs of a header whose members come from these schemas."""
    found: list[str] = []
    kept: list[str] | None = None
    generated = False
    for files, line in lines:
        in_header = files[-1] == "capability.h"
        if in_header and line.startswith("typedef struct "):
            kept, generated = [], False
        if kept is None:
            continue
        kept.append(line)
        generated = generated or files[-1] in schemas
        if in_header and line.startswith("}"):
            found += kept if generated else []
            kept = None
    return found


def body(lines: list[tuple[list[str], str]]) -> list[str]:
    """The lines of a source file, and of the schemas and passes that it includes."""
    return [line for files, line in lines
            if all(file.endswith(".def") for file in files[1:])]


def tidy(text: str) -> str:
    """One statement per line, indented by its braces. String literals stay whole."""
    out: list[str] = []
    line, depth, brackets = "", 0, 0
    for token in re.findall(r'"(?:\\.|[^"\\])*"|\s+|.', text, re.DOTALL):
        if token == "\n" and not line.strip():
            continue
        line += " " if token.isspace() else token
        brackets += (token == "(") - (token == ")")
        if token == "}":
            depth -= 1
        if brackets == 0 and token in (";", "{", "}"):
            out.append("    " * depth + line.strip())
            line = ""
        if token == "{":
            depth += 1
    return "\n".join([*out, line.strip()])


def pretty(text: str) -> str:
    """The text as a person wants to read it."""
    text = re.sub(r'" *"', "", re.sub(r"[ \t]+", " ", text))
    text = TRY.sub(lambda match: f"MP_TRY({' '.join(match.group(1).split())})", text)
    if not shutil.which("clang-format"):
        return tidy(text)
    return subprocess.run(["clang-format", f"--assume-filename={REQUESTS / 'expanded.c'}"], input=text,
                          capture_output=True, text=True, check=True).stdout


def expand(capability: str, part: str) -> str:
    """What a part of a capability expands to."""
    name = SHARES.get(capability, capability)
    sources = {"request": REQUESTS / f"{name}.c", "wire": CSRC / "isolation" / f"wire_{name}.c",
               "python": CSRC / "python" / f"convert_{name}.c"}
    if part == "structs":
        lines = preprocess(sources["request"])
        return "\n".join(structs(lines, SCHEMAS.get(name, {f"{name}.def"})))
    return "\n".join(body(preprocess(sources[part])))


def main() -> int:
    """The command."""
    capabilities = sorted([path.stem for path in REQUESTS.glob("*.def")
                           if path.with_suffix(".c").exists()] + list(SHARES))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("capability", choices=capabilities)
    parser.add_argument("--part", choices=["structs", "request", "wire", "python"], help="default: all of them")
    arguments = parser.parse_args()
    for part in [arguments.part] if arguments.part else ["structs", "request", "wire", "python"]:
        print(f"/* ---- {part} of {arguments.capability} ---- */\n")
        print(pretty(expand(arguments.capability, part)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
