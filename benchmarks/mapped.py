"""``python -m benchmarks mapped``: float32 weights as they are mapped, compared with packed ones: time to the first
vector or token, rates, memory, bytes.

FOLDER receives a model with random values, unless it has one already: an encoder of BERT's architecture with 24 layers
of 1,024 (1.3 GB), or with ``--decoder`` one of Llama's with 20 layers of 1,536 (2.9 GB); ``--maker`` names an
interpreter that has torch and transformers. Every turn is a process of its own, its file is in the page cache, and the
kinds of weights take turns. The first result is measured from the start of Python, the rates after a first pass: those
of an encoder with lists of 1, 2 and 16 texts of 128 tokens each, those of a decoder with prompts of 128 and 512 tokens
and 8 tokens after each. The read probe is the time in which one thread reads the file from the page cache.

The kind ``fast`` is ``compute="float32-fast"``: it differs from ``mapped`` where the sums of the BLAS library differ
from mpool's, as they do with ``MPOOL_CPU=avx2``. In the record of ``--json``, ``auto`` is the engine ``mpool``, and the
other kinds are variants of it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .options import add_json, found_here, parser_of
from .record import Recorder

KINDS = ("packed", "mapped", "auto", "fast")
LISTS = (1, 2, 16)
PROMPTS = (128, 512)
MAKE = {"encoder": """
import sys, torch, transformers
torch.manual_seed(1)
config = transformers.BertConfig(vocab_size=30522, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                                 num_attention_heads=16)
transformers.BertModel(config).eval().save_pretrained(sys.argv[1])
""", "decoder": """
import sys, torch, transformers
torch.manual_seed(1)
config = transformers.LlamaConfig(vocab_size=30522, hidden_size=1536, intermediate_size=6144, num_hidden_layers=20,
                                  num_attention_heads=24, num_key_value_heads=6, tie_word_embeddings=True,
                                  bos_token_id=101, eos_token_id=102)
transformers.LlamaForCausalLM(config).eval().save_pretrained(sys.argv[1])
"""}
START = """
import hashlib, json, random, statistics, sys, time
folder, kind, started = sys.argv[1], sys.argv[2], float(sys.argv[3])
import mpool
pool = mpool.Pool(mpool.PoolConfig(weights="auto" if kind == "fast" else kind))
compute = "float32-fast" if kind == "fast" else "float32"

def anonymous():
    lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(lines["Anonymous"].split()[0]) / 1024

def rss():
    return next(int(line.split()[1]) * 1024 / 1e6 for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
TURN = {"encoder": START + """
first = pool.embed("A short first text.", folder, compute=compute)
found = {"first result s": time.monotonic() - started, "anonymous MB after it": anonymous()}
word, at = "window ", 0
digest = hashlib.sha256(first.tobytes())
for count in json.loads(sys.argv[4]):
    times = []
    for turn in range(4):
        at += count
        texts = [f"{number} " + word * 125 for number in range(at, at + count)]
        begin = time.perf_counter()
        vectors = pool.embed(texts, folder, compute=compute)
        times.append(time.perf_counter() - begin)
        digest.update(vectors.tobytes())
    found[f"{count} texts: texts/s"] = count / statistics.median(times[1:])
found["anonymous MB at the end"] = anonymous()
found["weights"] = pool.ps()[0].weights
print(json.dumps([found, digest.hexdigest(), rss()]))
""", "decoder": START + """
def run(ids, count):
    done = pool.generate(ids, folder, compute=compute, max_tokens=count, temperature=0, ignore_eos=True)
    digest.update(done.text.encode())
    return done

digest = hashlib.sha256()
run([1037, 2460, 2034, 3793], 1)
found = {"first result s": time.monotonic() - started, "anonymous MB after it": anonymous()}
chance = random.Random(1)
for length in json.loads(sys.argv[4]):
    done = [run([chance.randrange(1000, 30000) for _ in range(length)], 9) for _ in range(4)][1:]
    found[f"{length} tokens: tokens/s"] = length / statistics.median(one.timings.prompt for one in done)
    found[f"decode after {length}: tokens/s"] = 8 / statistics.median(one.timings.generation for one in done)
found["anonymous MB at the end"] = anonymous()
found["weights"] = pool.ps()[0].weights
print(json.dumps([found, digest.hexdigest(), rss()]))
"""}


def read_seconds(path: Path) -> float:
    """Return the seconds in which one thread reads the file; the second time, when the page cache has it."""
    for _ in range(2):
        begin = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    return time.perf_counter() - begin


def one_turn(role: str, folder: Path, kind: str, sizes: tuple[int, ...]) -> list[Any]:
    """Measure a kind in a process of its own. Returns the measures, the digest of the results, and the peak MB."""
    done = subprocess.run([sys.executable, "-c", TURN[role], str(folder), kind, str(time.monotonic()),
                           json.dumps(sizes)], capture_output=True, text=True, check=True, cwd="/")
    found: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Run the command line."""
    parser = parser_of("mapped", __doc__)
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("--decoder", action="store_true", help="measure a decoder (default: an encoder)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    add_json(parser)
    parser.add_argument("--maker", type=found_here, default=sys.executable,
                        help="interpreter that writes the model (default: this one)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    weights = folder / "model.safetensors"
    role, sizes = ("decoder", PROMPTS) if arguments.decoder else ("encoder", LISTS)
    if not weights.exists():
        from mpool.models import load_catalogue, resolve

        folder.mkdir(parents=True, exist_ok=True)
        source = Path(resolve(load_catalogue().default("text_embedding").key).path)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            if (source / name).exists():
                shutil.copy(source / name, folder)
        subprocess.run([arguments.maker, "-c", MAKE[role], str(folder)], check=True)
    size, read = weights.stat().st_size, read_seconds(weights)
    print(f"{size / 1e6:.0f} MB, read in {read:.2f} s ({size / read / 1e9:.1f} GB/s), limit for the first result "
          f"{0.25 + 1.5 * read:.2f} s; load {os.getloadavg()}")
    recorder = Recorder("mapped", len(os.sched_getaffinity(0)), role=role, sizes=sizes, rounds=arguments.rounds)
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    digests = set()
    for number in range(arguments.rounds):
        for kind in KINDS[number % 4:] + KINDS[:number % 4]:
            (found, digest, memory), frame = recorder.measure(functools.partial(one_turn, role, folder, kind, sizes))
            turns[kind].append(found)
            recorder.add(role, "mpool" if kind == "auto" else f"mpool:{kind}", number,
                         {name: value for name, value in found.items() if name != "weights"}, frame, memory)
            if kind != "fast":
                digests.add(digest)
    for kind, found in turns.items():
        print(kind, {name: [round(turn[name], 2) if isinstance(turn[name], float) else turn[name] for turn in found]
                     for name in found[0]})
    for name in (name for name in turns["packed"][0] if name.endswith("/s")):
        for kind in ("mapped", "fast"):
            ratio = statistics.median(a[name] / b[name] for a, b in zip(turns[kind], turns["packed"]))
            print(f"{name}: {kind} over packed {ratio:.2f}")
    print(f"digests of the results of packed, mapped and auto: {len(digests)}; load {os.getloadavg()}")
    if arguments.json:
        recorder.add_weights("model", weights)
        recorder.write(arguments.json, **{"different results of packed, mapped and auto": {"mpool": len(digests)}})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
