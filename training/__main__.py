"""``python -m training [NAME ...]``: train the models that ship with mpool, and measure them with mpool.

One thread and fixed seeds: the same machine with the same versions gives the same files. Needs torch, transformers,
diffusers and scikit-learn (``pip install ".[test]"``).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from . import MODELS


def main() -> int:
    """Run the command."""
    names = ["digits-clip", "digits-sd3", "digits-llava"]
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models to train (default: {' '.join(names)})")
    parser.add_argument("--out", type=Path, default=MODELS, help="output folder, which must hold digits-clip, "
                        "if only other models are trained (default: %(default)s, which also updates mpool's catalogue)")
    parser.add_argument("--measure", action="store_true", help="measure the existing models without training")
    arguments = parser.parse_args()
    wanted = arguments.names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"models must be among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    for name in wanted:
        folder = arguments.out / name
        if not arguments.measure:
            _train(name, folder)
        from . import measure

        found = getattr(measure, name.removeprefix("digits-"))(str(folder))
        print(f"{name}: {json.dumps(found)}", flush=True)
    if arguments.out == MODELS and not arguments.measure:
        from . import shipping

        shipping.write_images(MODELS / "images")
        for name in wanted:
            shipping.write_row(name)
    return 0


def _train(name: str, folder: Path) -> None:
    # one thread: in networks this small, several threads would spend most of the time on synchronisation
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    from importlib import import_module

    from . import shipping

    print(f"{name}:", flush=True)
    start, used = time.monotonic(), time.process_time()
    script = import_module(f".{name.removeprefix('digits-')}", __package__)
    if name == "digits-clip":
        script.train(folder)
    else:
        script.train(folder, folder.parent / "digits-clip")
    shipping.tidy(folder)
    print(f"  trained in {time.monotonic() - start:.0f} s, {time.process_time() - used:.0f} s of one CPU", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
