#!/usr/bin/env python3
"""Builds benchmarks/bench_kernels.c with the kernels, with the flags of a release build.

    python -m benchmarks kernels                          # builds, prints the program's path
    python -m benchmarks kernels --run -- --kind bf16 --rows 8,512

Uses gcc, or the compiler in ``CC``. Recompiles only changed files.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from .options import parser_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["base", "tensor", "kernels"]


def test_builder() -> ModuleType:
    """Import the builder of the C tests, for its flags and its incremental compiling."""
    path = ROOT / "tests" / "c" / "build.py"
    spec = importlib.util.spec_from_file_location("mpool_c_build", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    return module


def build(out: Path) -> Path:
    """Build the program below ``out`` with the flags of a release build, and return its path.

    Raises:
        RuntimeError: a compiler failed; the message is the compiler's output.
    """
    builder = test_builder()
    variant = builder.VARIANTS["release"]
    compiler = builder.compiler_of(variant)
    if compiler is None:
        raise RuntimeError("no gcc is installed: set CC to a C compiler")
    command = [*compiler, *builder.BASE_FLAGS, *variant.flags, f"-I{ROOT / 'csrc'}"]
    core, _ = builder.sources(FOLDERS, [])
    source = ROOT / "benchmarks" / "bench_kernels.c"
    objects: list[Path] = []
    for file in [*core, source]:
        target = out / Path(compiler[0]).name / file.relative_to(ROOT).with_suffix(".o")
        said = builder.compile_one(command, file, target)
        if said:
            raise RuntimeError(said)
        objects.append(target)
    program = out / Path(compiler[0]).name / source.stem
    run = subprocess.run([*command, *map(str, objects), "-lm", "-ldl", "-o", str(program)], capture_output=True,
                         text=True)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return program


def main() -> int:
    """Run the command line."""
    own, rest = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1:]
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench",
                        help="folder of the outputs (default: %(default)s)")
    parser.add_argument("--run", action="store_true", help="run the program; arguments after -- go to it")
    args = parser.parse_args(own)
    try:
        program = build(args.out.resolve())
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(program, flush=True)
    return subprocess.run([str(program), *rest]).returncode if args.run else 0


if __name__ == "__main__":
    sys.exit(main())
