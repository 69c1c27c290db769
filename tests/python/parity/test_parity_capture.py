"""Layer outputs of SmolLM2 for the haiku prompt, compared with those of llama.cpp and transformers.

The recordings were made by tests/parity/capture/make_captures.py. Both references use the dequantised weights, like
``compute="float32"``.
"""

import importlib.util
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.tasks.capture_files import CaptureRecord
from realmodels import real_path
from haiku import SHOWN

PARITY = Path(__file__).parent.parent.parent / "parity" / "capture"
sys.path.insert(0, str(PARITY))

from make_captures import HAIKU, TOKENS, VALUES, float32, transformers  # noqa: E402

LAYERS = 30


def recording(team: str, folder: Path) -> tuple[CaptureRecord, ...]:
    path = folder / f"{team}.jsonl"
    path.write_bytes(lzma.decompress((PARITY / f"{team}.jsonl.xz").read_bytes()))
    return mpool.debug.read_capture(path)


def captured(pool: mpool.Pool, path: Path, **options: Any) -> tuple[CaptureRecord, ...]:
    with mpool.debug.capture(values=VALUES) as capture:
        done = pool.generate(HAIKU["tokens"], str(path), temperature=0, max_tokens=TOKENS, ignore_eos=True,
                             capture=capture, **options)
    assert list(done.token_ids) == HAIKU["answer"]
    return capture.records()


@pytest.fixture(scope="module")
def mine(pool: mpool.Pool) -> tuple[CaptureRecord, ...]:
    return captured(pool, real_path("smollm2"), compute="float32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model in F32, half a gigabyte."""
    path = tmp_path_factory.mktemp("f32") / "model.gguf"
    float32(real_path("smollm2"), path)
    yield path
    path.unlink()


def test_the_recordings_use_the_haiku_prompt(pool: mpool.Pool) -> None:
    assert HAIKU["prompt"] == SHOWN.format("twenty-seven", "lantern") and len(HAIKU["answer"]) == TOKENS >= 14
    assert pool.get(str(real_path("smollm2"))).tokenize(HAIKU["prompt"]) == HAIKU["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("team", ["llama", "transformers"])
def test_every_layer_is_close(mine: tuple[CaptureRecord, ...], team: str, tmp_path: Path) -> None:
    """Every record of every token is close, from the embedding to the logits. Embeddings, which are only looked up, are
    exact."""
    other = recording(team, tmp_path)
    assert {record.team for record in other} == {{"llama": "llama.cpp"}.get(team, team)}
    assert len(mine) == len(other) == TOKENS * (LAYERS + 3)
    found = mpool.debug.compare_captures(mine, other)
    print(f"{team}: max {found.worst.most:.3g} ({found.worst.checkpoint} of token {found.worst.token_idx}), "
          f"mean {found.mean:.3g}")
    assert found.departs("close") is None
    assert all(row.most <= 1e-8 for row in found.differences if row.checkpoint == "embedding")


def test_differences_are_no_larger_than_between_the_references(mine: tuple[CaptureRecord, ...], tmp_path: Path) -> None:
    """The mean difference from each reference is at most twice the one between the two references."""
    llama, torch = (recording(team, tmp_path) for team in ("llama", "transformers"))
    between = mpool.debug.compare_captures(llama, torch).mean
    assert all(mpool.debug.compare_captures(mine, other).mean <= 2 * between for other in (llama, torch))


@pytest.mark.slow
def test_wrong_layers_are_detected(pool: mpool.Pool, mine: tuple[CaptureRecord, ...], tmp_path: Path) -> None:
    """Quantised activations, and one token too many in the prompt, are detected."""
    llama = recording("llama", tmp_path)
    quantised = mpool.debug.compare_captures(captured(pool, real_path("smollm2"), compute="auto"), llama)
    departs = quantised.departs("close")
    assert departs is not None and (departs.token_idx, departs.checkpoint) == (0, "layer.0")
    with mpool.debug.capture(values=VALUES) as capture:
        pool.generate([1, *HAIKU["tokens"]], str(real_path("smollm2")), temperature=0, max_tokens=1, compute="float32",
                      capture=capture)
    shifted = mpool.debug.compare_captures(capture.records(), llama, tokens=1)
    departs = shifted.departs("close")
    assert departs is not None and departs.checkpoint == "layer.0" and shifted.grade == "apart"


@pytest.mark.slow
def test_the_float32_file_gives_the_same_records(pool: mpool.Pool, mine: tuple[CaptureRecord, ...],
                                                 whole: Path) -> None:
    found = mpool.debug.compare_captures(captured(pool, whole, compute="float32"), mine)
    assert found.worst.most == 0


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs accelerate, to read GGUF")
def test_transformers_reproduces_the_recording(whole: Path, tmp_path: Path) -> None:
    """The recording is close to a new run on this machine, where sums may have another order."""
    transformers(whole, tmp_path / "live.jsonl.xz")
    (tmp_path / "live.jsonl").write_bytes(lzma.decompress((tmp_path / "live.jsonl.xz").read_bytes()))
    found = mpool.debug.compare_captures(tmp_path / "live.jsonl", recording("transformers", tmp_path))
    assert found.departs("close") is None
