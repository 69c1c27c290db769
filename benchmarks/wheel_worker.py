"""Process of one build for ``python -m benchmarks wheel``: measures what each line of standard input asks for.

A line is a JSON object. The first one names the model; the others name a work, the number of times that it is done, and
a number that makes its texts or prompts differ from those of other lines. Each is answered by a line with the seconds
and the peak memory. The process ends at the end of standard input.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import engines
import texts
from own_process import rss
from timing import seconds_of

#: Texts of a list, and of a work with single texts.
LIST, SINGLE = 48, 24
#: Tokens of a long and a short prompt; tokens of a completion; sequences that are decoded together.
PROMPT, SHORT, WRITTEN, STREAMS = 512, 16, 32, 8


def encoder_works(engine: Any) -> dict[str, Callable[[int], object]]:
    """Return the works of an encoder: function of a number."""
    def single(number: int) -> None:
        for text in texts.same(SINGLE, 9, number):
            engine.embed([text])

    return {"list": lambda number: engine.embed(texts.mixed(LIST, number)), "single": single}


def decoder_works(engine: Any) -> dict[str, Callable[[int], object]]:
    """Return the works of a decoder. Prompts differ, so that a prefix cache does not help."""
    ids = engine.tokens(texts.prose(6000))

    def prompt(number: int, length: int) -> list[int]:
        at = number * 7 % (len(ids) - PROMPT - STREAMS)
        return [ids[number % len(ids)], *ids[at:at + length - 1]]

    def together(number: int) -> None:
        engine.together([prompt(STREAMS * number + one, SHORT) for one in range(STREAMS)], WRITTEN)

    return {"prompt": lambda number: engine.generate(prompt(number, PROMPT), 1),
            "short prompt": lambda number: engine.generate(prompt(number, SHORT), 1),
            "decode": lambda number: engine.generate(prompt(number, SHORT), WRITTEN), "streams": together}


def main() -> None:
    """Serve standard input."""
    given = json.loads(sys.stdin.readline())
    engine = engines.make(given["kind"], given["engine"], "")
    engine.imports()
    context = () if given["kind"] == "embed" else (PROMPT + WRITTEN,)
    engine.load(given["path"], given["threads"], *context)
    works = encoder_works(engine) if given["kind"] == "embed" else decoder_works(engine)
    print(json.dumps({"works": list(works), "compute": engine.used}), flush=True)
    numbers = itertools.count(1)
    for line in sys.stdin:
        asked = json.loads(line)
        chosen = [next(numbers) for _ in range(asked["times"])]  # both builds count alike
        seconds = seconds_of(lambda: [works[asked["work"]](number) for number in chosen])
        print(json.dumps({"seconds": seconds, "rss MB": rss()}), flush=True)


if __name__ == "__main__":
    main()
