"""Parquet files of texts, and calls of Ray Data in a local cluster that a process of its own has started."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayservers import WAIT

#: Rows of each source file.
ROWS = 24
#: Program that starts Ray, runs the call of each line of its input, and prints the result or the error as JSON after
#: "found": Ray Data prints lines of its own. ``data`` is a pipeline of Ray Data with one EmbedBatches per dict of
#: options, ``embed`` is embed_parquet. The number of CPUs lets all actors of a pipeline start.
_PROGRAM = """
import faulthandler, json, sys
import ray, ray.data
import mpool
from mpool.integrations.ray import EmbedBatches, embed_parquet

ray.init(num_cpus=8, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False,
         logging_level="WARNING")
ray.data.DataContext.get_current().enable_progress_bars = False
for line in sys.stdin:
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    kind, source, target, stages = json.loads(line)
    found = ""
    try:
        if kind == "embed":
            found = str(embed_parquet(source, target, progress=False, actors=1, **stages[0]))
        else:
            data = ray.data.read_parquet(source)
            for options in stages:
                data = data.map_batches(EmbedBatches, fn_constructor_kwargs=options, batch_format="pyarrow",
                                        batch_size=16, num_cpus=1, concurrency=1)
            data.write_parquet(target)
    except mpool.MpoolError as error:
        found = f"{type(error).__name__}: {error}"
    faulthandler.cancel_dump_traceback_later()
    print("found " + json.dumps(found), flush=True)
ray.shutdown()
"""


class RayData:
    """A local Ray cluster for calls of Ray Data, until :meth:`stop`.

    Args:
        log: file for the output of Ray and the tracebacks of the program.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(3 * WAIT)], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=errors, text=True)

    def _call(self, *call: Any) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("found "):
                return str(json.loads(line.removeprefix("found ")))
        raise AssertionError(self._log.read_text(errors="replace"))

    def embed(self, source: Path, target: Path, **options: Any) -> str:
        """Call ``embed_parquet`` with one actor. Returns the result as text, or the error."""
        return self._call("embed", str(source), str(target), [options])

    def pipeline(self, source: Path, target: Path, stages: list[dict[str, Any]]) -> str:
        """Run a pipeline with one ``EmbedBatches`` per dict of options. Returns the error, or an empty text."""
        return self._call("data", str(source), str(target), stages)

    def stop(self) -> int:
        """End the program and its cluster, and return the exit code."""
        try:
            self._process.communicate(timeout=WAIT)
        finally:
            self._process.kill()
        return self._process.returncode


def write_source(folder: Path) -> Path:
    """Write two Parquet files of texts and return their folder."""
    folder.mkdir()
    for name, end in (("a", "jumps, w{}."), ("b", "over w{} dogs.")):
        texts = [f"w{row} The fox {end.format(row % 5)}" for row in range(ROWS)]
        pq.write_table(pa.table({"id": [f"{name}{row:02}" for row in range(ROWS)], "text": texts}),
                       folder / f"{name}.parquet")
    return folder


def rows_of(folder: Path) -> pa.Table:
    """Return the rows of all files of a folder, in the order of their ids."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]).sort_by("id")


def record(folder: Path) -> dict[str, Any]:
    """Return the record of the vectors in the first file of a folder."""
    found: dict[str, Any] = json.loads(pq.read_schema(folder / "a.parquet").metadata[b"mpool.embedding"])
    return found
