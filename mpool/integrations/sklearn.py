"""A transformer for scikit-learn that embeds texts, as the first step of a pipeline (extra ``sklearn``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.functions import default_pool
from ..errors import InvalidArgument
from ..host.resources import importing
from ..model import Model
from ..tasks.text_embedding import texts_of

with importing("sklearn"):
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sklearn.utils import Tags
    from typing_extensions import Self


class EmbeddingTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Embeds texts with :func:`mpool.embed`.

    The transformer learns nothing from data, so :meth:`transform` works without :meth:`fit`. :meth:`fit` checks the
    parameters, loads the model and sets the number of columns for ``get_feature_names_out`` and ``set_output``. A
    pickle has only the parameters; a process that unpickles it loads the model again.

    Args:
        model: as for :func:`mpool.embed`: a key, a path, a reference or a :class:`mpool.Model`; None:
            all-MiniLM-L6-v2.
        task, prompt, prompt_name, dimensions, normalize, compute, truncate: as for :func:`mpool.embed`.
        on_error: ``"null"``: the row of a text that cannot be embedded (missing, empty, too long) is NaN, for an
            imputer or a model that accepts NaN; ``"raise"``: raise an error.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> from mpool.integrations.sklearn import EmbeddingTransformer
        >>> classifier = make_pipeline(EmbeddingTransformer(), LogisticRegression())
        >>> texts = ["A cat sleeps.", "Dogs bark.", "Shares fell.", "Banks lend money."]
        >>> str(classifier.fit(texts, ["animals", "animals", "money", "money"]).predict(["The horse runs."])[0])
        'animals'

    Source:
        https://scikit-learn.org/stable/developers/develop.html
    """

    def __init__(self, model: str | os.PathLike[str] | Model | None = None, *, task: str | None = None,
                 prompt: str | None = None, prompt_name: str | None = None, dimensions: int | None = None,
                 normalize: bool | None = None, compute: str = "auto", truncate: bool = True,
                 on_error: str = "raise") -> None:
        self.model = model
        self.task = task
        self.prompt = prompt
        self.prompt_name = prompt_name
        self.dimensions = dimensions
        self.normalize = normalize
        self.compute = compute
        self.truncate = truncate
        self.on_error = on_error

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the parameters, load the model and embed the first text.

        Args:
            X: as for :meth:`transform`, at least one text.
            y: ignored.

        Returns:
            self.

        Raises:
            InvalidArgument: X has no text.
            MpoolError: see :func:`mpool.embed`.
        """
        texts = _texts(X)
        if not texts:
            raise InvalidArgument(param="X", got="none", allowed="at least one text")
        self._n_features_out = self._embed(texts[:1]).shape[1]
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Embed texts.

        Args:
            X: texts: a list, array or Series of str of any length, or a table with one column of str.

        Returns:
            float32 ``(n, d)``, in the container of ``set_output``.

        Raises:
            InvalidArgument: X is not a list of texts or another supported container.
            MpoolError: see :func:`mpool.embed`.
        """
        return self._embed(_texts(X))

    def _embed(self, texts: list[Any]) -> NDArray[np.float32]:
        pool = self.model.pool if isinstance(self.model, Model) else default_pool()
        options = {name: value for name, value in self.get_params(deep=False).items() if name != "model"}
        found: NDArray[np.float32] = pool.embed(texts, self.model, max_inputs=max(len(texts), 1), **options)
        return found

    def __sklearn_tags__(self) -> Tags:
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.input_tags.allow_nan = self.on_error == "null"
        tags.transformer_tags.preserves_dtype = []
        tags.requires_fit = False
        return tags


def _texts(X: Any) -> list[Any]:
    if isinstance(X, str):
        raise InvalidArgument(param="X", got="one str", allowed="a list of str")
    shape: tuple[int, ...] = getattr(X, "shape", ())
    if len(shape) == 2 and shape[1] == 1 and not hasattr(X, "toarray"):
        X = np.asarray(X, dtype=object)[:, 0]
    elif len(shape) > 1:
        raise InvalidArgument(param="X", got=f"the shape {tuple(shape)}", allowed="of shape (n,) or (n, 1)",
                              hint="Select one column of a table with a ColumnTransformer")
    return texts_of(X, len(X) if hasattr(X, "__len__") else 0, "X")


__all__ = ["EmbeddingTransformer"]
