"""``python -m benchmarks adapters``: requests with a low-rank adapter, compared with the same requests without one.

The adapter has random values and updates every linear layer of the blocks, or ``--layers``. One process holds the model
with it. Each turn runs the same texts with and without the adapter, one after the other. Encoders: lists of texts of
10 and of 33 words. Decoders: streams at the same time, with the rate of all their tokens after the first of each.

``--cpu`` divides by the CPU time of the process instead of the time of the clock: for a machine in use by others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .options import add_json, add_threads, parser_of
from .probe import Watch
from .record import Recorder
from .texts import same
from .timing import together

LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
#: Texts of a list, words of a text, and tokens that a stream generates.
LISTS, LENGTHS, TOKENS = 40, (10, 33), 32


def write_adapter(path: Path, ref: str, rank: int, layers: Sequence[str]) -> None:
    """Write a GGUF adapter of random values for the model ``ref``, as llama.cpp's convert_lora_to_gguf.py does."""
    import gguf

    from mpool.models.describing import describe

    spec, random = describe(ref).spec, np.random.default_rng(rank)
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in spec.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[2] in layers and parts[3] == "weight":
            outputs, inputs = tensor.shape
            for side, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                writer.add_tensor(f"{tensor.name}.lora_{side}",
                                  random.normal(0, 0.3 * shape[1] ** -0.5, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoding(pool: Any, model: Any, rows: int, words: int) -> Callable[[int, str | None], float]:
    """Return a function that embeds lists of ``rows`` texts, and returns how many texts."""
    def run(turn: int, adapter: str | None) -> float:
        texts = same(rows * LISTS, words, turn)
        for at in range(0, len(texts), rows):
            pool.embed(texts[at:at + rows], model, adapter=adapter)
        return len(texts)

    return run


def decoding(pool: Any, model: Any, rows: int) -> Callable[[int, str | None], float]:
    """Return a function that generates in ``rows`` streams at the same time, and returns how many tokens."""
    def run(turn: int, adapter: str | None) -> float:
        prompts, found = same(rows, 20, turn), [0] * rows

        def one(number: int) -> None:
            done = pool.generate(prompts[number], model, max_tokens=TOKENS, temperature=0, ignore_eos=True,
                                 adapter=adapter)
            found[number] = done.usage.completion_tokens

        together(rows, one)
        return sum(found)

    return run


def main() -> int:
    """Run the command line."""
    parser = parser_of("adapters", __doc__)
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="encoder or decoder (default: %(default)s)")
    parser.add_argument("--compute", default="auto", help="compute type of the model (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of each update (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="texts of a list, or streams (default: %(default)s)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS, help="updated layers (default: all)")
    add_threads(parser, 1)
    parser.add_argument("--turns", type=int, default=11, help="number of turns (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU time of the process")
    add_json(parser)
    args = parser.parse_args()

    os.environ["MPOOL_SPECULATION"] = "0"  # accepted drafts would change how many rows a pass has
    import mpool

    recorder = Recorder("adapters", args.threads, model=os.path.basename(args.model), compute=args.compute,
                        rank=args.rank, rows=args.rows, layers=list(args.layers), cpu=args.cpu)
    clock = time.process_time if args.cpu else time.perf_counter
    config = mpool.PoolConfig(threads=args.threads, max_workers_per_model=1)
    with tempfile.TemporaryDirectory() as folder, Watch() as watch, mpool.Pool(config) as pool:
        path = Path(folder) / "adapter.gguf"
        write_adapter(path, args.model, args.rank, args.layers)
        model = pool.load(args.model, compute=args.compute, adapters={"random": path})
        topics = ({f"{args.rows} streams": ("tokens/s", decoding(pool, model, args.rows))}
                  if model.capability == "text_to_text" else
                  {f"{args.rows} texts of {words} words": ("texts/s", encoding(pool, model, args.rows, words))
                   for words in LENGTHS})
        for topic, (unit, run) in topics.items():
            engines = (("mpool", None), ("mpool:adapter", "random"))
            rates: tuple[list[float], list[float]] = ([], [])
            ratios: list[float] = []
            for _, adapter in engines:
                run(args.turns, adapter)  # not counted
            for turn in range(args.turns):

                def measured(turn: int = turn, run: Callable[[int, str | None], float] = run) -> dict[int, float]:
                    found = {}
                    for at in (0, 1) if turn % 2 else (1, 0):
                        begin = clock()
                        found[at] = run(turn, engines[at][1]) / (clock() - begin)
                    return found

                found, frame = recorder.measure(measured)
                ratios.append(found[0] / found[1])
                for at, (engine, _) in enumerate(engines):
                    rates[at].append(found[at])
                    recorder.add(topic, engine, turn, {unit: found[at]}, frame)
            print(f"{topic:22} without {statistics.median(rates[0]):8.1f}  with {statistics.median(rates[1]):8.1f} "
                  f"{unit}  time with / without {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
                  f"{max(ratios):.3f}, n={len(ratios)}), best by best {max(rates[0]) / max(rates[1]):.3f}", flush=True)
    print(watch.describe())
    if args.json:
        from mpool.models import resolve

        recorder.add_weights("model", resolve(args.model).path)
        recorder.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
