#!/usr/bin/env python3
"""Run the tests that take too long for every change, and keep a summary of each one's last run.

    python tests/nightly/nightly.py run                       # every job but `aider`: many hours
    python tests/nightly/nightly.py run soak cluster          # some jobs
    python tests/nightly/nightly.py run stress --part "-k pixel_limit"   # a part of a job
    python tests/nightly/nightly.py record soak junit.xml       # results of pytest --junitxml, from elsewhere
    python tests/nightly/nightly.py list

`MPOOL_NIGHTLY=1 .ci/run` runs every job. Results go to ``summary.json`` beside this file, and ``README.md`` shows
them. The summary keeps the results of jobs that did not run this time, with their own date, commit and machine.
"""

import argparse
import collections
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = Path(__file__).resolve().parent / "summary.json"
PAGE = SUMMARY.with_name("README.md")
sys.path.append(str(ROOT / "tests" / "python" / "helpers"))  # this script also runs without pytest

import instructionsets  # noqa: E402

OUTCOMES = ["passed", "failed", "error", "skipped", "xfailed"]


@dataclass(frozen=True)
class Job:
    """A part of the nightly run.

    Attributes:
        what: what it tests, in a few words.
        paths: files and folders of tests.
        environment: variables that set its length; those that are set already take precedence.
        all: also run tests that are marked neither slow nor sample.
        hours: limit of time.
        extra: extra of mpool that the job needs beside `test`. The job runs in an environment of its own, because the
            other jobs do not, or must not, have these packages. Tests that lack one fail instead of being skipped.
        named: run only if the command names the job.
    """

    what: str
    paths: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    all: bool = False
    hours: float = 4
    extra: str = ""
    named: bool = False


def _python(*paths: str) -> tuple[str, ...]:
    return tuple("tests/python/" + path for path in paths)


def _integration(name: str, extra: str = "") -> Job:
    return Job(f"the integration with {name}", _python(f"integrations/test_integrations_{name}.py"), all=True, hours=1,
               extra=extra or name.replace("_", "-"))


JOBS: dict[str, Job] = {
    "soak": Job("requests of all five capabilities at once, in little memory", all=True,
                  paths=_python("runtime/test_soak_capabilities.py"),
                  environment={"MPOOL_SOAK": "900"}),
    "stress": Job("forks, exits, kills and loaded servers, many times",
                    _python("faults", "server/test_server_load.py")),
    "positions": Job("contexts of up to 131,072 positions, against float64",
                       _python("parity/test_long_positions.py")),
    "flags": Job("every flag of every architecture, flipped", _python("parity/test_arch_flags.py")),
    "weights": Job("published weights, against recorded results of other implementations",
                     _python("parity/test_parity_gguf.py", "parity/test_parity_dino.py",
                             "parity/test_parity_capture.py", "parity/test_parity_minilm.py",
                             "parity/test_hard_inputs.py", "api/test_speculation.py", "conversation/test_tools.py"),
                     {"MPOOL_REQUIRE_REAL": "1"}, all=True),
    "ray": Job("the integration with Ray: fronts, replicas, columns, several nodes, kills",
                 _python(*(f"integrations/test_ray_{name}.py" for name in ("fronts", "replicas", "plans", "parquet",
                                                                           "outputs", "columns", "cluster",
                                                                           "failures"))), all=True, extra="ray"),
    **{name: _integration(name) for name in ("llama_index", "haystack", "chroma", "lancedb", "llm", "sklearn")},
    "langchain": _integration("langchain", "langchain-tests"),
    "clients": Job("the server with clients of other libraries", _python("server/test_server_clients.py"), all=True,
                   hours=1, extra="clients"),
    "browser": Job("the dashboard in a browser",
                   _python("server/test_dashboard_browser.py", "server/test_dashboard_playground.py",
                           "server/test_dashboard_compare.py", "server/test_dashboard_scripts.py"), all=True, hours=1,
                   extra="browser"),
    "generated": Job("requests that schemathesis generates from the OpenAPI document",
                     _python("server/test_server_generated.py"), all=True, extra="schemathesis"),
    "aider": Job("the program aider edits a file: MPOOL_AIDER is the path of its command, in an environment of its own",
                 _python("server/test_server_aider.py"), all=True, hours=1, named=True),
    "library": Job("the tests of sentence-transformers with mpool's classes, in the checkout that "
                   "MPOOL_SENTENCE_TRANSFORMERS names: see CONTRIBUTING.md",
                   _python("integrations/test_library_tests.py"), all=True, hours=1),
    "peers": Job("cases of other projects' own tests, in the folder that MPOOL_PEERS names: see CONTRIBUTING.md",
                 _python("integrations/test_peers.py"), {"MPOOL_PEERS_SAMPLE": "4"}, all=True, hours=1),
    "wheels": Job("wheels of both architectures, installed without a compiler", _python("core/test_wheels.py"),
                  all=True, extra="wheels"),
    "schedules": Job("seeded thread switches and injected failures in the Python layer", _python("schedules")),
    "builds": Job("the core under sanitizers, the simulator, by other compilers, and for ARM",
                    _python("core/test_c_builds.py", "core/test_c_races.py"), all=True),
    "fuzz": Job("every fuzz target, ten minutes each", _python("core/test_fuzz.py"), {"MPOOL_FUZZ_SECONDS": "600"},
                  all=True),
    "templates": Job("every filter, test and function of jinja2 with hostile arguments",
                       _python("conversation/test_hostile_templates.py")),
    "others": Job("every other test that is marked slow or sample", ("tests/python",)),
}


# ---- running ----

def variables(job: Job) -> dict[str, str]:
    """Return the variables of a job with their values for this run."""
    return {name: os.environ.get(name, value) for name, value in job.environment.items()}


def install(job: Job, folder: Path) -> str:
    """Make an environment that has mpool with the extra of a job. Return its Python."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[test,{job.extra}]"], check=True, cwd=folder)
    return python


def command(job: Job, part: str, out: Path, python: str = sys.executable) -> list[str]:
    """Return the command that runs a job with a Python. Its results go to the folder `out`."""
    paths = list(job.paths)
    if paths == ["tests/python"]:
        paths += [f"--ignore={path}" for other in JOBS.values() for path in other.paths if path != "tests/python"]
    return [python, "-m", "pytest", "-q", "--slow", *([] if job.all else ["-m", "slow or sample"]),
            f"--junitxml={out / 'junit.xml'}", *paths, *shlex.split(part)]


def run(name: str, part: str) -> dict[str, Any]:
    """Run one job. Returns its record."""
    job, began = JOBS[name], time.time()
    with tempfile.TemporaryDirectory() as folder:
        out, environment = Path(folder), {**os.environ, **variables(job)}
        python = sys.executable
        if job.extra:
            try:
                python = install(job, out / "venv")
            except subprocess.CalledProcessError as error:
                found: dict[str, Any] = {"counts": {}, "skipped": {}, "slowest": [],
                         "failures": [{"test": name, "message": f"pip install '.[{job.extra}]': exit code "
                                                                f"{error.returncode}"}]}
                return record(part, found, commit(), began, time.time() - began, variables(job))
            environment["MPOOL_CLIENT_TESTS"] = "1"
        process = subprocess.Popen(command(job, part, out, python), cwd=ROOT, start_new_session=True, env=environment)
        try:
            code: int | None = process.wait(timeout=job.hours * 3600)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
        found = junit(out / "junit.xml")
    if code is None:
        found["failures"].append({"test": name, "message": f"did not end within {job.hours:g} hours"})
    elif code and not found["failures"]:
        found["failures"].append({"test": name, "message": f"exit code {code}"})
    elif not found["counts"]:
        found["failures"].append({"test": name, "message": "no test ran"})
    return record(part, found, commit(), began, time.time() - began, variables(job))


def junit(*paths: Path) -> dict[str, Any]:
    """Read files of pytest's ``--junitxml``: counts by outcome, failures, reasons of skipped tests, slowest tests."""
    counts: collections.Counter[str] = collections.Counter()
    skipped: collections.Counter[str] = collections.Counter()
    failures, times = [], []
    for case in (case for path in paths if path.exists() for case in ElementTree.parse(path).iter("testcase")):
        if not case.get("name"):
            continue  # pytest was interrupted in this test
        test = _test_id(case.get("classname", ""), case.get("name", ""))
        times.append((round(float(case.get("time", 0)), 1), test))
        bad = [child for child in case if child.tag in ("failure", "error")]
        skip = case.find("skipped")
        if bad:
            outcome = "failed" if any(child.tag == "failure" for child in bad) else "error"
            failures.append({"test": test, "message": _first_line(bad[0].get("message", ""))})
        elif skip is not None and skip.get("type") != "pytest.xfail":
            outcome = "skipped"
            skipped[_first_line(skip.get("message", ""))] += 1
        else:
            outcome = "passed" if skip is None else "xfailed"
        counts[outcome] += 1
    slowest = [[test, seconds] for seconds, test in sorted(times, reverse=True)[:5]]
    return {"counts": {name: counts[name] for name in OUTCOMES if counts[name]}, "failures": failures,
            "skipped": dict(skipped), "slowest": slowest}


def of_junit(paths: Sequence[Path]) -> tuple[dict[str, Any], float, float]:
    """Return what files of ``--junitxml`` found, when the first run began (seconds since the epoch), and how many
    seconds the runs took."""
    suites = [suite for path in paths for suite in ElementTree.parse(path).iter("testsuite")]
    began = min(datetime.fromisoformat(suite.get("timestamp", "")).timestamp() for suite in suites)
    return junit(*paths), began, sum(float(suite.get("time", 0)) for suite in suites)


def _test_id(classname: str, name: str) -> str:
    """The id of a test, from the dotted name of its module, and of its class if it has one."""
    parts = classname.split(".")
    for count in range(len(parts), 0, -1):
        if (ROOT / Path(*parts[:count])).with_suffix(".py").is_file():
            return "::".join(["/".join(parts[:count]) + ".py", *parts[count:], name])
    return f"{classname}::{name}"


def _first_line(text: str) -> str:
    """Return the first line of a message, shortened, with ``~`` for the home folder: the summary is committed."""
    line = next(iter(text.strip().splitlines()), "").replace(str(Path.home()), "~")
    return line if len(line) <= 200 else line[:197] + "..."


# ---- what ran where ----

def git(*arguments: str) -> tuple[int, str]:
    """Run git in the clone. Returns its exit code and output; 127: there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return 127, ""
    return done.returncode, done.stdout.strip()


def commit() -> str:
    """The commit that is checked out, with ``+`` if files differ from it; "unknown" outside a clone."""
    code, found = git("rev-parse", "HEAD")
    if code:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/nightly")[1]
    return found + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """Model and number of CPUs, and which instruction sets of the core they have and lack. Both lists are empty if the
    core cannot be imported."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    names, features = instructionsets.known(platform.machine()), instructionsets.of_this_cpu()
    cpu = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:  # virtual machines hide the name
        cpu += f" (family {facts['cpu family']}, model {facts.get('model')})"
    return {"cpu": cpu,
            "cores": len(os.sched_getaffinity(0)), "has": [name for name in names if name in (features or [])],
            "lacks": [name for name in names if name not in (features or names)], "python": platform.python_version()}


def record(part: str, found: dict[str, Any], at: str, began: float, seconds: float,
           environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a job. `environment`: the variables that set its length."""
    date = datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "commit": at, "part": part, "seconds": round(seconds), "environment": dict(environment),
            "machine": machine(), **found}


# ---- the summary ----

def load(path: Path = SUMMARY) -> dict[str, Any]:
    """Read the summary: job -> record."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(summary: dict[str, Any], path: Path = SUMMARY) -> None:
    """Write the summary, with jobs in their order, and the page that shows it."""
    ordered = {name: summary[name] for name in JOBS if name in summary}
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    path.with_name(PAGE.name).write_text(page(ordered), encoding="utf-8")


def page(summary: Mapping[str, Any]) -> str:
    """Return the summary as Markdown."""
    lines = ["# The nightly run", "",
             "Written by `nightly.py` from `summary.json`; do not edit. Tests that take too long for every change run",
             "with `MPOOL_NIGHTLY=1 .ci/run`, or job by job with `python tests/nightly/nightly.py run JOB`.", "",
             "| job | tests | date | commit | result | minutes |", "|---|---|---|---|---|---|"]
    for name, job in JOBS.items():
        row = summary.get(name)
        if row is None:
            lines.append(f"| {name} | {job.what} | **not run** | | | |")
            continue
        result = ", ".join(f"{count} {outcome}" for outcome, count in row["counts"].items()) or "no tests"
        part = f" (only `{row['part']}`)" if row["part"] else ""
        lines.append(f"| {name} | {job.what}{part} | {row['date'][:10]} | `{row['commit'][:10]}`"
                     f"{'+' if row['commit'].endswith('+') else ''} | {result} | {row['seconds'] / 60:.0f} |")
    for title, key in (("Failures", "failures"), ("Skipped tests", "skipped"), ("Slowest tests", "slowest")):
        rows = [f"- {name}: {_shown(item, row[key])}" for name, row in summary.items() for item in row.get(key, [])]
        lines += ["", f"## {title}", "", *(rows or ["None."])]
    lines += ["", "## Machines", ""]
    for name, row in summary.items():
        found = row["machine"]
        length = " ".join(f"{key}={value}" for key, value in row["environment"].items())
        lines.append(f"- {name}: {found['cpu']}, {found['cores']} cores, Python {found['python']}; has "
                     f"{' '.join(found['has']) or 'none'}; lacks {' '.join(found['lacks']) or 'none'}"
                     + (f"; {length}" if length else ""))
    lines += ["", "A commit with `+` had uncommitted changes."]
    return "\n".join(lines) + "\n"


def _shown(item: Any, rows: Any) -> str:
    if isinstance(rows, dict):
        return f"{rows[item]} test{'s' * (rows[item] != 1)}: {item}"
    if isinstance(item, dict):
        return f"`{item['test']}`: {item['message']}"
    return f"`{item[0]}`: {item[1]:g} s"


# ---- command line ----

def main() -> int:
    """Run the command line; the exit code is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run jobs and record them")
    running.add_argument("jobs", nargs="*", metavar="JOB", help="default: all but `aider`; see `list`")
    running.add_argument("--part", default="", metavar="OPTIONS", help="further options of pytest")
    recording = commands.add_parser("record", help="record results of pytest --junitxml")
    recording.add_argument("job", choices=list(JOBS))
    recording.add_argument("results", type=Path, nargs="+", help="files of results: one for each run of the job")
    recording.add_argument("--commit", help="default: the commit that is checked out")
    recording.add_argument("--part", default="", metavar="OPTIONS", help="the options that selected tests")
    commands.add_parser("list", help="list the jobs")
    args = parser.parse_args()
    if args.command == "list":
        for name, job in JOBS.items():
            print(f"{name:10} {job.what}")
        return 0
    summary, failed = load(), False
    if args.command == "record":
        job = JOBS[args.job]
        found, began, seconds = of_junit(args.results)
        given = {key: os.environ[key] for key in job.environment if key in os.environ}
        row = record(args.part, found, args.commit or commit(), began, seconds, given)
        save({**summary, args.job: row})
        return int(bool(row["failures"]))
    for name in args.jobs:
        if name not in JOBS:
            parser.error(f"JOB must be one of {', '.join(JOBS)}; got {name!r}")
    for name in args.jobs or [name for name, job in JOBS.items() if not job.named]:
        print(f"nightly: {name}: {JOBS[name].what}", flush=True)
        row = run(name, args.part)
        summary[name] = row
        save(summary)  # after every job: a later one may be interrupted
        failed = failed or bool(row["failures"])
        print(f"nightly: {name}: {row['counts']} in {row['seconds']} s, {len(row['failures'])} failures", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
