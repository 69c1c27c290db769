"""Dequantisation of every stored type gives the same bits as the `gguf` package (gguf-py, quants.py)."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the reference is the gguf package")
core = pytest.importorskip("mpool._core", reason="mpool's C core is not built")

TYPES: dict[str, tuple[int, int]] = {  # name -> items per block, bytes per block
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ1_M": (256, 56),
    "IQ1_S": (256, 50),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
# byte offsets of the half-precision scales and minima in a block
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_S": (0,),
    "IQ2_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ1_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# smallest subnormal, largest subnormal, smallest normal, one, largest, negative ones, both zeros
EXTREMES = np.array(
    [0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x8001, 0x83FF, 0x8400, 0xBC00, 0xFBFF, 0x0000, 0x8000], dtype=np.uint16
)


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantise `blocks` uint8 [n, bytes per block] with gguf-py to float32 [n * items]."""
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quants.dequantize(blocks, kind), dtype=np.float32).reshape(-1)


def check(name: str, blocks: np.ndarray) -> None:
    """Compare with gguf-py bit by bit; NaN equals NaN."""
    items, size = TYPES[name]
    assert blocks.dtype == np.uint8 and blocks.shape[1] == size
    want = reference(name, blocks)
    got = np.asarray(core.dequantize(name, blocks.tobytes(), len(blocks) * items))
    assert got.dtype == np.float32 and got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def put_halves(name: str, blocks: np.ndarray, halves: np.ndarray) -> None:
    """Write float16 bit patterns [n, len(HALVES[name])] to the positions of the scales."""
    for column, at in enumerate(HALVES.get(name, ())):
        blocks[:, at : at + 2] = halves[:, column : column + 1].astype("<u2").view(np.uint8)


def finite_halves(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Random float16 bit patterns with no Inf and no NaN."""
    bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    return np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits)


def test_table_matches_the_package() -> None:
    for name, sizes in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [1, 3, 500])
def test_random_blocks(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    blocks = rng.integers(0, 256, (count, TYPES[name][1]), dtype=np.uint8)
    put_halves(name, blocks, finite_halves(rng, (count, 2)))
    check(name, blocks)


@pytest.mark.parametrize("name", HALVES)
def test_extreme_scales(name: str) -> None:
    rng = np.random.default_rng(7)
    first, second = np.meshgrid(EXTREMES, EXTREMES)
    halves = np.stack([first.ravel(), second.ravel()], axis=1)
    for fill in (None, 0x00, 0xFF, 0x7F, 0x80):
        blocks = rng.integers(0, 256, (len(halves), TYPES[name][1]), dtype=np.uint8)
        if fill is not None:
            blocks[:] = fill
        put_halves(name, blocks, halves)
        check(name, blocks)


def test_every_mxfp4_exponent() -> None:
    rng = np.random.default_rng(8)
    blocks = rng.integers(0, 256, (256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    check("MXFP4", blocks)


def test_every_nvfp4_scale() -> None:
    rng = np.random.default_rng(9)
    blocks = rng.integers(0, 256, (256, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256)[:, None] + np.array([0, 50, 100, 150])
    check("NVFP4", blocks)


@pytest.mark.parametrize("name", ["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0"])
def test_every_point_of_a_grid(name: str) -> None:
    """Every byte takes every value, so the blocks contain every grid index and every sign pattern."""
    blocks = np.arange(256, dtype=np.uint8)[:, None] + np.arange(TYPES[name][1], dtype=np.uint8) * 37
    blocks = np.concatenate([blocks, np.roll(blocks, 1, axis=1), blocks[::-1] * 3])
    put_halves(name, blocks, np.full((len(blocks), 1), 0x3C00, dtype=np.uint16))
    check(name, blocks)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half(name: str) -> None:
    check(name, np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2))
