"""The table of architectures and the core name the same rows."""

from pathlib import Path

import pytest

import mpool
from mpool.models.families.table import ROWS


def test_the_core_has_all_rows() -> None:
    """archs.def has the name of every row."""
    assert {row.name for row in ROWS} <= {name for name, _ in mpool._core.architectures()}


def test_a_core_without_the_architecture(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so: the file of the model is not at fault."""
    with mpool.Pool() as pool, monkeypatch.context() as patch:
        patch.setattr(mpool._core, "architectures", lambda: [("bert", "text_embedding")])
        with pytest.raises(mpool.errors.Unsupported, match="does not have the architecture llama") as error:
            pool.generate("x", str(llama), max_tokens=1)
        assert "build it again" in str(error.value.hint) and "archs.def" in str(error.value.hint)
        patch.undo()
        assert pool.generate("x", str(llama), max_tokens=1) is not None
