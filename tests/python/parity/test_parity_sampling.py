"""Every sampling option compared with transformers' logits processors.

A model of 32 tokens generates with an option. The test computes the distribution of each generated token: mpool's own
logits (those that test_parity_tiny.py compares with transformers), processed by transformers in the documented order.
At temperature 0 each token must be the most probable one; else the frequencies of several thousand tokens must fit
their distributions, and no token of probability 0 may occur. The seeds are fixed, so the results never vary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

import paritymodels
from corelib import logits
from paritymodels import randomise, torch, transformers, write_tokenizer

VOCAB, END = 32, 1
PROMPT = [3, 5, 7, 9, 3, 3, 11]
#: Options that change the logits whatever the temperature. Tokens 3 and 5 occur in the prompt.
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "repetition_reward": {"repetition_penalty": 0.7},
    # the bias, which is added first, makes nearly all logits negative: these are multiplied by the penalty
    "repetition_penalty_below_0": {"repetition_penalty": 1.6, "logit_bias": dict.fromkeys(range(VOCAB), -4.0)},
    "repetition_reward_below_0": {"repetition_penalty": 0.7, "logit_bias": dict.fromkeys(range(VOCAB), -4.0)},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "frequency_reward": {"frequency_penalty": -0.4},
    "presence_penalty": {"presence_penalty": 1.4},
    "presence_reward": {"presence_penalty": -1.1},
    "logit_bias": {"logit_bias": {3: -1.5, 8: 2.5, 30: 1.0}},
    "min_tokens": {"min_tokens": 12, "logit_bias": {END: 4.0}, "ignore_eos": False},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": {3: 1.5, 9: -2},
            "min_tokens": 8},
}
#: Options of the draw.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {}, "hot": {"temperature": 1.7}, "cold": {"temperature": 0.6}, "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.2}, "top_k_top_p": {"top_k": 9, "top_p": 0.8},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
}
CHOICES, TOKENS = 128, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    made = paritymodels.decoder("llama", 2, vocab=VOCAB)
    randomise(made, 11)
    made.lm_head.weight.data *= 0.8  # a spread of about four between the logits: no option is without effect
    made.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return folder


def reference(raw: np.ndarray, generated: list[list[int]], options: dict[str, Any]) -> np.ndarray:
    """Return the probabilities [choices, vocab] of the tokens after PROMPT + ``generated`` [choices, tokens].

    transformers has no presence and frequency penalties: these follow the formula of OpenAI's API reference.
    """
    scores = torch.tensor(raw, dtype=torch.float64)
    output = torch.tensor(generated, dtype=torch.int64).reshape(len(generated), -1)
    ids = torch.cat([torch.tensor([PROMPT] * len(generated)), output], 1)
    for token, bias in options.get("logit_bias", {}).items():
        scores[:, token] += bias
    if "repetition_penalty" in options:
        scores = transformers.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(ids, scores)
    counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones(output.shape, dtype=torch.float64))
    scores = scores - options.get("presence_penalty", 0) * (counts > 0) - options.get("frequency_penalty", 0) * counts
    least = TOKENS if options["ignore_eos"] else options.get("min_tokens", 0)
    if least:
        scores = transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), least, END)(ids, scores)
    if options["temperature"] == 0:
        return np.eye(VOCAB)[scores.argmax(-1).numpy()]
    processors = [transformers.TemperatureLogitsWarper(float(options["temperature"])),
                  *([transformers.TopKLogitsWarper(options["top_k"])] if options["top_k"] else []),
                  transformers.TopPLogitsWarper(options["top_p"]),
                  *([transformers.MinPLogitsWarper(options["min_p"])] if options["min_p"] else [])]
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores, -1).numpy()


def draws(pool: mpool.Pool, model: Path, options: dict[str, Any], choices: int) -> list[tuple[int, np.ndarray]]:
    """Generate ``choices`` completions. Return each token with the distribution from which it should be drawn."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, **options}
    prompt = " ".join(f"w{token}" for token in PROMPT)
    assert pool.tokenize(prompt, model) == PROMPT
    done = pool.generate(prompt, model, n=choices, seed=20, max_tokens=TOKENS, compute="float32", **options)
    # a result does not contain the end token
    rows = [[*choice.token_ids, *([END] if choice.finish_reason == "stop" else [])] for choice in done.choices]
    raw = [logits(pool, str(model), np.array(PROMPT + row), "float32")[len(PROMPT) - 1:] for row in rows]
    found: list[tuple[int, np.ndarray]] = []
    for at in range(TOKENS):
        live = [number for number, row in enumerate(rows) if len(row) > at]
        if live:
            before = [rows[number][:at] for number in live]
            p = reference(np.stack([raw[number][at] for number in live]), before, options)
            found += [(rows[number][at], p[index]) for index, number in enumerate(live)]
    return found


def check(pairs: list[tuple[int, np.ndarray]]) -> None:
    """Compare how often each token occurs with the sum of its probabilities, in standard deviations."""
    seen, mean, variance = np.zeros(VOCAB), np.zeros(VOCAB), np.zeros(VOCAB)
    for token, p in pairs:
        assert p[token] > 0, f"token {token} was sampled, which the options exclude"
        seen[token] += 1
        mean += p
        variance += p * (1 - p)
    deviations = (seen - mean) / np.sqrt(np.maximum(variance, 1e-9))
    likely = variance > 5  # enough draws for a normal distribution
    assert likely.sum() >= 3
    assert np.abs(deviations[likely]).max() < 4, np.round(deviations, 1).tolist()
    assert (deviations[likely]**2).mean() < 2.2
    # the surprise of each draw has a known mean: a flatter or steeper distribution than the right one shifts it
    surprise = sum(-np.log(p[token]) for token, p in pairs)
    entropies = [(-(q * np.log(q)).sum(), (q * np.log(q)**2).sum()) for p in (p for _, p in pairs) for q in [p[p > 0]]]
    expected, spread = sum(h for h, _ in entropies), np.sqrt(sum(s - h * h for h, s in entropies))
    assert abs(surprise - expected) < 4 * spread


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_match_transformers(pool: mpool.Pool, model: Path, name: str) -> None:
    options = {**PENALTIES[name], "temperature": 0}
    pairs = draws(pool, model, options, 1)
    assert [token for token, _ in pairs] == [int(p.argmax()) for _, p in pairs]
    check(draws(pool, model, PENALTIES[name], CHOICES))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FILTERS)
def test_filters_match_transformers(pool: mpool.Pool, model: Path, name: str) -> None:
    check(draws(pool, model, FILTERS[name], CHOICES))


def test_all_options_together_match_transformers(pool: mpool.Pool, model: Path) -> None:
    check(draws(pool, model, {**PENALTIES["all"], **FILTERS["all"]}, CHOICES))


@pytest.mark.parametrize(("change", "options"), [
    (lambda p: np.roll(p, 1), {}), (lambda p: p**1.15 / (p**1.15).sum(), {}),
    (lambda p: np.where(p < 0.02, 0, p), {}), (lambda p: 0.9 * p + 0.1 * np.eye(VOCAB)[p.argmax()], {})])
def test_the_comparison_detects_wrong_distributions(pool: mpool.Pool, model: Path,
                                                    change: Callable[[np.ndarray], np.ndarray],
                                                    options: dict[str, Any]) -> None:
    wrong = [(token, change(p)) for token, p in draws(pool, model, options, CHOICES)]
    with pytest.raises(AssertionError):
        check(wrong)
