"""Models whose layers have states: their prefixes are reused without a different byte."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import os
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mpool

import adapterfiles
import servers
import soak
import statechats
import tinymodels
import toolmodels

#: Seeded checkpoints with a state, and templates. Qwen3.5's drops reasoning up to the last question.
MODELS = {"lfm3": toolmodels.HERMES, "qwen3_5": toolmodels.QWEN3_5}
#: Requests of each thread of a storm.
ROUNDS = os.environ.get("MPOOL_STORM") or "150"
EDITS = (11, 22, 33, 44, 55)


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = getattr(tinymodels, request.param)(tmp_path / request.param)
    return statechats.write_template(model, MODELS[request.param])


def test_sixty_turns(folder: Path) -> None:
    """A chat of sixty turns with tools, edited in its middle five times, has the bytes of a run without any cache."""
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        played = list(statechats.play(statechats.chat(3, 60, EDITS), statechats.sender(pool, str(folder))))
    turns = [turn for turn, _ in played]
    assert [statechats.result(completion) for _, completion in played] == statechats.without_cache(folder, turns)
    prompts, cached = (sum(getattr(completion.usage, name) for _, completion in played)
                       for name in ("prompt_tokens", "cached_tokens"))
    assert cached > 0.8 * prompts


@pytest.mark.slow
def test_interleaved_chats_of_a_server(folder: Path) -> None:
    """Four chats at once through `mpool serve` have the texts and log probabilities of a run without any cache."""
    def play(port: int, seed: int) -> list[tuple[statechats.Turn, Any]]:
        def send(turn: statechats.Turn) -> tuple[Any, dict[str, Any]]:
            options = {key: value for key, value in turn.options.items() if key != "timeout" and value is not None}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions", headers={"Content-Type": "application/json"},
                data=json.dumps({"model": folder.name, "messages": turn.messages, **options}).encode())
            with urllib.request.urlopen(request, timeout=120) as response:
                body = json.load(response)
            message = body["choices"][0]["message"]
            return body, {"content": message["content"] or "", "reasoning": message.get("reasoning_content")}
        return list(statechats.play(statechats.chat(seed, 40, EDITS), send))

    with servers.Process("serve", str(folder)) as server, concurrent.futures.ThreadPoolExecutor(4) as threads:
        played = list(threads.map(lambda seed: play(server.port, seed), range(4)))
    for one in played:
        got = [[[choice["message"]["content"] or "", [token["logprob"] for token in choice["logprobs"]["content"]]]
                for choice in body["choices"]] for _, body in one]
        expected = statechats.without_cache(folder, [turn for turn, _ in one])
        assert got == [[[choice[0], [token[1] for token in choice[4]]] for choice in choices[:-1]]
                       for choices in expected]
        usage = [body["usage"] for _, body in one]
        assert sum(row["prompt_tokens_details"]["cached_tokens"] for row in usage) > (
            0.6 * sum(row["prompt_tokens"] for row in usage))


@pytest.mark.slow
def test_memory_is_flat_over_5000_turns(folder: Path) -> None:
    def held(pool: mpool.Pool) -> int:
        pool.unload(str(folder))
        gc.collect()
        return sum(pool.registry.stats()["bytes_by_tag"].values())

    with mpool.Pool(mpool.PoolConfig(offline=True, memory_bytes=64 << 20)) as pool:
        send, resident = statechats.sender(pool, str(folder)), []
        send(next(statechats.chat(0, 1, ())))
        before = held(pool)
        for seed in range(84):
            for _ in statechats.play(statechats.chat(seed, 60, EDITS), send):
                pass
            resident.append(soak.resident())
        after = held(pool)
    assert max(resident[63:]) <= max(resident[21:42]) * 1.02 + (2 << 20), resident
    assert after - before < 1 << 14


@pytest.mark.slow
def test_a_storm_of_requests(folder: Path) -> None:
    """Threads send turns of several chats, with and without adapters, tenants and formats, in little memory; they stop
    and cancel some. Each completed request has the bytes of a run without any cache, and none is lost."""
    for seed, name in enumerate(("one", "two")):
        matrices = adapterfiles.matrices(folder, 4, seed, ("q_proj", "w1"), size=0.4)
        adapterfiles.save_peft(Path(f"{folder}-adapters") / name, matrices, 9.0)
    turns = []
    for seed in range(4):
        for turn, _ in statechats.play(statechats.chat(seed % 2, 14, (6, 11)), lambda turn: (
                None, {"content": "the quick fox", "reasoning": "a cat sat"})):
            at = len(turns)
            more = {"adapter": (None, "one", "two")[at % 3], "tenant": (None, "alice")[at % 5 // 4],
                    "response_format": {"type": "json_object"} if at % 7 == 3 else None}
            turns.append(replace(turn, options={**turn.options, **more}))
    counts, *expected = statechats.child(folder, "storm", turns, MPOOL_SPECULATION="2", MPOOL_STORM=ROUNDS)
    assert expected == statechats.without_cache(folder, turns)
    assert counts["wrong"] == counts["still"] == 0, counts
    assert sum(counts[ended] for ended in counts if ended not in ("wrong", "still")) == (
        statechats.THREADS * int(ROUNDS)), counts
    assert counts["completed"] > 100, counts
