"""``python -m benchmarks mapped``: float32 weights as they are mapped, compared with packed ones: time to the first
vector, rates, memory, bytes.

FOLDER receives an encoder of BERT's architecture with 24 layers of 1,024 and random values (1.3 GB), unless it has one
already; ``--maker`` names an interpreter that has torch and transformers. Every turn is a process of its own, its file
is in the page cache, and the kinds of weights take turns. The first vector is measured from the start of Python. Rates
are of lists of texts with 128 tokens each, one and two texts a call among them, after a first pass. The read probe is
the time in which one thread reads the file from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = ("packed", "mapped", "auto")
LISTS = (1, 2, 16)
MAKE = """
import sys, torch, transformers
torch.manual_seed(1)
config = transformers.BertConfig(vocab_size=30522, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                                 num_attention_heads=16)
transformers.BertModel(config).eval().save_pretrained(sys.argv[1])
"""
TURN = """
import hashlib, json, statistics, sys, time
folder, kind, started = sys.argv[1], sys.argv[2], float(sys.argv[3])
import mpool
pool = mpool.Pool(mpool.PoolConfig(weights=kind))
first = pool.embed("A short first text.", folder, compute="float32")
found = {"first vector s": time.monotonic() - started}

def anonymous():
    lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(lines["Anonymous"].split()[0]) / 1024

found["anonymous MB after it"] = anonymous()
word, at = "window ", 0
digest = hashlib.sha256(first.tobytes())
for count in json.loads(sys.argv[4]):
    times = []
    for turn in range(4):
        at += count
        texts = [f"{number} " + word * 125 for number in range(at, at + count)]
        begin = time.perf_counter()
        vectors = pool.embed(texts, folder, compute="float32")
        times.append(time.perf_counter() - begin)
        digest.update(vectors.tobytes())
    found[f"{count} texts: texts/s"] = count / statistics.median(times[1:])
found["anonymous MB at the end"] = anonymous()
found["weights"] = pool.ps()[0].weights
print(json.dumps([found, digest.hexdigest()]))
"""


def read_seconds(path: Path) -> float:
    """Return the seconds in which one thread reads the file; the second time, when the page cache has it."""
    for _ in range(2):
        begin = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    return time.perf_counter() - begin


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mapped", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the encoder")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    parser.add_argument("--maker", default=sys.executable,
                        help="interpreter that writes the encoder (default: this one)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    weights = folder / "model.safetensors"
    if not weights.exists():
        from mpool.models import load_catalogue, resolve

        folder.mkdir(parents=True, exist_ok=True)
        source = Path(resolve(load_catalogue().default("text_embedding").key).path)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            if (source / name).exists():
                shutil.copy(source / name, folder)
        subprocess.run([arguments.maker, "-c", MAKE, str(folder)], check=True)
    size, read = weights.stat().st_size, read_seconds(weights)
    print(f"{size / 1e6:.0f} MB, read in {read:.2f} s ({size / read / 1e9:.1f} GB/s), limit for the first vector "
          f"{0.25 + 1.5 * read:.2f} s; load {os.getloadavg()}")
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    digests = set()
    for number in range(arguments.rounds):
        for kind in KINDS[number % 3:] + KINDS[:number % 3]:
            done = subprocess.run([sys.executable, "-c", TURN, str(folder), kind, str(time.monotonic()),
                                   json.dumps(LISTS)], capture_output=True, text=True, check=True, cwd="/")
            found, digest = json.loads(done.stdout.strip().splitlines()[-1])
            turns[kind].append(found)
            digests.add(digest)
    for kind, found in turns.items():
        print(kind, {name: [round(turn[name], 2) if isinstance(turn[name], float) else turn[name] for turn in found]
                     for name in found[0]})
    for name in (f"{count} texts: texts/s" for count in LISTS):
        ratio = statistics.median(a[name] / b[name] for a, b in zip(turns["mapped"], turns["packed"]))
        print(f"{name}: mapped over packed {ratio:.2f}")
    print(f"{len(digests)} digest of all vectors; load {os.getloadavg()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
