"""Bounds for computations in bfloat16 and int8: how far a correct implementation may be from float32."""

import copy
from typing import Any

import numpy as np

from paritymodels import torch


def deviations(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return 1 - cosine of each row of two matrices."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    return 1 - (got * exact).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(exact, axis=-1)


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of transformers, float64 (tokens, vocab)."""
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].double().numpy()


def check_bfloat16(got: np.ndarray, model: Any, tokens: np.ndarray) -> None:
    """Check logits that were computed in bfloat16: no row is further from float32 than the furthest row of transformers
    in bfloat16, and the rows are nearer on average. mpool rounds the inputs of products only, transformers every
    result: over all families mpool's furthest row is at 0.1 to 0.6 of transformers', its mean at 0.15 to 0.4."""
    exact = logits_of(model, tokens)
    ours = deviations(got, exact)
    theirs = deviations(logits_of(copy.deepcopy(model).to(torch.bfloat16), tokens), exact)
    assert ours.max() <= theirs.max() and ours.mean() <= 0.8 * theirs.mean(), (ours, theirs)
    assert ours.max() > 1e-7, "computed in float32"


def stable_tokens(model: Any, count: int, vocab: int, seed: int) -> np.ndarray:
    """Return random tokens whose logits depend smoothly on the weights.

    Rounding may route a token to another expert, which changes its row and all later rows. Tokens are replaced until
    weights with relative errors of 2**-7, four times those of bfloat16, change no row more than the others.
    """
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    inexact = [copy.deepcopy(model) for _ in range(4)]
    for one in inexact:
        for parameter in one.parameters():
            parameter.data = parameter.data * (1 + 2**-7 * torch.randn(parameter.shape, generator=generator))
    tokens = random.integers(2, vocab, count)
    for _ in range(400):
        exact = logits_of(model, tokens)
        worst = np.max([deviations(logits_of(one, tokens), exact) for one in inexact], axis=0)
        rerouted = np.nonzero(worst > 6 * np.median(worst))[0]
        if not len(rerouted):
            return tokens
        tokens[rerouted[0]] = random.integers(2, vocab)
    raise AssertionError("no stable tokens were found: choose another seed or fewer tokens")
