"""Loads objects by references such as `package.module:app`."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from types import ModuleType

from runtime_core.declare.declaration import one_line
from runtime_core.errors import ConfigurationError

_REFERENCE = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<attribute>\w+(\.\w+)*)")


def load_object(what: str, reference: str, folder: str = "", kind: type[object] = object) -> object:
    """Import the module of `package.module:name` and return the object, which must be an instance of `kind`.

    Modules are searched first in `folder` (empty: the current directory). Raises ConfigurationError, on one line, for
    any failure; `what` is the object's name in it.
    """
    found, module = _found(what, reference, folder, kind)
    if not isinstance(found, kind):
        raise ConfigurationError(
            f"{what} {reference!r} is of type {type(found).__name__}, not App{_candidates(module, found, '', kind)}"
        )
    return found


def _found(what: str, reference: str, folder: str, kind: type[object]) -> tuple[object, ModuleType]:
    match = _REFERENCE.fullmatch(reference)
    if match is None or match["module"].endswith(".py"):
        raise ConfigurationError(f"{what} {reference!r} is not of the form package.module:app{_spelling(reference)}")
    module_name, attribute = match["module"], match["attribute"]
    directory = folder or os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module = _imported(what, reference, module_name, directory)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = _candidates(module, found, part, kind) if kind is not object else ""
            raise ConfigurationError(f"{what} {reference!r}: {module_name} has no {part!r}{near}")
        found = getattr(found, part)
    return found, module


def _imported(what: str, reference: str, name: str, directory: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigurationError:  # an invalid declaration, whose message has the place
        raise
    except SyntaxError as error:
        raise ConfigurationError(
            f"{what} {reference!r} cannot be imported: {error.filename}:{error.lineno}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        where = _place(error, directory)
        if isinstance(error, ModuleNotFoundError) and where is None:
            raise ConfigurationError(
                f"{what} {reference!r}: there is no module {error.name!r} in {directory} or among the installed "
                "packages: run in the folder that contains it, or set PYTHONPATH"
            ) from None
        raise ConfigurationError(
            f"{what} {reference!r} cannot be imported: {where or name}: {one_line(error)}"
        ) from error


def _place(error: BaseException, directory: str) -> str | None:
    """Return the last `file:line` in the user's code, else the last one outside the import system."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and not _imports(frame.filename)
    ]
    own = [f for f in frames if f.filename.startswith(directory + os.sep) and "site-packages" not in f.filename]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else None


def _imports(filename: str) -> bool:
    return filename in (__file__, importlib.__file__)


def _candidates(module: ModuleType, found: object, wanted: str, kind: type[object]) -> str:
    """Return the module's apps, else similar names, as the end of a message."""
    apps = sorted(name for name, value in vars(module).items() if isinstance(value, kind))
    if apps:
        return f"; its apps are {', '.join(apps)}"
    near = difflib.get_close_matches(wanted, dir(found), n=3) if wanted else []
    return f": did you mean {', '.join(near)}?" if near else ": add app = App('name') to it"


def _spelling(reference: str) -> str:
    """Return the likely spelling, as the end of a message."""
    module, _, attribute = reference.partition(":")
    module = module.removesuffix(".py").strip("./").replace("/", ".").replace(os.sep, ".")
    likely = f"{module}:{attribute or 'app'}"
    return f": did you mean {likely}?" if _REFERENCE.fullmatch(likely) else ""
