"""Record vectors of model2vec for the seeded folders of tests/python/helpers/staticmodels.py.

    pip install model2vec==0.10.0 && python tests/parity/static/make_static_goldens.py

Writes goldens.npz beside this file: an array [texts, components] for each variant.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from model2vec import StaticModel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "python" / "helpers"))

import staticmodels  # noqa: E402


def main() -> None:
    found = {}
    for name in staticmodels.VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            model = StaticModel.from_pretrained(staticmodels.write_variant(Path(folder), name))
            found[name] = model.encode(staticmodels.TEXTS).astype(np.float32)
    np.savez_compressed(HERE / "goldens.npz", **found)


if __name__ == "__main__":
    main()
