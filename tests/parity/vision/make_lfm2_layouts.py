"""Records how transformers' processor of LFM2-VL cuts images: it requires torchvision, which the tests do not.

    python tests/parity/vision/make_lfm2_layouts.py

Writes ``lfm2_layouts.json``: for each set of options and each size of an image, the text that replaces the image, with
the number of embeddings in brackets, and the sizes of its tiles in patches.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

SMALL = {"tile_size": 32, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 8, "encoder_patch_size": 8}
OPTIONS: list[dict[str, Any]] = [
    {}, SMALL, {**SMALL, "use_thumbnail": False, "min_tiles": 3, "max_tiles": 9},
    {**SMALL, "do_image_splitting": False}, {**SMALL, "max_pixels_tolerance": 0.5, "min_image_tokens": 2}]
#: The class fails for images that are so narrow that they have more than the largest number of patches.
SIZES = [(63, 90), (40, 40), (24, 120), (120, 44), (41, 39), (22, 90), (110, 21), (16, 16), (100, 125), (81, 65),
         (300, 299), (64, 200), (7, 90), (90, 5)]
LARGE = [(512, 512), (700, 1100), (725, 725), (1024, 1024), (1080, 1920), (2000, 333), (480, 640), (64, 64),
         (1200, 1500)]
#: Names of the tokens of a processor.
TOKENS = SimpleNamespace(image_token="*", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
                         image_thumbnail_token="<|img_thumbnail|>")


def image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 10_000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def layout(options: dict[str, Any], height: int, width: int) -> list[Any]:
    processor = Lfm2VlImageProcessor(**options)
    done = processor(image(height, width), return_row_col_info=True, do_rescale=False, do_normalize=False)
    rows, columns, size = (done[name][0] for name in ("image_rows", "image_cols", "image_sizes"))
    tile = processor.tile_size // processor.encoder_patch_size // processor.downsample_factor
    unit = processor.encoder_patch_size * processor.downsample_factor
    text = Lfm2VlProcessor._build_image_tokens(
        TOKENS, int(rows), int(columns), tile ** 2, int(size[0]) // unit * (int(size[1]) // unit),
        processor.use_thumbnail, True)
    return [height, width, re.sub(r"\*+", lambda run: f"[{len(run[0])}]", text), done["spatial_shapes"].tolist()]


if __name__ == "__main__":
    made = [[options, [layout(options, *size) for size in (LARGE if not options else SIZES)]] for options in OPTIONS]
    lines = [json.dumps(options) + ", [\n  " + ",\n  ".join(json.dumps(row) for row in rows) + "]"
             for options, rows in made]
    Path(__file__).with_name("lfm2_layouts.json").write_text("[[" + "],\n [".join(lines) + "]]\n", "utf-8")
