"""``python -m benchmarks parquet``: texts from Parquet files to Parquet files with vectors, in one process and by Ray.

``process``: a loop over the batches of each file, ``mpool.embed_iter`` and a Parquet writer. ``ray``:
``mpool.integrations.ray.embed_parquet``, one process per CPU. Both read and write the same files, each in a process of
its own. Prints texts/s, of ``process`` also for each tenth of the texts, and the memory of all processes together that
is not in files, at its highest in the first half and in the second half. Both should stay flat: memory depends on
batches, not on the number of texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import texts
from .options import add_threads, parser_of

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1024


def write(folder: Path, count: int, files: int) -> None:
    """Write files with ``count`` texts of natural length, all different."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(files):
        with pq.ParquetWriter(folder / f"{number:03}.parquet", pa.schema([("text", pa.string())])) as writer:
            first, last = count * number // files, count * (number + 1) // files
            for turn, at in enumerate(range(first, last, ROWS)):
                found = texts.mixed(min(ROWS, last - at), turn * files + number)
                writer.write_table(pa.table({"text": found}))


def texts_of(path: Path, batches: deque[pa.RecordBatch]) -> Iterator[str]:
    """Yield the texts of a file, and append each batch that is read to ``batches``."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(ROWS):
        batches.append(batch)
        yield from batch.column("text").to_pylist()


def in_process(source: Path, target: Path, model: str, threads: int) -> None:
    """Embed all files; print the number of finished texts after each batch."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import mpool

    finished = 0
    with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
        for path in sorted(source.glob("*.parquet")):
            batches: deque[pa.RecordBatch] = deque()  # read, and not written yet
            vectors, writer = pool.embed_iter(texts_of(path, batches), model), None
            for vector in vectors:
                batch = batches.popleft()
                found = np.stack([vector, *itertools.islice(vectors, batch.num_rows - 1)])
                column = pa.FixedSizeListArray.from_arrays(pa.array(found.reshape(-1)), found.shape[1])
                done = pa.table([*batch.columns, column], names=[*batch.schema.names, "embedding"])
                writer = writer or pq.ParquetWriter(target / path.name, done.schema)
                writer.write_table(done)
                finished += batch.num_rows
                print(finished, flush=True)
            if writer:
                writer.close()


def by_ray(source: Path, target: Path, model: str, threads: int) -> None:
    """Embed all files with Ray; print the number of finished texts after each file."""
    from mpool.integrations.ray import embed_parquet

    embed_parquet(source, target, model=model, actors=threads, progress=lambda done, _: print(done, flush=True))


WAYS = {"process": in_process, "ray": by_ray}


def memory_of(process: int) -> int:
    """Return the bytes of anonymous and shared memory of a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    total, left = 0, [process]
    while left:
        number = left.pop()
        left += parents.get(number, [])
        try:
            status = Path(f"/proc/{number}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def measure(way: str, source: Path, target: Path, count: int, args: argparse.Namespace) -> dict[str, object]:
    """Run one way in a process of its own, and return its rates and memory."""
    target.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.parquet", "--run", way, str(source), str(target),
                                "--model", args.model, "--threads", str(args.threads)], stdout=subprocess.PIPE,
                               text=True)
    assert process.stdout is not None
    done, times, most, ended = 0, [], [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            half = int(2 * done >= count)
            most[half] = max(most[half], memory_of(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for line in process.stdout:
        if line.strip().isdigit():
            done = int(line)
            times.append((time.perf_counter(), done))
    ended.set()
    watcher.join()
    if process.wait() != 0 or done != count:
        raise RuntimeError(f"{way} embedded {done} of {count} texts")
    (begun, first), (end, _) = times[0], times[-1]
    row: dict[str, object] = {"way": way, "texts": count, "memory MB": [round(value / 1e6) for value in most]}
    if len(times) > 1:
        row["texts/s"] = round((count - first) / (end - begun))
    if way == "process" and len(times) > 10:
        marks = [times[(len(times) - 1) * tenth // 10] for tenth in range(11)]
        row["tenths"] = [round((b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(marks)]
    return row


def main() -> int:
    """Run the command line."""
    parser = parser_of("parquet", __doc__)
    parser.add_argument("--texts", type=int, default=1_000_000, help="number of texts (default: %(default)s)")
    parser.add_argument("--files", type=int, default=20, help="number of files (default: %(default)s)")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="embedding model (default: %(default)s)")
    add_threads(parser, what="compute threads, and processes of Ray")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    parser.add_argument("--run", nargs=3, metavar=("WAY", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        way, source, target = args.run
        WAYS[way](Path(source), Path(target), args.model, args.threads)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "texts"
        source.mkdir()
        write(source, args.texts, args.files)
        for way in args.ways:
            print(json.dumps(measure(way, source, Path(folder) / way, args.texts, args)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
