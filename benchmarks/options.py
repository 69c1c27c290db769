"""Command lines of the benchmarks, and the options that several have."""

import argparse
import os


def parser_of(command: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser without options for ``python -m benchmarks COMMAND``. ``about``: the module's docstring."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=about,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


# Most measurements run in other processes with other working directories, so paths of the command line become absolute.

def path_of(given: str) -> str:
    """Type of an option that is a path."""
    return os.path.abspath(given)


def found_here(given: str) -> str:
    """Type of an option that is a path, or a name: a key of the catalogue, or a program on PATH."""
    return os.path.abspath(given) if os.path.exists(given) else given


def pair_of(given: str) -> str:
    """Type of an option ``ENGINE=PATH``."""
    engine, sign, path = given.partition("=")
    return engine + sign + found_here(path)


def add_threads(parser: argparse.ArgumentParser, default: int | None = None, what: str = "compute threads") -> None:
    """Add ``--threads``. ``default`` None: one for each CPU that this process may use."""
    parser.add_argument("--threads", type=int, default=default or len(os.sched_getaffinity(0)), metavar="N",
                        help=f"{what} (default: %(default)s)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", metavar="PATH", help="write the record of all turns to this file")
