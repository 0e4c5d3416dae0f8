"""Names that were renamed: the old one works for two minor versions, and warns."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Says that `old` is called `new` now, to whoever called the function that calls this."""
    warnings.warn(
        f"{old} is deprecated and will go two minor versions from now. Use {new}.",
        FutureWarning,  # shown by default: users of notebooks never see a DeprecationWarning
        stacklevel=stacklevel,
    )


def renamed_arguments(**new_names: str) -> Callable[[_Function], _Function]:
    """Decorator: the function takes arguments by their old names, too.

    Args:
        **new_names: the new name of each argument, by its old one.

    Raises:
        TypeError: by the decorated function, where an argument is given by both names.
    """

    def decorate(function):
        @functools.wraps(function)
        def renaming(*args, **kwargs):
            for old, new in new_names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(
                            f"{function.__qualname__} received {new} twice: {old} is its old name."
                        )
                    warn(f"{function.__qualname__}({old}=...)", f"{new}=...")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """A property that reads and sets the attribute `new` under the name `old`.

    `new` may be of an attribute: "budget.limit"; then it can be read only.
    """

    def read(self: Any) -> Any:
        warn(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return operator.attrgetter(new)(self)

    def write(self: Any, value: Any) -> None:
        warn(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        setattr(self, new, value)

    return property(read, write, doc=f"Deprecated: use `{new}`.")


def unlisted_attributes(**new_names: str) -> Callable[[Any, str], Any]:
    """The `__getattr__` of a class whose attributes were renamed; for what Keras saves.

    A `renamed_attribute` would be listed by `dir`, each of which Keras reads when it saves, and so
    warn every time.

    Args:
        **new_names: the new name of each attribute, by its old one.
    """

    def __getattr__(self, name):
        if name not in new_names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn(f"{type(self).__name__}.{name}", f"{type(self).__name__}.{new_names[name]}")
        return getattr(self, new_names[name])

    return __getattr__


def renamed_names(module: str, new_names: Mapping[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names were renamed.

    Args:
        module: the module's name.
        new_names: by the old name, the object that is called otherwise now.
    """

    def __getattr__(name):
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = new_names[name]
        warn(f"{module}.{name}", f"{found.__module__}.{found.__qualname__}")
        return found

    return __getattr__


def renamed_attributes(**new_names: str) -> Callable[[_Class], _Class]:
    """Decorator: a class has attributes by their old names, too.

    Args:
        **new_names: the new name of each attribute, by its old one.
    """

    def decorate(cls):
        for old, new in new_names.items():
            setattr(cls, old, renamed_attribute(old, new))
        return cls

    return decorate


def renamed_fields(**new_names: str) -> Callable[[_Class], _Class]:
    """Decorator: a named tuple takes and has fields by their old names, too.

    Args:
        **new_names: the new name of each field, by its old one.
    """

    def decorate(cls):
        cls.__new__ = staticmethod(renamed_arguments(**new_names)(cls.__new__))
        cls._replace = renamed_arguments(**new_names)(cls._replace)
        return renamed_attributes(**new_names)(cls)

    return decorate
