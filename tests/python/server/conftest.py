"""A server that several test files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def server(llama: Path, llava: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a language model, a vision model and an embedding model, and of models whose output is known:
    ``writes`` calls a function, ``always`` writes reasoning. Test files that need other models define their own."""
    import chainmodels
    import toolmodels
    from reasoningdata import CHAINS, THINK
    from reasoningdata import WORDS as THOUGHTS
    from servers import serving
    from tooldata import WORDS, WRITES

    models = {"writes": (toolmodels.HERMES, WRITES, WORDS), "always": (THINK, CHAINS[THINK], THOUGHTS)}
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    folders |= {"llama": llama, "llava": llava, "bert": bert}
    with serving([f"{name}={folder}" for name, folder in folders.items()]) as made:
        yield made
