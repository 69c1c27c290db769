"""``python -m benchmarks drafts``: decoding with a draft model, compared with the same model without one.

One process holds the model twice, with and without the draft model. Both complete the same prompts in turns, code and
prose; the first turn of each is not counted. Prints tokens/s (medians over prompts and rounds), the ratio of each pair,
and whether all completions were the same. Speculation by look-up is on in both, unless MPOOL_SPECULATION is 0.

``--cpu`` divides by the CPU time of the process instead of the time of decoding: for a machine in use by others, with
one thread. It includes the prompt. With ``--json``, the prompts of a kind in a round are a turn of each model; the two
share their probes and the memory of the process.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from .options import add_json, add_threads, parser_of
from .probe import Watch
from .record import Recorder

CODE = (
    "Write a Python class for a binary search tree with insert, delete, find and in-order iteration.",
    "Write a Python function that parses a CSV file without the csv module, with quoted fields and tests.",
    "Write a C function that sorts a linked list with merge sort, and a main function that shows it.",
    "Write a Python dataclass for a 3-D vector with all arithmetic operators, length, dot and cross product.",
    "Write a JavaScript function that debounces another function, with comments and three usage examples.",
)
PROSE = (
    "Tell me a story about a fox who plays the piano in a small harbour town.",
    "Describe a walk through an old forest in autumn, in long sentences.",
    "Explain why the Roman Republic became an empire.",
    "Write a letter from a lighthouse keeper to his sister about the winter.",
    "What makes a good friendship? Write a short essay.",
)


def main() -> int:
    """Run the command line."""
    parser = parser_of("drafts", __doc__)
    parser.add_argument("--model", default="Qwen2.5-Coder-1.5B-Instruct", help="model (default: %(default)s)")
    parser.add_argument("--draft", default="Qwen2.5-Coder-0.5B-Instruct", help="draft model (default: %(default)s)")
    add_threads(parser, 2)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU time of the process")
    add_json(parser)
    args = parser.parse_args()

    import mpool

    recorder = Recorder("drafts", args.threads, model=os.path.basename(args.model),
                        draft=os.path.basename(args.draft), rounds=args.rounds,
                        tokens=args.tokens, temperature=args.temperature, cpu=args.cpu)
    config = mpool.PoolConfig(threads=args.threads, max_workers_per_model=1)
    with Watch() as watch, mpool.Pool(config) as pool:
        plain = pool.register("plain", args.model)
        drafted = pool.register("drafted", args.model, draft=args.draft)

        def run(model: Any, prompt: str, seed: int) -> tuple[float, str]:
            """Return the tokens/s of a completion after its first token, and its text."""
            start = time.process_time()
            done = pool.chat([{"role": "user", "content": prompt}], model, max_tokens=args.tokens,
                             temperature=args.temperature, seed=seed, ignore_eos=True)
            seconds = time.process_time() - start if args.cpu else done.timings.generation
            return (done.usage.completion_tokens - 1) / seconds, done.text

        for model in (plain, drafted):
            run(model, "Count to ten.", 0)
        same = True
        for name, prompts in (("code", CODE), ("prose", PROSE)):
            before, speeds, ratios = pool.metrics(), ([], []), []  # type: ignore[var-annotated]

            def one_round(turn: int, prompts: Sequence[str] = prompts) -> list[tuple[tuple[float, str], ...]]:
                """Complete each prompt with both models. Returns speed and text without and with the draft model."""
                pairs = []
                for number, prompt in enumerate(prompts):
                    order = (plain, drafted) if (turn + number) % 2 else (drafted, plain)
                    found = {id(model): run(model, prompt, turn) for model in order}
                    pairs.append((found[id(plain)], found[id(drafted)]))
                return pairs

            for turn in range(args.rounds):
                pairs, frame = recorder.measure(functools.partial(one_round, turn))
                same &= all(one[1] == other[1] for one, other in pairs)
                ratios += [other[0] / one[0] for one, other in pairs]
                for at, engine in enumerate(("mpool", "mpool:draft")):
                    speeds[at].extend(pair[at][0] for pair in pairs)
                    recorder.add(name, engine, turn,
                                 {"decode tokens/s": statistics.median(pair[at][0] for pair in pairs)}, frame)
            after = pool.metrics()
            checked, right = (after[key] - before[key] for key in ("draft_tokens", "accepted_draft_tokens"))
            print(f"{name:6} without {statistics.median(speeds[0]):6.1f}  with {statistics.median(speeds[1]):6.1f} "
                  f"tokens/s  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, "
                  f"n={len(ratios)})  {right} of {checked} draft tokens accepted (both)", flush=True)
        print("all completions were the same" if same else "COMPLETIONS DIFFER")
    print(watch.describe())
    if args.json:
        from mpool.models import resolve

        for kind in ("model", "draft"):
            recorder.add_weights(kind, resolve(getattr(args, kind)).path)
        recorder.write(args.json, **{"completions are the same": {"mpool:draft": same}})
    return 0 if same else 1
