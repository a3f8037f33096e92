"""Loads apps and other objects by references such as `package.module:app`."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from types import ModuleType
from typing import cast

from runtime_core.app.app import App, DeclaresRunner
from runtime_core.declare.declaration import one_line
from runtime_core.errors import ConfigurationError

DEFAULT_RUNNER = "runtime_core.facades.aworld.runner:TaskRunner"
"""By reference, since runners import apps. Only processes that run tasks load it."""

_REFERENCE = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<attribute>\w+(\.\w+)*)")


def load_app(reference: str) -> App:
    """Import the module, find its app and check it.

    Modules are searched first in the current directory. Raises ConfigurationError, on one line, for any failure.
    """
    found = find_app(reference)
    # Every app can run a submitted Task.
    runner = load_object("runner", DEFAULT_RUNNER)
    found.add_runner(cast("type[DeclaresRunner]", runner))
    found.check()
    return found


def find_app(reference: str, folder: str = "") -> App:
    """Import the module and find its app, without checking the declarations.

    Modules are searched first in `folder` (empty: the current directory). Raises ConfigurationError as `load_app`.
    """
    found, module = _found("app", reference, folder)
    if not isinstance(found, App):
        raise ConfigurationError(
            f"app {reference!r} is of type {type(found).__name__}, not App{_candidates(module, found, '')}"
        )
    return found


def load_object(what: str, reference: str) -> object:
    """Load the object that `package.module:name` names, as `load_app` does; errors call it `what`."""
    return _found(what, reference)[0]


def _found(what: str, reference: str, folder: str = "") -> tuple[object, ModuleType]:
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
            near = _candidates(module, found, part) if what == "app" else ""
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


def _candidates(module: ModuleType, found: object, wanted: str) -> str:
    """Return the module's apps, else similar names, as the end of a message."""
    apps = sorted(name for name, value in vars(module).items() if isinstance(value, App))
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
