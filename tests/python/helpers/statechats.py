"""Chats with a model whose layers have states, for tests that compare a run with prefix caching and snapshots with one
without: ``python statechats.py FOLDER`` reads the chats of :class:`Turn` as JSON lines, each in an engine of its own,
and prints their results. The tests set the variables of :data:`NO_CACHE` for it."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpool

#: Variables of a process without prefix cache and snapshots.
NO_CACHE = {"MPOOL_PREFIX_PERCENT": "0", "MPOOL_SNAPSHOT_PERCENT": "0"}
WORDS = "The quick brown fox jumps over lazy dogs . A cat sat on the mat , and it barked twice äöü 日本語".split()
TOOLS = [{"type": "function", "function": {
    "name": name, "description": f"Look up the {name} of a place and a day, in words that anybody understands.",
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


def chat(seed: int, turns: int, edits: Sequence[int]) -> Iterator[Turn]:
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
                    "function": {"name": "weather", "arguments": {"city": words(1, 2), "days": turn}}}
            messages[-1] = {**messages[-1], "tool_calls": [call]}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": words(4, 40)})
        else:
            messages.append({"role": "user", "content": words(3, 30 if turn % 9 else 160)})
        reply = yield Turn([*messages], {
            "tools": TOOLS, "max_tokens": 4 + turn % 5 * 4, "seed": turn, "temperature": turn % 3 * 0.5,
            "n": 2 if turn % 7 == 5 else 1, "logprobs": True, "top_logprobs": 3, "timeout": 60.0,
            "logit_bias": {5: 1.5} if turn % 5 == 2 else None})
        messages.append({"role": "assistant", "content": reply})


def play(pool: mpool.Pool, model: str, seed: int, turns: int, edits: Sequence[int],
         **options: Any) -> Iterator[tuple[Turn, Any]]:
    """Play a chat; yield each turn and its completion."""
    script = chat(seed, turns, edits)
    turn = next(script)
    while True:
        completion = turn.run(pool, model, **options)
        yield turn, completion
        try:
            turn = script.send(completion.text)
        except StopIteration:
            return


def without_cache(folder: Path, turns: Sequence[Turn]) -> list[Any]:
    """Run turns in another process without prefix cache and snapshots, each in a new engine."""
    lines = "".join(json.dumps([turn.messages, turn.options]) + "\n" for turn in turns)
    run = subprocess.run([sys.executable, __file__, str(folder)], input=lines, capture_output=True, text=True,
                         timeout=600, env={**os.environ, **NO_CACHE})
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def main(folder: str) -> None:
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        for line in sys.stdin:
            messages, options = json.loads(line)
            options["logit_bias"] = {int(key): value for key, value in (options["logit_bias"] or {}).items()} or None
            completion = Turn(messages, options).run(pool, folder)
            assert completion.usage.cached_tokens == 0, completion.usage
            print(json.dumps(result(completion)), flush=True)
            pool.unload(folder)


if __name__ == "__main__":
    main(sys.argv[1])
