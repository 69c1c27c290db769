"""``python -m benchmarks contexts MODEL``: prompts and decoding by the length of the context.

For each length, in one process: the rate of the whole prompt, without its last 512 tokens; the rate of these 512, after
the others (whose keys and values are cached); and the rate of decoding after all of them. The share of memory is the
bytes that a token reads, weights (``--bytes``) and cached keys and values, times its rate, over the rate at which two
threads read memory in the probes around the prompt. With ``--json``, every prompt is a turn of the record.
"""

import functools
import json
import os
import random
import statistics
from typing import Any

from .options import add_json, add_threads, parser_of
from .probe import Watch
from .record import Recorder

LAST = 512
#: Ids of prompts: ordinary tokens of any large vocabulary.
TOKENS = (1000, 30_000)


def cache_bytes(path: str, kv_dtype: str) -> float:
    """Return the bytes of keys and values that a token adds, for a GGUF file whose layers all have full attention."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    name = fields["general.architecture"].contents()

    def number(key: str) -> int:
        return int(fields[f"{name}.{key}"].contents())

    head = number("attention.key_length") + number("attention.value_length")
    components = number("block_count") * number("attention.head_count_kv") * head
    return components * (1 if kv_dtype == "int8" else 2)


def measure(model: Any, length: int, tokens: int, seed: int) -> dict[str, float]:
    """Return the rates of one prompt of random tokens, in tokens per second."""
    chance = random.Random(1000 * length + seed)  # the prefix cache serves no prompt
    prompt = [chance.randrange(*TOKENS) for _ in range(length)]

    def run(ids: list[int], count: int) -> Any:
        return model.generate(ids, max_tokens=count, temperature=0, ignore_eos=True, timeout=7200)

    found = {}
    if length > LAST:
        found["prompt"] = (length - LAST) / run(prompt[:-LAST], 1).timings.prompt
    done = run(prompt, 1 + tokens)
    fresh = done.usage.prompt_tokens - done.usage.cached_tokens
    found["last 512"] = fresh / done.timings.prompt
    found["decode"] = tokens / done.timings.generation
    return found


def main() -> int:
    """Run the command line."""
    parser = parser_of("contexts", __doc__)
    parser.add_argument("model", help="GGUF file whose layers all have full attention")
    parser.add_argument("--bytes", type=float, required=True, help="bytes of weights that a token reads")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192, 32_768],
                        help="tokens of the context (default: %(default)s)")
    parser.add_argument("--kv", choices=("auto", "int8"), default="auto", help="type of keys and values")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="prompts for each length (default: %(default)s)")
    add_threads(parser)
    add_json(parser)
    args = parser.parse_args()

    os.environ["MPOOL_SPECULATION"] = "0"  # the model may repeat itself, and drafts would then be right
    import mpool

    recorder = Recorder("contexts", args.threads, lengths=args.lengths, kv=args.kv, tokens=args.tokens,
                        turns=args.turns, bytes=args.bytes)
    each = cache_bytes(args.model, args.kv)
    with Watch() as watch, mpool.Pool(mpool.PoolConfig(threads=args.threads, max_workers_per_model=1)) as pool:
        model = pool.load(args.model, kv_dtype=args.kv)
        measure(model, 64, 4, 0)
        for length in args.lengths:
            rates, speed = [], 0.0
            for turn in range(args.turns):
                rate, frame = recorder.measure(functools.partial(measure, model, length, args.tokens, turn + 1))
                rates.append(rate)
                speed = max(speed, *(found["read_2"] for found in (frame.before, frame.after) if found), 0.0)
                recorder.add(f"context of {length}, {args.kv}", "mpool", turn,
                             {f"{name} tokens/s": value for name, value in rate.items()}, frame)
            row = {name: round(statistics.median(rate[name] for rate in rates), 1) for name in rates[0]}
            read = args.bytes + each * (length + args.tokens / 2)
            row["share of memory"] = round(row["decode"] * read / 1e9 / speed, 2) if speed else 0.0
            print(json.dumps({"length": length, "kv": args.kv, **row, "read_2": speed}), flush=True)
    print(watch.describe())
    recorder.write(args.json, model=args.model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
