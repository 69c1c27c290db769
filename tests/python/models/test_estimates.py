"""The catalogue's ``est_memory_allocation_mb`` of the default models, compared with measured memory."""

import subprocess
import sys
from pathlib import Path

import pytest

import mpool.models
from mpool.cli.models import facts_of_model
from mpool.models.catalogue import estimate
from mpool.models.describing import describe
import tinymodels
from realmodels import real_path

PROGRAM = """
import gc, os, sys
import numpy, tokenizers, jinja2
import mpool, mpool._core, mpool.tasks.text_embedding, mpool.tasks.text_to_text

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
if sys.argv[1] == "text_embedding":
    mpool.embed([f"Sentence {number} of some ten words, to be embedded here." for number in range(256)], sys.argv[2])
else:
    mpool.generate("A long prompt. " * 100, sys.argv[2], max_tokens=32)
gc.collect()
print((resident() - before) / 1e6)
"""


@pytest.mark.sample(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("capability, weights", [("text_embedding", "minilm"), ("text_to_text", "smollm2")])
def test_estimate_is_close_to_the_measured_memory(capability: str, weights: str) -> None:
    stated = mpool.models.load_catalogue().default(capability).est_memory_allocation_mb
    run = subprocess.run([sys.executable, "-c", PROGRAM, capability, str(real_path(weights))], capture_output=True,
                         text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    measured = float(run.stdout)
    assert 0.6 * stated <= measured <= 1.2 * stated, f"stated {stated} MB, measured {measured:.1f} MB"


def test_a_table_of_inputs_per_layer_stays_mapped(tmp_path: Path) -> None:
    """The table of Gemma 4 is most of the file. Neither the estimate nor the memory in use has it."""
    pytest.importorskip("torch")
    import paritymodels

    paritymodels.decoder("gemma4", 4, vocab=3001, hidden_size_per_layer_input=1024).save_pretrained(tmp_path)
    paritymodels.write_tokenizer(tmp_path, 3001)
    described = describe(tmp_path)
    sizes = {tensor.name: tensor.nbytes for tensor in described.spec.tensors}
    table = sizes.pop("per_layer_token_embd.weight")
    assert table == 3001 * 4 * 1024 * 4 > 5 * sum(sizes.values())
    stated = facts_of_model(described)["est_memory_allocation_mb"]
    assert stated == estimate(described) == round(1.15 * sum(sizes.values()) / 1e6) + 48
    with mpool.Pool(mpool.PoolConfig(threads=1, weights="packed")) as pool:
        pool.generate("w5 w9 w31", str(tmp_path), max_tokens=4)
        row, = pool.ps()
        assert row.weights == "packed" and row.model_bytes <= 1.15 * sum(sizes.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_rows_of_a_table_of_inputs_do_not_stay_resident(tmp_path: Path) -> None:
    """Gemma 4's second table of tokens is read as it is mapped: all its rows take 5.2 MB here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(1)
    vocab = tinymodels._decoder_tokenizer(tmp_path)
    config = transformers.Gemma4TextConfig(
        vocab_size=vocab, vocab_size_per_layer_input=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16, sliding_window=64,
        max_position_embeddings=512, hidden_size_per_layer_input=4096)
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    with mpool.Pool() as pool:
        pool.generate(list(range(10, 150)), str(tmp_path), max_tokens=1, compute="float32", temperature=0)
        resident, counts = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                counts = line.endswith(f"{tmp_path}/model.safetensors")
            elif counts and line.startswith("Rss:"):
                resident += int(line.split()[1])
    assert 0 <= resident < 1000
