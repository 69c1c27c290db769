"""Chats with a model whose layers have states, for tests that compare a run with prefix caching and snapshots with one
without. ``python statechats.py FOLDER COMMAND`` reads :class:`Turn` s as JSON lines; :func:`child` runs it."""

import collections
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mpool

#: Variables of a process without prefix cache and snapshots.
NO_CACHE = {"MPOOL_PREFIX_PERCENT": "0", "MPOOL_SNAPSHOT_PERCENT": "0"}
WORDS = "The quick brown fox jumps over lazy dogs . A cat sat on the mat , and it barked twice äöü 日本語".split()
TOOLS = [{"type": "function", "function": {
    "name": name, "description": f"Look up the {name} of a place and a day, in plain words.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                   "required": ["city"]}}} for name in ("weather", "traffic")]


def write_template(folder: Path, template: str) -> Path:
    """Give a checkpoint of tinymodels another chat template."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


@dataclass(frozen=True)
class Turn:
    """One turn: the whole chat so far, and the options of its request."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]

    def run(self, pool: mpool.Pool, model: str, **options: Any) -> Any:
        return pool.chat(self.messages, model=model, **self.options, **options)


def result(completion: Any) -> list[Any]:
    """Everything that a caller gets of a completion, but for times: ids, texts, log probabilities."""
    return json.loads(json.dumps([
        [choice.text, choice.token_ids, choice.finish_reason, [call.raw for call in choice.tool_calls or ()],
         [[token.token_id, token.logprob, [[top.token_id, top.logprob] for top in token.top]]
          for token in choice.logprobs or ()]]
        for choice in completion.choices] + [completion.usage.prompt_tokens]))


def chat(seed: int, turns: int, edits: Sequence[int]) -> Generator[Turn, str, None]:
    """Yield the turns of a chat with tools; send each one's reply. Before the turns `edits`, a message in the middle
    changes, or a pair of messages leaves."""
    choose = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(choose.choices(WORDS, k=choose.randint(least, most)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": words(20, 60)}]
    for turn in range(turns):
        if turn in edits:
            middle = len(messages) // 4 * 2 + 1
            if choose.random() < 0.3:
                del messages[middle:middle + 2]
            else:
                messages[middle] = {**messages[middle], "content": words(3, 90)}
        if turn % 4 == 3:
            call = {"id": f"call{turn:05}", "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps({"city": words(1, 2), "days": turn})}}
            messages[-1] = {**messages[-1], "tool_calls": [call]}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": words(4, 40)})
        else:
            messages.append({"role": "user", "content": words(3, 30 if turn % 9 else 160)})
        reply = yield Turn([*messages], {
            "tools": TOOLS, "max_tokens": 4 + turn % 5 * 4, "seed": turn, "temperature": turn % 3 * 0.5,
            "n": 2 if turn % 7 == 5 else 1, "logprobs": True, "top_logprobs": 3, "timeout": 60.0,
            "logit_bias": {"5": 1.5} if turn % 5 == 2 else None})
        messages.append({"role": "assistant", "content": reply})


def play(script: Generator[Turn, str, None], send: Callable[[Turn], tuple[Any, str]]) -> Iterator[tuple[Turn, Any]]:
    """Play a chat; yield turns and responses. `send` returns its response to a turn, and the assistant's reply."""
    turn = next(script)
    while True:
        response, reply = send(turn)
        yield turn, response
        try:
            turn = script.send(reply)
        except StopIteration:
            return


def sender(pool: mpool.Pool, model: str) -> Callable[[Turn], tuple[Any, str]]:
    """Return `send` of :func:`play` for a pool."""
    def send(turn: Turn) -> tuple[Any, str]:
        completion = turn.run(pool, model)
        return completion, completion.text
    return send


def child(folder: Path, command: str, turns: Sequence[Any], **environment: str) -> list[Any]:
    """Run a command of this file with one JSON line for each turn. Returns its lines of output."""
    lines = "".join(json.dumps(asdict(turn)) + "\n" for turn in turns)
    run = subprocess.run([sys.executable, __file__, str(folder), command], input=lines, capture_output=True, text=True,
                         timeout=900, env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def without_cache(folder: Path, turns: Sequence[Turn]) -> list[Any]:
    """Run turns in another process without prefix cache and snapshots, each in a new engine."""
    return child(folder, "alone", turns, **NO_CACHE)


def opened(folder: str, **options: Any) -> mpool.Pool:
    """Return a pool with the model "m" and the adapters beside it, if there are some."""
    pool = mpool.Pool(mpool.PoolConfig(offline=True, **options))
    adapters = {path.name: path for path in sorted(Path(f"{folder}-adapters").glob("*"))}
    pool.register("m", folder, adapters=adapters or None)
    return pool


def alone(folder: str, turns: Sequence[Turn]) -> None:
    """Print the result of each turn in an engine of its own."""
    with opened(folder) as pool:
        for turn in turns:
            completion = turn.run(pool, "m")
            assert completion.usage.cached_tokens == 0, completion.usage
            print(json.dumps(result(completion)), flush=True)
            pool.unload("m")


# ---- many threads that send, stop and cancel ----

#: Errors that a request under pressure may end with.
ALLOWED = (mpool.Timeout, mpool.Cancelled, mpool.MemoryExhausted, mpool.Overloaded)
THREADS = 8


def attempt(pool: mpool.Pool, turn: Turn, choose: random.Random) -> tuple[str, Any]:
    """Send a turn in a random way. Returns how it ended, and the result of a completed one."""
    way = choose.choice(("wait", "wait", "wait", "stream", "stop", "cancel", "deadline"))
    try:
        if way == "wait":
            return "completed", result(turn.run(pool, "m"))
        if way == "deadline":
            late = replace(turn, options={**turn.options, "timeout": choose.choice((0.001, 0.01, 0.05))})
            return "completed", result(late.run(pool, "m"))
        if way == "cancel":
            job = pool.submit("text_to_text", messages=turn.messages, model="m", **turn.options)
            time.sleep(choose.choice((0, 0.002, 0.01)))
            job.cancel()
            return "completed", result(job.result())
        stream = turn.run(pool, "m", stream=True)
        for number, _ in enumerate(stream):
            if way == "stop" and number == 2:
                stream.close()
                break
        completion = stream.result()
        stopped = any(choice.finish_reason == "cancelled" for choice in completion.choices)
        return ("stopped", None) if stopped else ("completed", result(completion))
    except ALLOWED as error:
        return type(error).__name__, None


def storm(folder: str, turns: Sequence[Turn]) -> None:
    """Send the turns at random from many threads in little memory, with drafts whenever there are some. Prints counts
    of how requests ended, and of the results that are not those of the turn."""
    with opened(folder) as pool:
        expected = [result(turn.run(pool, "m")) for turn in turns]  # the caller compares them with those without cache
        row = next(row for row in pool.registry.entries() if row["key"] == "m")
        needs = row["model_bytes"] + sum(worker["predicted_bytes"] for worker in row["worker"])
    counts: collections.Counter[str] = collections.Counter()
    with opened(folder, memory_bytes=needs, request_timeout=60.0) as pool:
        def send(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(int(os.environ["MPOOL_STORM"])):
                number = choose.randrange(len(turns))
                ended, got = attempt(pool, turns[number], choose)
                counts[ended] += 1
                counts["wrong"] += got is not None and got != expected[number]
        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send, range(THREADS)))
        row = next(row for row in pool.registry.entries() if row["key"] == "m")
        counts["still"] = row["running"] + row["queued"]
    print(json.dumps(counts))
    for one in expected:
        print(json.dumps(one))


if __name__ == "__main__":
    {"alone": alone, "storm": storm}[sys.argv[2]](sys.argv[1], [Turn(**json.loads(line)) for line in sys.stdin])
