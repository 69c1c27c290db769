"""Completions that cannot have been prepared: the prompt contains the current time and a random word."""

import random
import time
from pathlib import Path
from typing import Any

import mpool
import pytest
from defaultmodels import SMOLLM2
from realmodels import find_real
from workers import run, text_of, working
from haiku import SHOWN

ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen").split()
TENS = ("", "", "twenty", "thirty", "forty", "fifty")
WORDS = ("lantern river copper maple thunder velvet harbor meadow candle orchid falcon marble willow pepper silver "
         "walnut anchor basket cherry engine forest garden hammer island jacket kitten ladder mirror needle").split()


def in_words(minute: int) -> str:
    """Return a number below 60 in words."""
    if minute < 20:
        return ONES[minute]
    return TENS[minute // 10] + (f"-{ONES[minute % 10]}" if minute % 10 else "")


@pytest.mark.slow
def test_haiku_generation_anti_cheat(tmp_path: Path) -> None:
    """Three haiku, each with the current minute in words and a random word. The library, a repetition, and two worker
    servers, one of which captures layer outputs, give the same text.

    Measured rates of completions that contain both minute and word, for SmolLM2-135M-Instruct (Q4_1) and 30 pairs each:
    2 of 30 with a plain request for a haiku (greedy or at temperature 0.7), 8 of 30 in its chat format; after the two
    haiku of the prompt (haiku.SHOWN) 28 of 30 at temperature 0.7 and 30 of 30 greedily. Of 300 more, over all minutes,
    298 succeeded; both failures had the word "desert", which is not in WORDS. The few-shot prompt therefore suffices
    without a larger model. Two of the three haiku must contain their pair, which allows for one rare failure.
    """
    found = find_real("smollm2")
    ref = SMOLLM2 if found is None else str(found)  # without the weights this fails with a hint how to get them
    held = 0
    model = mpool.get(ref)  # in the default pool, independent of the workers' pools
    captured = mpool.debug.capture(tmp_path / "jobs")
    with working(f"haiku={ref}") as plain, working(f"haiku={ref}", capture=captured) as capturing:
        for number, word in enumerate(random.SystemRandom().sample(WORDS, 3)):
            minute = in_words(time.localtime().tm_min)
            prompt = SHOWN.format(minute, word)
            greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "stop": ["\n\n"]}
            done = model.generate(prompt, **greedy)
            lower = done.text.lower()
            held += minute in lower and word in lower
            assert "\ufffd" not in done.text and done.text.isascii() and len(done.text.split()) >= 5, done.text
            assert sum(char.isalpha() or char.isspace() for char in done.text) > 0.8 * len(done.text), done.text
            for worker in (plain, capturing):
                live = run(worker.serving, job_id=f"greedy{number}", prompt=prompt, **greedy)
                assert text_of(live) == done.text and live[-1][1]["tokens_out"] == done.usage.completion_tokens

            sampled: dict[str, Any] = {"temperature": 0.9, "seed": random.getrandbits(60), "max_tokens": 40}
            first, again = (model.generate(prompt, logprobs=True, **sampled) for _ in range(2))
            tokens = [[token.token_id for token in result.logprobs or ()] for result in (first, again)]
            assert tokens[0] == tokens[1] and len(tokens[0]) == first.usage.completion_tokens > 0
            for worker in (plain, capturing):
                live = run(worker.serving, job_id=f"sampled{number}", prompt=prompt, **sampled)
                assert text_of(live) == first.text and live[-1][1]["tokens_out"] == len(tokens[0])
                if first.text.isascii():  # otherwise tokens that are parts of a character are sent together
                    assert [(data["t"], data["i"]) for name, data in live if name == "token"] == [
                        (token.token, at) for at, token in enumerate(first.logprobs or ()) if token.token]
        assert captured.flush(60) and (captured.written, captured.failed) == (6, 0)
    assert held >= 2, "the completions do not contain the minute and the word of their prompts"
