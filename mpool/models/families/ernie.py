"""The dense models of ERNIE 4.5: Llama, with one key for the biases of all linear layers."""

from __future__ import annotations

from .llama import decoder, decoder_row

ROWS = (
    decoder_row("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), decoder(biases=("use_bias",) * 3),
                biases=("use_bias",), rope_neox=False, remote=True,
                defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                          "tie_word_embeddings": True}),
)
