"""Functions of parity tests below the public API: logits, greedy completions and hidden states by token ids."""

import numpy as np

import mpool

SAMPLING = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
                frequency_penalty=0.0, seed=0, max_tokens=1, min_tokens=0, logprobs=-1, ignore_eos=True, n=1, stop=[],
                stop_ids=[], bias_ids=[], bias=[], reasoning_starts=[], reasoning_ends=[], call_starts=[])


def _key(pool: mpool.Pool, model: str, compute: str) -> str:
    # The core's key of the model: these tests submit token ids, without tokenizer and chat template.
    return pool.get(model)._entry.core_key(compute)


def logits(pool: mpool.Pool, model: str, tokens: np.ndarray, compute: str = "auto",
           adapter: str | None = None) -> np.ndarray:
    """Return the next-token logits after every token, float32 (tokens, vocab)."""
    key = _key(pool, model, compute)
    number = 0 if adapter is None else pool.get(model)._entry.setup.adapter_id(adapter)
    ticket = pool.registry.submit_text(key, np.ascontiguousarray(tokens, np.int32), prompt_logits=True,
                                       adapter=number, **SAMPLING)
    ticket.wait()
    ticket.check()
    return ticket.prompt_logits()


def log_probabilities(pool: mpool.Pool, model: str, prompt: list[int], ids: tuple[int, ...],
                      compute: str = "float32") -> np.ndarray:
    """Return log softmax of the logits before each of `ids`, which follow `prompt`, float64 (ids, vocab)."""
    rows = logits(pool, model, np.array([*prompt, *ids[:-1]], np.int32), compute)[len(prompt) - 1:].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def greedy(pool: mpool.Pool, model: str, tokens: np.ndarray, count: int, compute: str = "auto") -> np.ndarray:
    """Return the next `count` tokens at temperature 0. End tokens are not sampled."""
    key = _key(pool, model, compute)
    ticket = pool.registry.submit_text(key, np.ascontiguousarray(tokens, np.int32),
                                       **{**SAMPLING, "max_tokens": count})
    ticket.wait()
    ticket.check()
    return ticket.tokens(0)[0]


def token_vectors(pool: mpool.Pool, model: str, ids: list[list[int]], compute: str = "float32",
                  adapter: str | None = None) -> list[np.ndarray]:
    """Return the last hidden states before pooling, one float32 (tokens, width) per text."""
    key = _key(pool, model, compute)
    number = 0 if adapter is None else pool.get(model)._entry.setup.adapter_id(adapter)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    flat = np.array([i for row in ids for i in row], np.int32)
    ticket = pool.registry.submit_embed(key, flat, offsets, outputs=2, adapter=number)
    ticket.wait()
    rows = ticket.states()
    return [rows[a:b] for a, b in zip(offsets, offsets[1:])]
