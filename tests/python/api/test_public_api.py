"""Public names: a committed snapshot, generated stubs, and names of earlier releases."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import _renamed
from mpool import _stubs as stubs
from mpool.models.spec import ModelDescription, ModelSpec
from mpool.tasks import verbs
from mpool.tasks.options import CallOptions, names_of

SNAPSHOT = Path(__file__).with_name("public_api.json")
RENAMED = {"Picture": "GeneratedImage", "Pictures": "GeneratedImages", "PictureStep": "ImageStep",
           "PictureStream": "ImageStream"}


def described(value: Any) -> Any:
    """Describe a public object by its kind and signature, and a class also by its public members."""
    if inspect.ismodule(value):
        return {"kind": "module", "names": sorted(getattr(value, "__all__", ()))}
    if inspect.isclass(value):
        inspect.getmembers(value)  # builds the methods that the class defers to their first use
        members = {name: described_member(member) for name, member in inspect.getmembers_static(value)
                   if not name.startswith("_") and not inspect.ismemberdescriptor(member)}
        bases = [base.__name__ for base in value.__mro__[1:-1]]
        return {"kind": "class", "signature": signature(value), "bases": bases, "members": members}
    if callable(value):
        return {"kind": "function", "signature": signature(value)}
    return {"kind": type(value).__name__}


def described_member(member: Any) -> str:
    if isinstance(member, property):
        return "property"
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return signature(member) if callable(member) else type(member).__name__


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "?"


def current() -> dict[str, Any]:
    found = {name: described(getattr(mpool, name)) for name in sorted(mpool.__all__)}
    found |= {f"aio.{name}": described(getattr(mpool.aio, name)) for name in sorted(mpool.aio.__all__)}
    return json.loads(json.dumps(found))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="members that Python adds differ between its versions")
def test_public_names_match_the_snapshot() -> None:
    """After an intended change, ``python tests/python/api/test_public_api.py`` updates the snapshot."""
    known, now = json.loads(SNAPSHOT.read_text("utf-8")), current()
    assert sorted(known) == sorted(now)
    assert {name: (known[name], now[name]) for name in known if known[name] != now[name]} == {}


def test_stubs_are_up_to_date() -> None:
    stale = [path.name for path, text in stubs.stubs().items() if path.read_text("utf-8") != text]
    assert not stale, "run python -m mpool._stubs"


@pytest.mark.parametrize("name", verbs.VERBS)
def test_every_form_of_a_verb_takes_the_same_options(name: str) -> None:
    verb = verbs.VERBS[name]
    forms = [getattr(mpool, name), getattr(mpool.Pool, name), getattr(mpool.aio, name)]
    if not name.startswith("describe"):
        forms.append(getattr(mpool.Model, name))
    for form in forms:
        taken = set(inspect.signature(form).parameters)
        assert set(names_of(verb.options)) <= taken
        assert "options" not in taken and "keywords" not in taken and form.__name__ == name
    text = inspect.getdoc(getattr(mpool, name)) or ""
    assert all(f"{option}:" in text or f"``{option}``" in text for option in names_of(verb.options))
    assert all(f"{found}: " in text for found in inspect.signature(CallOptions).parameters)


@pytest.mark.parametrize("name", verbs.VERBS)
def test_an_unknown_option_has_one_error(name: str) -> None:
    verb = verbs.VERBS[name]
    values = ["x"] * sum(slot.default is verbs.REQUIRED for slot in verb.positional)
    with mpool.Pool() as pool:
        for ask in (lambda: getattr(mpool, name)(*values, tiemout=3), lambda: getattr(pool, name)(*values, tiemout=3),
                    lambda: getattr(mpool.aio, name)(*values, tiemout=3)):
            with pytest.raises(mpool.InvalidArgument, match=rf"`tiemout` is not an option of {name}; did you mean `ti"
                                                            "meout`") as caught:
                ask()
            assert caught.value.param == "tiemout"


def test_arguments_by_position() -> None:
    for wrong in (lambda: mpool.embed(), lambda: mpool.embed("a", inputs="b"), lambda: mpool.embed("a", None, 3),
                  lambda: mpool.get("all-MiniLM-L6-v2").embed("a", model="x")):
        with pytest.raises(TypeError):
            wrong()


def test_wrapped_lines_of_stubs_keep_every_word() -> None:
    """A parameter that is longer than a line, or has hyphens, is not split."""
    parameters = ["self", *(f"option_{n}: Literal['a-b-c', 'd e'] = 'a-b-c'" for n in range(6)),
                  f"long: Literal[{', '.join(repr('x-' * n) for n in range(30))}] = ''", "last: int = 1"]
    text = stubs._definition("    ", "def f", parameters, "None")
    assert text.replace(" ", "").replace("\n", "") == f"def f({', '.join(parameters)}) -> None: ...".replace(" ", "")
    lines = text.split("\n")
    assert len(lines) >= 5 and all(any(one in line for line in lines) for one in parameters)


def run(code: str) -> None:
    """Run a program in a new process, which has not imported mpool."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- old names -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_are_the_same_objects(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"mpool.{old} is now mpool.{new}"):
        assert getattr(mpool, old) is getattr(mpool, new)
    assert old not in mpool.__all__ and new in mpool.__all__


def test_old_modules() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import mpool
    from mpool.catalog import parse_reference
    from mpool.text import ChatTemplate
    import mpool.conversation.template, mpool.models
    assert parse_reference is mpool.models.parse_reference and ChatTemplate is mpool.conversation.template.ChatTemplate
    assert mpool.models.__spec__.name == "mpool.models"
    from mpool.aio import AsyncPictureStream
    assert AsyncPictureStream is mpool.aio.AsyncImageStream
    from mpool import Picture
    assert Picture is mpool.GeneratedImage
assert {"mpool.catalog is now mpool.models", "mpool.text is now mpool.tokenizers", "mpool.Picture is now "
        "mpool.GeneratedImage"} <= {str(one.message) for one in warned}, [str(one.message) for one in warned]
assert all(one.category is DeprecationWarning for one in warned)
"""
    run(code)


def test_old_modules_have_the_names_of_each_new_module() -> None:
    code = """
import warnings
from importlib import import_module
from mpool import _renamed
warnings.simplefilter("ignore")
for old, homes in _renamed.MODULES.items():
    module = import_module(f"mpool.{old}")
    for home in homes:
        target = import_module(f"mpool.{home}")
        own = [name for name, value in vars(target).items() if getattr(value, "__module__", "").startswith("mpool.")]
        for name in own:
            if not name.startswith("__"):
                assert getattr(module, name) is getattr(target, name), (old, home, name)
        assert own, home
    assert not hasattr(module, "__all__") and not hasattr(module, "__path__"), old
    try:
        module.no_such_name
    except AttributeError as error:
        assert str(error) == f"module 'mpool.{old}' has no attribute 'no_such_name'", error
    else:
        raise AssertionError(old)
"""
    run(code)


@pytest.mark.parametrize(("module", "name", "new"), [
    ("mpool.pictures", "Picture", "GeneratedImage"), ("mpool.pictures", "Pictures", "GeneratedImages"),
    ("mpool.tasks.images_result", "PictureStep", "ImageStep"), ("mpool.captures", "CaptureRecord", "CaptureRecord"),
    ("mpool.debug.captures", "CaptureRecord", "CaptureRecord"), ("mpool.reranking", "Ranking", "Ranking")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pickles_of_old_names_load(module: str, name: str, new: str) -> None:
    assert pickle.loads(f"c{module}\n{name}\n.".encode()) is getattr(mpool, new)


def test_old_attributes_warn() -> None:
    step = mpool.ImageStep(1, 4, 2)
    with pytest.warns(DeprecationWarning, match="ImageStep.picture is now ImageStep.index") as warned:
        assert step.picture == 2  # type: ignore[attr-defined]
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="GeneratedImages.pictures is now GeneratedImages.results"):
        assert mpool.GeneratedImages((), 1, "m").pictures == ()  # type: ignore[attr-defined]
    description = ModelDescription("m", "m", "text_to_image", ModelSpec("flux", (), {}, ()))
    for old, new in _renamed.ATTRIBUTES["ModelDescription"].items():
        with pytest.warns(DeprecationWarning, match=f"ModelDescription.{old} is now ModelDescription.{new}"):
            assert getattr(description, old) == getattr(description, new)
    with pytest.raises(AttributeError, match="'ImageStep' object has no attribute 'pictur'"):
        step.pictur  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(step)) == copy.deepcopy(step) == step


def test_pickles_of_results_with_old_attributes_load() -> None:
    old = mpool.GeneratedImages.__new__(mpool.GeneratedImages)
    old.__dict__.update(pictures=(), seed=1, model="m")
    assert pickle.loads(pickle.dumps(old)) == mpool.GeneratedImages((), 1, "m")
    step = mpool.ImageStep.__new__(mpool.ImageStep)
    step.__dict__.update(step=1, steps=4, picture=2, preview=None)
    assert pickle.loads(pickle.dumps(step)) == mpool.ImageStep(1, 4, 2)


def test_import_is_light() -> None:
    code = "import sys, mpool; assert 'numpy' not in sys.modules and 'asyncio' not in sys.modules"
    run(code)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n", "utf-8")
