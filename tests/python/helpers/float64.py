"""References in float64: transformers runs with every float32 of its code replaced by float64.

transformers computes rotary angles, norms and softmax in float32 whatever the type of the weights. At position 33,000,
a float32 angle is wrong by up to 2e-3 radians, so that such a reference is further from the truth than mpool.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from paritymodels import torch, transformers

#: Rows of a slice of a long prompt: the scores of one head of a slice take rows x positions x 8 bytes.
SLICE = 512


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Within the block, ``torch.float``, ``torch.float32`` and ``Tensor.float()`` mean float64, and so does the default
    type of new tensors."""
    double, before = torch.float64, torch.get_default_dtype()
    with mock.patch.object(torch, "float32", double), mock.patch.object(torch, "float", double), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def exact(model: Any) -> Any:
    """Return a copy of a float32 model that computes in float64. Call it, and its result, within :func:`in_float64`."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = model.config._attn_implementation
    config._experts_implementation = "eager"  # the other implementations have no float64
    copied = type(model)(config).double().eval()
    copied.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for _, buffer in copied.named_buffers():
        assert not buffer.is_floating_point() or buffer.dtype == torch.float64
    return copied


def _choose_factors(model: Any, length: int) -> None:
    """Fix the factors of LongRoPE to those of a sequence of ``length`` tokens. transformers would choose them by the
    length so far, which differs between the slices of a prompt."""
    rotary = model.model.rotary_emb
    if rotary.rope_type == "longrope":
        function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
        rotary.inv_freq, rotary.attention_scaling = function(model.config, "cpu", seq_len=length)
        rotary.rope_type = "default"


def decoder_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the next-token logits of a float32 model after every token, computed in float64, (tokens, vocab)."""
    with in_float64(), torch.no_grad():
        copied, ids = exact(model), torch.tensor(tokens[None])
        _choose_factors(copied, len(tokens))
        if len(tokens) <= 2 * SLICE:
            return copied(ids, use_cache=False).logits[0].numpy()
        cache, parts = transformers.DynamicCache(config=copied.config), []
        for at in range(0, len(tokens), SLICE):
            parts.append(copied(ids[:, at:at + SLICE], past_key_values=cache, use_cache=True).logits[0].numpy())
    return np.concatenate(parts)


def encoder_states(model: Any, ids: list[int]) -> np.ndarray:
    """Return the last hidden states of a float32 encoder, computed in float64, (tokens, hidden)."""
    with in_float64(), torch.no_grad():
        return exact(model)(torch.tensor([ids])).last_hidden_state[0].numpy()


def delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    """The gated delta rule (arXiv:2412.06464) row by row in numpy, in place of the function of transformers that
    computes it in chunks of 64 rows. Arguments as there: (batch, rows, heads, components)."""
    q, k, v, decay, step = (np.asarray(x.detach(), np.float64) for x in (query, key, value, g, beta))
    group = v.shape[2] // k.shape[2]
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), group, 2) for x in (q, k))
    state, out = np.zeros((*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1])), np.zeros_like(v)
    for t in range(v.shape[1]):
        state *= np.exp(decay[:, t])[..., None, None]
        delta = (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])) * step[:, t, :, None]
        state += k[:, t, ..., None] * delta[..., None, :]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) / np.sqrt(k.shape[-1])
    return torch.from_numpy(out), None
