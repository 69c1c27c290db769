"""``python -m benchmarks masks``: overhead of structured output (``response_format``).

Generates from the same prompts in turns, with and without a response format. Both completions have the same number of
tokens: as many as the format let the model generate. Prints medians over rounds: the extra microseconds per token as
the caller sees them, and the CPU time per token of the thread that computes masks. Most of that CPU time overlaps with
the forward pass of the next token.

The CPU share of other processes is printed with the figures: on a machine in use by others they mean little.
"""

import threading
import time
from typing import Any

from .options import add_threads, parser_of
from .probe import Watch
from .timing import spread

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags", "address"],
          "properties": {
    "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 5, "maxItems": 12},
    "address": {"type": "object", "additionalProperties": False, "required": ["street", "city"],
                "properties": {"street": {"type": "string", "maxLength": 60}, "city": {"type": "string"}}}}}
FORMATS: dict[str, Any] = {
    "any JSON": {"type": "array", "minItems": 12}, "a schema": PERSON,
    "an expression": {"type": "regex", "regex": "[A-Za-z ,]{20,400}"}}


def _used() -> float:
    """Return the CPU seconds of the threads that compute masks."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate()
               if thread.name == "mpool-masks" and thread.ident is not None)


def main() -> int:
    """Run the command line."""
    parser = parser_of("masks", __doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="language model (default: %(default)s)")
    add_threads(parser, 2)
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of a completion (default: %(default)s)")
    args = parser.parse_args()

    import mpool

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMATS}
    with Watch() as watch, mpool.Pool(mpool.PoolConfig(threads=args.threads)) as pool:
        model = pool.load(args.model)

        def run(turn: int, **options: Any) -> tuple[float, int]:
            """Return the decode seconds per step after the first, and the number of tokens. A step makes one token, or
            the end that the model generated.
            """
            done = pool.generate(f"Write about person {turn}.", model, temperature=1.0, seed=turn, **options)
            tokens = done.usage.completion_tokens
            return done.timings.generation / max(1, tokens - 1 + (done.finish_reason == "stop")), tokens

        for turn in range(args.rounds + 1):
            for name, response_format in FORMATS.items():
                before = _used()
                masked, tokens = run(turn, response_format=response_format, max_tokens=args.tokens)
                used = (_used() - before) / tokens
                plain, _ = run(turn, max_tokens=tokens, ignore_eos=True)
                if turn:
                    found[name].append((plain * 1e6, (masked - plain) * 1e6, used * 1e6))
    print(f"{watch.describe()}; {args.rounds} rounds; microseconds per token, medians of rounds (min to max)")
    print(f"{'':16}{'without format':>24}{'extra':>24}{'CPU of the masks':>24}")
    for name, rows in found.items():
        cells = [spread(column) for column in zip(*rows)]
        print(f"{name:16}" + "".join(f"{cell:>24}" for cell in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
