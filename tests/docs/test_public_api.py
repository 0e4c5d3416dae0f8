"""The public API is what `public_api.txt` lists; it is typed, and the API page documents it.

`python -m tests.docs.test_public_api` writes the list anew.
"""

import inspect
import pathlib
import re
import types

import pytest

import dp_keras_opt
from dp_keras_opt.optimizers.catalog import CATALOG

LISTED = pathlib.Path(__file__).parents[1] / "public_api.txt"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "api.md"
NAME = dp_keras_opt.__name__
SPECIAL = ("__init__", "__call__", "__iter__", "__len__", "__getitem__")

#: Called from other rooms of the package, so without an underscore; no user needs them.
INTERNAL = {
    "ensure_built", "has_momentum", "need_batch_size", "takes_projection", "to_subspace",
}  # fmt: skip


class _Default:
    def __repr__(self):
        return "..."


def modules(module=dp_keras_opt):
    """The public modules: the package, and what `__all__` of one of them names."""
    yield module
    for name in getattr(module, "__all__", ()):
        if isinstance(getattr(module, name), types.ModuleType):
            yield from modules(getattr(module, name))


def exported():
    """(dotted name, object) of each public class, function and constant."""
    for module in modules():
        for name in getattr(module, "__all__", ()):
            if not isinstance(getattr(module, name), types.ModuleType):
                yield f"{module.__name__}.{name}", getattr(module, name)


def members(cls):
    """(name, attribute as the class body has it) of what a class has from this library.

    What it inherits from another public class without a change is listed there.
    """
    public = {thing for _, thing in exported() if inspect.isclass(thing)} - {cls}
    listed = {base for ancestor in cls.__mro__ if ancestor in public for base in ancestor.__mro__}
    found = {}
    for base in cls.__mro__:
        if not base.__module__.startswith(NAME) or base in listed:
            continue
        for name, attribute in vars(base).items():
            if name in INTERNAL or is_deprecated(attribute):
                continue
            if name == "__init__" and getattr(cls, "_is_protocol", False):  # of typing
                continue
            if name in SPECIAL or not name.startswith("_"):
                found.setdefault(name, attribute)
    return found


def is_deprecated(attribute):
    """Whether it is there for code of before: it works, warns, and will go."""
    return str(getattr(attribute, "__doc__", None)).startswith("Deprecated:")


def function_of(attribute):
    """The function behind a method or property; None for other attributes."""
    if isinstance(attribute, property):
        return attribute.fget
    attribute = getattr(attribute, "__func__", attribute)
    return attribute if inspect.isfunction(attribute) else None


def callables():
    """(dotted name, function) of every public function, method, constructor and property."""
    for name, thing in exported():
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for member, attribute in members(thing).items():
                if function_of(attribute):
                    yield f"{name}.{member}", function_of(attribute)


def parameters(function, bound):
    """The parameters in the order and with the markers of Python, defaults as `...`."""
    signature = inspect.signature(function)
    shown = [
        each.replace(
            annotation=each.empty,
            default=each.empty if each.default is each.empty else _Default(),
        )
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(shown[1:] if bound else shown))


def lines():
    """The list: a line a name, sorted."""
    found = [module.__name__ for module in modules()]
    for name, thing in exported():
        found.append(name + (parameters(thing, bound=False) if inspect.isfunction(thing) else ""))
        if not inspect.isclass(thing):
            continue
        if issubclass(thing, tuple):  # a NamedTuple
            found.append(f"{name}.__init__" + parameters(thing.__new__, bound=True))
        for member, attribute in members(thing).items():
            function = function_of(attribute)
            method = function and not isinstance(attribute, property)
            bound = not isinstance(attribute, staticmethod)
            found.append(f"{name}.{member}" + (parameters(function, bound) if method else ""))
    return sorted(found)


def documented():
    """The dotted names that docs/reference/api.md has autodoc document."""
    found, current = set(), NAME
    directive = re.compile(r"^\.\. (currentmodule|auto\w+|data):: ([\w.]+)", re.M)
    page = PAGE.read_text(encoding="utf-8")
    for kind, name in directive.findall(page):
        if kind == "currentmodule":
            current = name
        else:
            found.add(name if name.startswith(NAME) else f"{current}.{name}")
    if re.search(r"^\.\. catalogued-optimizers::", page, re.M):  # docs/conf.py
        found |= {f"{NAME}.optimizers.{entry.name}" for entry in CATALOG}
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_every_public_module_says_what_is_public(module):
    names = module.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)


def test_the_public_api_is_as_listed():
    now, before = lines(), LISTED.read_text(encoding="utf-8").splitlines()
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    assert now == before, (
        f"The public API has changed.\nGone: {gone}\nNew: {new}\nIf that is meant, run "
        "`python -m tests.docs.test_public_api`, and say so in CHANGELOG.md: users' code may break."
    )


def test_the_list_shows_what_breaks_users():
    """A renamed or dropped parameter, and one that has lost its default, change a line."""

    def before(a, b=1, *, c=2):
        return a, b, c

    def renamed(a, d=1, *, c=2):
        return a, d, c

    def required(a, b, *, c=2):
        return a, b, c

    assert parameters(before, bound=False) == "(a, b=..., *, c=...)"
    assert parameters(before, bound=True) == "(b=..., *, c=...)"
    assert len({parameters(f, bound=False) for f in (before, renamed, required)}) == 3


def test_every_public_name_is_documented():
    missing = sorted({name for name, _ in exported()} - documented())
    assert not missing, f"docs/reference/api.md does not document {missing}."


def test_every_public_callable_is_annotated():
    missing = []
    for name, function in callables():
        signature = inspect.signature(function)
        bound = "." in function.__qualname__
        unknown = [
            each.name
            for place, each in enumerate(signature.parameters.values())
            if each.annotation is each.empty
            and not (bound and place == 0 and each.name in ("self", "cls"))
        ]
        if signature.return_annotation is signature.empty:
            unknown.append("return")
        if unknown:
            missing.append(f"{name}: {', '.join(unknown)}")
    assert not missing, "These have no type:\n" + "\n".join(missing)


if __name__ == "__main__":
    LISTED.write_text("\n".join(lines()) + "\n", encoding="utf-8")
