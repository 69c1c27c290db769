"""Builds the extension ``mpool._core`` and puts OpenBLAS beside it. Everything else is in pyproject.toml.

Environment variables, for special builds:

    MPOOL_DEBUG=1                     assertions and debug information, -O1
    MPOOL_SEAM=1                      calls to the system can be replaced (failure injection)
    MPOOL_SANITIZE=address,undefined  or `thread`: built for that sanitizer; run with its library preloaded
    MPOOL_OPENBLAS=0                  leave OpenBLAS out even when its wheel is installed
    MPOOL_OPENBLAS=whole              OpenBLAS as published, not trimmed by tools/trim_openblas.py
    MPOOL_WERROR=1                    warnings are errors
    MPOOL_BUILD_JOBS=n                compilers at once; default: the CPUs this process may use
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPENBLAS_PACKAGE = "scipy-openblas32"
#: One extension for 3.11 and every later Python (abi3), as csrc/python/binding.h compiles it.
LIMITED_API = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def enabled(variable: str) -> bool:
    """Return True if an environment variable says yes."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false", "off")


def sources() -> list[str]:
    """Return every C file of the core, as paths relative to this folder: setuptools requires that."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.c"))


def headers() -> list[str]:
    """Return the files that the C files include."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in ("*.h", "*.def")
                  for path in (ROOT / "csrc").rglob(pattern))


def compile_flags() -> list[str]:
    """Return the flags after those of this Python. No -m flag: files that use an instruction set name it themselves."""
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread",
             "-Wall", "-Wextra", "-Wno-cast-function-type", "-Wno-missing-field-initializers",
             "-Werror=implicit-function-declaration"]  # a macro that the limited API of Python lacks
    sanitize = os.environ.get("MPOOL_SANITIZE", "").strip()
    if enabled("MPOOL_WERROR"):
        flags.append("-Werror")
    if enabled("MPOOL_SEAM"):
        flags.append("-DMP_SEAM")
    if enabled("MPOOL_DEBUG") or sanitize:
        flags += ["-UNDEBUG", "-O1", "-g", "-fno-omit-frame-pointer"]
    else:
        # functions on lines of their own: where the loops of the kernels lie then does not depend on the code before
        # them, which alone moved products by 5 % to either side
        flags += ["-DNDEBUG", "-O3", "-g0", "-falign-functions=64"]
    if sanitize:
        flags.append(f"-fsanitize={sanitize}")
        if "undefined" in sanitize:
            flags.append("-fno-sanitize-recover=all")
    return flags


def link_flags() -> list[str]:
    """Flags of the link."""
    flags = ["-pthread"]
    sanitize = os.environ.get("MPOOL_SANITIZE", "").strip()
    if sanitize:
        flags.append(f"-fsanitize={sanitize}")
    return flags


class BuildPackage(build_py):
    """build_py into an empty folder: files of an earlier build that are gone from the source must not be packed."""

    def run(self) -> None:
        """Copy the Python files."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "mpool", ignore_errors=True)
        super().run()


class BuildCore(build_ext):
    """build_ext that compiles files side by side and only those that changed, and vendors OpenBLAS."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one extension."""
        import numpy

        ext.include_dirs = ["csrc", numpy.get_include()]
        compiler = self.compiler
        original = compiler.compile

        def compile_side_by_side(files, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                                 extra_postargs=None, depends=None):
            macros, objects, postargs, preprocess, build = compiler._setup_compile(
                output_dir, macros, include_dirs, files, depends, extra_postargs)
            arguments = compiler._get_cc_args(preprocess, debug, extra_preargs)
            # pip builds in a new environment each time: numpy counts by its version, not by its place.
            flags = repr((compiler.compiler_so, arguments, postargs)).replace(numpy.get_include(), numpy.__version__)
            # the second line is for tests/c/build.py, which uses these objects
            readable = shlex.join([compiler.compiler_so[0], *postargs])
            stamp = f"{hashlib.sha256(flags.encode()).hexdigest()}\n{readable}\n"

            def one(target: str) -> None:
                source, suffix = build[target]
                depfile, stampfile = Path(target).with_suffix(".d"), Path(target).with_suffix(".flags")
                if is_current(Path(target), depfile, stampfile, stamp):
                    return
                stampfile.unlink(missing_ok=True)
                compiler._compile(target, source, suffix, arguments, [*postargs, "-MMD", "-MF", str(depfile)],
                                  preprocess)
                stampfile.write_text(stamp)

            jobs = int(os.environ.get("MPOOL_BUILD_JOBS") or available_cpus())
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                list(pool.map(one, [target for target in objects if target in build]))
            return objects

        compiler.compile = compile_side_by_side
        try:
            # setuptools would skip the whole extension by its own dates; ours are per file.
            self.force = True
            super().build_extension(ext)
        finally:
            compiler.compile = original

    def run(self) -> None:
        """Build, then put OpenBLAS where the package will look for it."""
        super().run()
        package = ROOT / "mpool" if self.inplace else Path(self.build_lib) / "mpool"
        if LIMITED_API:  # a file of an earlier version with this Python's own suffix would be imported instead
            (package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}").unlink(missing_ok=True)
        vendor_openblas(package / "_libs")


def available_cpus() -> int:
    """CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def is_current(target: Path, depfile: Path, stampfile: Path, stamp: str) -> bool:
    """Return True if an object is newer than all its sources, and was made with the same flags."""
    try:
        if stampfile.read_text() != stamp:
            return False
        made = target.stat().st_mtime_ns
        names = shlex.split(depfile.read_text().partition(":")[2].replace("\\\n", " "))
        return all(os.stat(name).st_mtime_ns < made for name in names)
    except (OSError, ValueError):
        return False


def vendor_openblas(target: Path) -> None:
    """Copy OpenBLAS out of its wheel, with its licence, trimmed on Linux; elsewhere with the libraries it needs.

    The wheel is a build requirement. Without it (another platform, a build without isolation) the package works all
    the same on its own kernels, and ``mpool.show_config()`` says so.
    """
    spec = importlib.util.find_spec("scipy_openblas32")
    shutil.rmtree(target, ignore_errors=True)
    if spec is None or not spec.origin or sys.platform not in ("linux", "darwin") \
            or not enabled_by_default("MPOOL_OPENBLAS"):
        print("mpool: building without OpenBLAS")
        return
    source = Path(spec.origin).parent
    # On macOS the library looks for those that it needs beside its own folder.
    patterns = ("lib/*.so*", "lib/*.dylib", ".dylibs/*.dylib")
    libraries = {path: path.read_bytes() for pattern in patterns for path in sorted(source.glob(pattern))}
    own = next((library for library in libraries if library.stem == "libscipy_openblas"), None)
    if own is None:
        print(f"mpool: no library in {OPENBLAS_PACKAGE}; building without OpenBLAS")
        return
    note = ", whole"
    if sys.platform == "linux" and os.environ.get("MPOOL_OPENBLAS", "").strip().lower() != "whole":
        trimming = load_script("trim_openblas")
        try:
            if (version := importlib.metadata.version(OPENBLAS_PACKAGE)) != trimming.CHECKED:
                raise trimming.TrimError(f"version {version} was not checked, only {trimming.CHECKED}")
            libraries = {own: trimming.trim(libraries[own], {library.name for library in libraries} - {own.name})}
            note = ", without the code that mpool never calls (tools/trim_openblas.py)"
        except trimming.TrimError as error:
            note = ", whole because it cannot be trimmed"
            print(f"mpool: OpenBLAS is packed whole, because {own.name} cannot be trimmed: {error}")
    target.mkdir(parents=True)
    for library, content in libraries.items():
        copy = target / (library.relative_to(source) if sys.platform == "darwin" else library.name)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
        copy.chmod(0o755)
    distribution = importlib.metadata.distribution(OPENBLAS_PACKAGE)
    licences = [file for file in distribution.files or [] if Path(file).name.upper().startswith("LICENSE")]
    if not licences:
        raise RuntimeError(f"{OPENBLAS_PACKAGE} {distribution.version} has no licence text to pass on")
    text = "\n\n".join(Path(distribution.locate_file(file)).read_text(encoding="utf-8") for file in licences)
    (target / "LICENSE.openblas.txt").write_text(text, encoding="utf-8")
    origin = f"{OPENBLAS_PACKAGE} {distribution.version}{note}"
    (target / "openblas.txt").write_text(f"{origin}\n", encoding="utf-8")
    print(f"mpool: with OpenBLAS of {origin}")


def load_script(name: str) -> ModuleType:
    """Import a script of the folder tools, which is no package."""
    spec = importlib.util.spec_from_file_location(f"mpool_tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def enabled_by_default(variable: str) -> bool:
    """Return False if an environment variable says no."""
    return variable not in os.environ or enabled(variable)


setup(
    ext_modules=[
        Extension(
            "mpool._core",
            sources=sources(),
            depends=headers(),
            extra_compile_args=compile_flags(),
            extra_link_args=link_flags(),
            libraries=["m", "dl"] if sys.platform == "linux" else ["m"],
            py_limited_api=LIMITED_API,
        )
    ],
    cmdclass={"build_py": BuildPackage, "build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
