#!/usr/bin/env python3
"""Measure how far embeddings in a compute type are from those in float32: the rows of docs/models/formats.md.

    python tests/parity/text/measure_compute.py all-MiniLM-L6-v2 [MORE MODELS] [--compute bfloat16 int8]

Prints the lowest cosine over 300 sentences of random words, and over hard inputs: 100 words repeated 1,000 times each
(cut to the model's maximum length), one token, special tokens, one character repeated.
"""

import argparse
import random

import numpy as np

import mpool

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea kid body information back parent
face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education finance ocean""".split()


def sentences(count: int, seed: int = 7) -> list[str]:
    """Return texts of 4 to 60 random words."""
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(4, 60))) for _ in range(count)]


def hard() -> list[str]:
    """Return the texts that lose most: all their tokens are rounded alike."""
    return [*(" ".join([word] * 1000) for word in WORDS[:100]), "a", "[CLS] [SEP] " * 50, "!" * 1000, "\n" * 50,
            "7 " * 1000]


def lowest(model: str, texts: list[str], compute: str) -> float:
    """Return the lowest cosine of a text's vector to its vector in float32."""
    exact, near = (mpool.embed(texts, model, compute=kind).astype(np.float64) for kind in ("float32", compute))
    return float(((exact * near).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(near, axis=1)).min())


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+")
    parser.add_argument("--compute", nargs="+", default=["bfloat16", "int8"])
    arguments = parser.parse_args()
    for model in arguments.model:
        cells = [f"{kind}: sentences {lowest(model, sentences(300), kind):.6f}, hard {lowest(model, hard(), kind):.6f}"
                 for kind in arguments.compute]
        print(f"{model}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
