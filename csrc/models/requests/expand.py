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
MARKER = re.compile(r'^# \d+ "([^"]*)"')
TRY = re.compile(r"do \{ mp_status mp_try_status = \((.*?)\); if \(mp_try_status != MP_OK\) return mp_try_status; \}"
                 r" while \(0\)")


def preprocess(source: Path) -> list[tuple[str, str]]:
    """The lines of a preprocessed file, each with the file that it is from."""
    includes = [f"-I{CSRC}"]
    if source.parent.name == "python":
        import numpy  # optional: the other parts do not need it

        includes += [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
    compiler = os.environ.get("CC", "cc").split()
    run = subprocess.run([*compiler, "-E", "-std=c11", "-D_GNU_SOURCE", *includes, str(source)], capture_output=True,
                         text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{source} does not pass the preprocessor:\n{run.stderr}")
    lines, file = [], ""
    for line in run.stdout.splitlines():
        marker = MARKER.match(line)
        if marker:
            file = marker.group(1)
        elif line.strip():
            lines.append((file, line))
    return lines


def structs(lines: list[tuple[str, str]]) -> list[str]:
    """The structs of a header whose members come from a schema."""
    found: list[str] = []
    kept: list[str] | None = None
    generated = False
    for file, line in lines:
        if file.endswith("capability.h") and line.startswith("typedef struct "):
            kept, generated = [], False
        if kept is None:
            continue
        kept.append(line)
        generated = generated or file.endswith(".def")
        if file.endswith("capability.h") and line.startswith("}"):
            found += [*kept, ""] if generated else []
            kept = None
    return found


def body(lines: list[tuple[str, str]], source: Path) -> list[str]:
    """The lines of a source file, and of the tables and templates that it includes."""
    own = (".def", f"/{source.name}", "_tmpl.h")
    return [line for file, line in lines if file.endswith(own)]


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
            out.append("    " * (depth if token != "{" else depth) + line.strip())
            line = ""
        if token == "{":
            depth += 1
    return "\n".join([*out, line.strip()])


def pretty(text: str) -> str:
    """The text as a person wants to read it."""
    text = TRY.sub(r"MP_TRY(\1)", re.sub(r"[ \t]+", " ", text))
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
        return "\n".join(structs(lines))
    return "\n".join(body(preprocess(sources[part]), sources[part]))


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
