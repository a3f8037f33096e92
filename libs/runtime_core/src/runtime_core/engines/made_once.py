"""A class as an engine function: one object of it in each process, made by the first call."""

from __future__ import annotations

import functools
import inspect
import threading


class MadeOnce:
    """Calls the object of a class; reads as the function `__call__` of it."""

    def __init__(self, made: type) -> None:
        self.made = made
        self._lock = threading.Lock()
        self._object: object = None
        call = made.__call__
        functools.update_wrapper(self, call)
        self.__name__ = made.__name__
        self.__qualname__ = made.__qualname__
        self.__doc__ = inspect.getdoc(made) or inspect.getdoc(call)
        signature = inspect.signature(call)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, /, *arguments: object, **named: object) -> object:
        with self._lock:
            if self._object is None:
                self._object = self.made()
        return self._object(*arguments, **named)  # type: ignore[operator]  # whoever declares it looks for `__call__`

    def __reduce__(self) -> tuple[object, tuple[type]]:
        # In another process the object of that process is called: it may hold what cannot be sent, as a loaded model.
        return made_once, (self.made,)


@functools.cache
def made_once(made: type) -> MadeOnce:
    """The callable of a class, the same for all who ask in this process."""
    return MadeOnce(made)
