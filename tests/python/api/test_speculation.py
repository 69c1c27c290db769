"""Speculation: draft tokens change the time that a completion takes and nothing else. Also: concurrent streams share
each pass over the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from realmodels import real_path

STORY = ("The harbour of Lindholm lies at the mouth of the river Aale. Every morning at six the ferry Margarete leaves "
         "for the island, carrying milk, letters and the two teachers of the school. In winter the channel freezes, "
         "and the icebreaker Thor opens a path that is eleven metres wide. ")
CODE = ("def area(shape):\n    if shape.kind == \"circle\":\n        return 3.14159 * shape.radius ** 2\n"
        "    return shape.side ** 2\n")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("Repeat the following text word for word:\n\n" + STORY, {"temperature": 0}),
    ("Repeat the following text word for word:\n\n" + STORY, {"temperature": 0.7, "seed": 3, "top_p": 0.9, "n": 2}),
    ("Here is a Python function:\n\n" + CODE + "\nAdd type hints and print the whole function again.",
     {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.1}),
    ("Here is a Python function:\n\n" + CODE + "\nPrint it again.",
     {"temperature": 0, "stop": ["shape.radius", "Thor"]}),
    ("Write about a fox who plays the piano.", {"temperature": 1.0, "seed": 5, "top_k": 40}),
]
PROGRAM = """
import json, sys
import mpool
calls, tokens, results = json.loads(sys.argv[2]), int(sys.argv[3]), []
with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
    for prompt, options in calls:
        options = {**options, "max_tokens": tokens, "logprobs": True, "top_logprobs": 3}
        done = pool.chat([{"role": "user", "content": prompt}], sys.argv[1], **options)
        results.append(repr(done.choices))
    found = pool.metrics()
    jobs = [pool.submit("text_to_text", messages=[{"role": "user", "content": prompt}], model=sys.argv[1],
                        **{**options, "max_tokens": tokens}) for prompt, options in calls]
    results += [repr([choice.text for choice in job.result().choices]) for job in jobs]
names = "passes", "rows", "draft_tokens", "accepted_draft_tokens"
print(json.dumps([results, {name: found[name] for name in names}]))
"""


def run(model: Path, ways: str, tokens: int) -> tuple[list[str], dict[str, int]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(model), json.dumps(CALLS), str(tokens)],
                          capture_output=True, text=True, timeout=600, env={**os.environ, "MPOOL_SPECULATION": ways})
    assert done.returncode == 0, done.stderr[-2000:]
    results, counts = json.loads(done.stdout)
    return results, counts


def check(model: Path, tokens: int) -> None:
    without, none = run(model, "0", tokens)
    always, most = run(model, "2", tokens)
    where_it_pays, some = run(model, "1", tokens)
    assert always == without and where_it_pays == without
    assert none["draft_tokens"] == none["accepted_draft_tokens"] == 0
    assert most["draft_tokens"] > most["accepted_draft_tokens"] > 50
    # Measured times decide how often automatic speculation drafts, if at all.
    assert some["accepted_draft_tokens"] <= some["draft_tokens"] <= most["draft_tokens"]
    # An accepted draft token saves at most one pass. At least half of them do (3 of 4 when this was written). All
    # counts are of the requests that ran alone.
    for found in (most, some):
        accepted = found["accepted_draft_tokens"]
        assert none["passes"] - accepted <= found["passes"] <= none["passes"] - accepted // 2


@pytest.mark.slow
def test_speculation_does_not_change_completions() -> None:
    check(real_path("smollm2"), 64)


@pytest.mark.slow
def test_speculation_does_not_change_completions_of_a_larger_model() -> None:
    check(real_path("qwen05"), 80)


def test_eight_chats_share_passes(llama: Path) -> None:
    """The metrics show shared passes. tests/c/test_models_streams.c checks steps and passes in detail."""
    tokens = 120
    for _ in range(5):  # on a busy machine, a request may end before this thread submits the next one
        with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
            # The first request loads the model; the others are in the queue when the model is ready.
            jobs = [pool.submit("text_to_text", model=llama, messages=[{"role": "user", "content": f"Chat {number}?"}],
                                max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True)
                    for number in range(8)]
            done = [job.result() for job in jobs]
            found = pool.metrics()
        assert [one.usage.completion_tokens for one in done] == [tokens] * 8
        assert found["passes"] == found["steps"]
        if found["passes"] < 4 * tokens:  # in sequence: 8 * 120 passes
            break
    assert found["passes"] < 4 * tokens
    assert found["rows"] >= 8 * (tokens - 1) + sum(one.usage.prompt_tokens - one.usage.cached_tokens for one in done)
