"""``mpool generate-image``: write generated images to files."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..errors import InvalidArgument
from .common import check_folder, default_model, load, make_pool, print_json, require_prompt, say, standard_input

#: Options of the library that the command passes on if they are given.
OPTIONS = ("negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "seed", "n")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def generate_image(arguments: argparse.Namespace) -> int:
    """Run ``mpool generate-image``. PNG files contain the parameters, so that the image can be generated again."""
    prompt = standard_input(arguments.prompt == "-") if arguments.prompt in (None, "-") else arguments.prompt
    if arguments.prompt is None and sys.stdin.isatty():
        require_prompt(prompt, "mpool generate-image PROMPT")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in OPTIONS if hasattr(arguments, name)}
    stem, suffix = os.path.splitext(arguments.output)
    if suffix.lower() not in _SUFFIXES:
        raise InvalidArgument(param="output", got=repr(arguments.output),
                              allowed=f"the path of an image file ({', '.join(_SUFFIXES)})")
    check_folder("output", arguments.output)  # before the model computes for minutes
    with make_pool(arguments) as pool:
        name = arguments.model or default_model("text_to_image")
        model = load(pool, "generate_image", name, {"prompt": prompt, **options}, compute=arguments.compute,
                     progress=False if arguments.quiet else None)
        made = model.generate_image(prompt, compute=arguments.compute, **options)
    paths = [arguments.output] if len(made.results) == 1 else \
        [f"{stem}-{number}{suffix}" for number in range(1, len(made.results) + 1)]
    for path, image in zip(paths, made.results):
        image.save(path)
    if arguments.json:
        print_json({"model": made.model, "seed": made.seed, "images": paths})
    else:
        for path in paths:
            say(path)
    return 0
