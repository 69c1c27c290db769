"""``python -m benchmarks masks``: what it costs that answers have a given form (``response_format``).

The same prompts with a form and without, in turns, each answer of as many tokens as the form let the model write.
Printed are medians over rounds: microseconds a token that the form takes more, as the caller sees it, and CPU time of
the thread that makes masks, of which most passes while the next token is computed.

What others used of the CPUs is printed beside the figures: of a machine that others use they say little.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from .probe import Watch
from .timing import spread

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags", "address"],
          "properties": {
    "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 5, "maxItems": 12},
    "address": {"type": "object", "additionalProperties": False, "required": ["street", "city"],
                "properties": {"street": {"type": "string", "maxLength": 60}, "city": {"type": "string"}}}}}
FORMS: dict[str, Any] = {
    "any JSON": {"type": "array", "minItems": 12}, "a schema": PERSON,
    "an expression": {"type": "regex", "regex": "[A-Za-z ,]{20,400}"}}


def _used() -> float:
    """Seconds of CPU time of the threads that make masks."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate()
               if thread.name == "mpool-masks" and thread.ident is not None)


def main() -> int:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks masks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most (default: %(default)s)")
    args = parser.parse_args()

    import mpool

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMS}
    with Watch() as watch, mpool.Pool(mpool.PoolConfig(threads=args.threads)) as pool:
        model = pool.load(args.model)

        def run(turn: int, **options: Any) -> tuple[float, int]:
            """Seconds a step after the first, one a token and one for an end that the model wrote, and tokens."""
            done = pool.generate(f"Write about person {turn}.", model, temperature=1.0, seed=turn, **options)
            tokens = done.usage.completion_tokens
            return done.timings.generation / max(1, tokens - 1 + (done.finish_reason == "stop")), tokens

        for turn in range(args.rounds + 1):
            for name, form in FORMS.items():
                before = _used()
                masked, tokens = run(turn, response_format=form, max_tokens=args.tokens)
                used = (_used() - before) / tokens
                plain, _ = run(turn, max_tokens=tokens, ignore_eos=True)
                if turn:
                    found[name].append((plain * 1e6, (masked - plain) * 1e6, used * 1e6))
    print(f"{watch.said()}; {args.rounds} rounds; microseconds a token, medians of rounds (least to most)")
    print(f"{'':16}{'without':>24}{'more':>24}{'CPU of the masks':>24}")
    for name, rows in found.items():
        cells = [spread(column) for column in zip(*rows)]
        print(f"{name:16}" + "".join(f"{cell:>24}" for cell in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
