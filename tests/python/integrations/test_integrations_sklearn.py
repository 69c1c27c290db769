"""The transformer for scikit-learn: scikit-learn's own checks, pipelines, tables, copies, errors."""

import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("sklearn", "sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.utils import get_tags  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402
from sklearn.utils.validation import check_array, validate_data  # noqa: E402

from mpool.integrations.sklearn import EmbeddingTransformer  # noqa: E402

TEXTS = ["The cat sat on the mat.", "A dog barks at the fox.", "Numbers 1 2 3.", "def main(argument):"]


class RowTransformer(EmbeddingTransformer):  # type: ignore[misc]
    """Converts each row of a numeric table to a text and embeds it: scikit-learn's checks use numeric tables."""

    def fit(self, X: Any, y: Any = None) -> "RowTransformer":
        return super().fit(_as_texts(validate_data(self, X)), y)

    def transform(self, X: Any) -> Any:
        return super().transform(_as_texts(validate_data(self, X, reset=False)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = False
        tags.input_tags.two_d_array = True
        return tags


def _as_texts(rows: Any) -> list[str]:
    return [" ".join(f"{value:.3g}" for value in row) for row in check_array(rows)]


def test_estimator_checks(bert: Path) -> None:
    """All checks of scikit-learn pass for numeric rows that are converted to texts. For the transformer itself
    scikit-learn warns that it cannot generate texts, as for its own text transformers, and checks only the
    parameters."""
    results = check_estimator(RowTransformer(str(bert)), on_fail=None, on_skip=None)
    failed = {result["check_name"]: result["exception"] for result in results if result["status"] == "failed"}
    assert not failed
    assert sum(result["status"] == "passed" for result in results) >= 40
    with pytest.warns(UserWarning, match="Can't test estimator EmbeddingTransformer which requires input"):
        check_estimator(EmbeddingTransformer(str(bert)), on_fail="raise")


def test_vectors_equal_those_of_embed(bert: Path) -> None:
    made = EmbeddingTransformer(str(bert), dimensions=8, normalize=True, compute="float32")
    expected = mpool.embed(TEXTS, str(bert), dimensions=8, normalize=True, compute="float32")
    for given in (TEXTS, tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, dtype=object).reshape(-1, 1)):
        found = made.transform(given)  # works without fit
        assert found.dtype == np.float32 and np.array_equal(found, expected)
    assert made.fit(TEXTS) is made and made.get_feature_names_out().tolist() == [
        f"embeddingtransformer{at}" for at in range(8)]
    assert made.transform([]).shape == (0, 8)
    many = np.array(["A cat."] * 10_001)
    assert made.transform(many).shape == (len(many), 8)


def test_tags_describe_the_inputs(bert: Path) -> None:
    """Tools of scikit-learn choose inputs by these tags: texts in one dimension, NaN as ``on_error`` says."""
    for on_error in ("raise", "null"):
        tags = get_tags(EmbeddingTransformer(str(bert), on_error=on_error))
        given = tags.input_tags
        assert (given.string, given.one_d_array, given.two_d_array, given.allow_nan) == (True, True, False,
                                                                                         on_error == "null")
        assert not tags.requires_fit and tags.transformer_tags.preserves_dtype == []


def test_tables(bert: Path) -> None:
    """Columns of pandas tables as input, also with ColumnTransformer, and pandas tables as output."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": TEXTS, "other": TEXTS[::-1], "size": [1.0, 2.0, 3.0, 4.0]})
    made = EmbeddingTransformer(str(bert))
    expected = mpool.embed(TEXTS, str(bert))
    assert np.array_equal(made.transform(frame["text"]), expected)
    assert np.array_equal(made.transform(frame[["text"]]), expected)
    columns = ColumnTransformer([("a", made, "text"), ("b", clone(made), ["other"])], remainder="passthrough")
    assert np.allclose(columns.fit_transform(frame), np.hstack([expected, expected[::-1], frame[["size"]]]))
    table = clone(made).set_output(transform="pandas").fit_transform(frame["text"])
    assert list(table.columns) == made.fit(TEXTS).get_feature_names_out().tolist() and len(table) == len(TEXTS)


def test_pipeline_with_a_classifier() -> None:
    """A sentence classifier learns from eight examples, with a real model."""
    from realmodels import real_path

    animals = ["A cat sleeps on the roof.", "Dogs bark at night.", "The horse eats grass.", "Birds build nests."]
    money = ["Shares fell on Monday.", "The bank raised its rates.", "He paid the loan back.", "Prices rose again."]
    made = make_pipeline(EmbeddingTransformer(str(real_path("minilm"))), LogisticRegression(C=10.0))
    made.fit(animals + money, [0] * 4 + [1] * 4)
    assert made.predict(["A cow gives milk.", "Investors sold their stocks.", "The puppy ran away.",
                         "Taxes are due in April."]).tolist() == [0, 1, 0, 1]
    searched = GridSearchCV(made, {"logisticregression__C": [1.0], "embeddingtransformer__dimensions": [None]}, cv=2)
    assert searched.fit(animals + money, [0] * 4 + [1] * 4).best_score_ > 0.7


@pytest.mark.slow
def test_copies(bert: Path, tmp_path: Path) -> None:
    """Clones and pickles have parameters, not weights. Another process computes the same vectors from a pickle."""
    made = EmbeddingTransformer(str(bert), dimensions=8, compute="float32").fit(TEXTS)
    copied = clone(made)
    assert copied.get_params() == made.get_params() and not hasattr(copied, "_n_features_out")
    data = pickle.dumps(made)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).transform(TEXTS), made.transform(TEXTS))
    (tmp_path / "made.pickle").write_bytes(data)
    script = ("import numpy, pickle, sys; made = pickle.load(open('made.pickle', 'rb'));"
              f"numpy.save('found.npy', made.transform({TEXTS!r}))")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=120)
    assert np.array_equal(np.load(tmp_path / "found.npy"), made.transform(TEXTS))


def test_models_of_other_pools(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        made = EmbeddingTransformer(pool.register("other", bert))
        assert clone(made).transform(TEXTS).shape == (4, 32) and len(pool.ps()) == 1


def test_errors(bert: Path) -> None:
    """Errors are mpool's, and are also the built-in exceptions that users of scikit-learn catch."""
    made = EmbeddingTransformer(str(bert))
    with pytest.raises(NotFittedError):
        made.get_feature_names_out()
    with pytest.raises(mpool.InvalidArgument, match="`X` must be at least one text, got none"):
        made.fit([])
    with pytest.raises(mpool.InvalidArgument, match=r"`X` must be of shape \(n,\) or \(n, 1\), got ") as caught:
        made.transform(np.array([TEXTS[:2], TEXTS[2:]]))
    assert (caught.value.param, caught.value.got) == ("X", "the shape (2, 2)")
    with pytest.raises(ValueError, match="`X` must be a list of str, got one str"):
        made.transform("one text")
    with pytest.raises(ValueError, match=r"`inputs\[1\]` must be a str of 0 to 1,000,000 characters, got float"):
        made.transform([TEXTS[0], float("nan")])
    with pytest.raises(ValueError, match="dimensions"):
        EmbeddingTransformer(str(bert), dimensions=33).fit(TEXTS)
    with pytest.raises(mpool.UnknownModel):
        EmbeddingTransformer("all-MiniLM-L6-v3").fit(TEXTS)
    rows = EmbeddingTransformer(str(bert), on_error="null").transform([TEXTS[0], None, ""])
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, True]


def test_defaults_are_those_of_embed() -> None:
    """An option has the name and the default of the library's."""
    from mpool.tasks.options import EmbedOptions

    parameters = inspect.signature(EmbeddingTransformer).parameters
    own, wanted = {name: one.default for name, one in parameters.items() if name != "model"}, EmbedOptions()
    assert own == {name: getattr(wanted, name) for name in own} and parameters["model"].default is None


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("sklearn", "sklearn", tmp_path)
