"""``python -m benchmarks turns MODEL``: time until the first token of the second turn of a chat.

The first prompt has ``--length`` random tokens; the second one is the first, its answer, and ``--new`` further tokens.
A model with states (``docs/models/families.md``) is measured with and without snapshots, each in a process of its own,
in turns. Each round has its own prompts.
"""

import functools
import json
import os
import random
import statistics
import subprocess
import sys
from typing import Any

from .contexts import TOKENS
from .options import add_json, add_threads, parser_of
from .record import Recorder

ANSWER = 20


def measure(path: str, length: int, new: int, threads: int, seed: int) -> dict[str, float]:
    """Return the seconds of both prompts, and the tokens of the second one that were computed."""
    import mpool

    chance = random.Random(seed)
    prompt = [chance.randrange(*TOKENS) for _ in range(length)]
    with mpool.Pool(mpool.PoolConfig(threads=threads, max_workers_per_model=1)) as pool:
        model = pool.load(path)
        run = functools.partial(model.generate, temperature=0, ignore_eos=True, timeout=7200)
        run(prompt[:64], max_tokens=1)  # the first use of a model takes longer
        first = run(prompt, max_tokens=ANSWER)
        more = [chance.randrange(*TOKENS) for _ in range(new)]
        second = run([*prompt, *first.token_ids, *more], max_tokens=1)
    return {"first prompt s": first.timings.prompt, "second prompt s": second.timings.prompt,
            "second prompt tokens": second.usage.prompt_tokens - second.usage.cached_tokens}


def apart(percent: int, *task: Any) -> dict[str, float]:
    """Return :func:`measure` of a process with this share of snapshots."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", "turns", "--task", json.dumps(task), "-"],
                          env={**os.environ, "MPOOL_SNAPSHOT_PERCENT": str(percent)}, check=True, text=True,
                          stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Run the command line."""
    parser = parser_of("turns", __doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--length", type=int, default=15_000, help="tokens of the first prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=200, help="new tokens of the second one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="chats of each setting (default: %(default)s)")
    parser.add_argument("--percent", type=int, nargs="+", default=[10, 0],
                        help="values of MPOOL_SNAPSHOT_PERCENT (default: 10 and 0)")
    parser.add_argument("--task", help="for the processes that measure")
    add_threads(parser)
    add_json(parser)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(measure(*json.loads(args.task))))
        return 0
    recorder = Recorder("turns", args.threads, length=args.length, new=args.new, rounds=args.rounds)
    found: dict[int, list[dict[str, float]]] = {percent: [] for percent in args.percent}
    for turn in range(args.rounds):
        for percent in args.percent:
            values, frame = recorder.measure(functools.partial(apart, percent, args.model, args.length, args.new,
                                                               args.threads, turn + 1))
            found[percent].append(values)
            recorder.add(f"snapshots {percent} %", "mpool", turn, values, frame)
    for percent, rows in found.items():
        print(json.dumps({"snapshots": percent, **{name: round(statistics.median(row[name] for row in rows), 2)
                                                   for name in rows[0]}}))
    recorder.write(args.json, model=args.model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
