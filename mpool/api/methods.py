"""Inference methods of :class:`mpool.Pool` and :class:`mpool.Model`, generated from the verbs.

``methods.pyi`` has their signatures for type checkers; ``python -m mpool.api.stubs`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checks import InvalidCall
from ..host.resources import typed
from ..tasks.running import run, submit
from ..tasks.verbs import VERBS, Verb

if TYPE_CHECKING:
    from ..tasks.jobs import Job

Method = Callable[..., Any]


def _named(function: Method, verb: Verb, form: str, doc: str) -> Method:
    """Set the name, signature and docstring of a generated function to those of its verb."""
    function.__name__ = verb.name
    function.__qualname__ = {"pool": "Pool.", "model": "Model."}.get(form, "") + verb.name
    function.__doc__ = doc
    function.__signature__ = verb.signature(form)  # type: ignore[attr-defined]
    return function


def _of_pool(verb: Verb) -> Method:
    @typed
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        return run(verb, self, verb.bind(args, keywords))

    return _named(method, verb, "pool", f"See :func:`mpool.{verb.name}`.")


def _of_model(verb: Verb) -> Method:
    slots = verb.slots("model")

    @typed
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        if "model" in keywords:
            raise InvalidCall(f"Model.{verb.name}() got the argument 'model'", param="model",
                              hint=f"Leave it out, or call mpool.{verb.name}(...)")
        given = verb.bind(args, keywords, slots)
        given["model"] = self
        return run(verb, self.pool, given)

    return _named(method, verb, "model", f"See :func:`mpool.{verb.name}`. Uses this model.")


class _LazyMethod:
    """Method of a verb that is built on first use: the signature of a verb has up to 50 parameters."""

    def __init__(self, home: type, verb: Verb, build: Callable[[Verb], Method]) -> None:
        self.home, self.verb, self.build = home, verb, build

    @typed
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = self.build(self.verb)
        setattr(self.home, self.verb.name, method)
        return method.__get__(instance, owner)


class PoolVerbs:
    """Inference methods of a pool, one per verb."""

    @typed
    def submit(self, capability: str, **request: Any) -> Job:
        """See :func:`mpool.submit`."""
        return submit(self, capability, request)  # type: ignore[arg-type]


class ModelVerbs:
    """Inference methods of a model, one per verb."""

    __slots__ = ()


for _verb in VERBS.values():
    setattr(PoolVerbs, _verb.name, _LazyMethod(PoolVerbs, _verb, _of_pool))
    setattr(ModelVerbs, _verb.name, _LazyMethod(ModelVerbs, _verb, _of_model))
