"""Finds the app that `WEFT_APP=package.module:app` names, and other objects that are named so."""

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

DEFAULT_RUNNER = "runtime_core.aworld.runner:TaskRunner"
"""By name, since runners stand on apps. It is loaded where tasks run, and not where an app is only looked at."""

_REFERENCE = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<attribute>\w+(\.\w+)*)")


def load_app(reference: str) -> App:
    """Import the module, find the app in it and check it.

    The current directory is searched first, as servers of web apps do. Raises ConfigurationError, one line, for
    whatever stands in the way.
    """
    found = find_app(reference)
    # What every app offers to those who submit a Task.
    runner = load_object("runner", DEFAULT_RUNNER)
    found.add_runner(cast("type[DeclaresRunner]", runner))
    found.check()
    return found


def find_app(reference: str, folder: str = "") -> App:
    """Import the module and find the app in it, without a look at what it declares.

    `folder` is searched first; empty: the current directory. Raises ConfigurationError as `load_app`.
    """
    found, module = _found("app", reference, folder)
    if not isinstance(found, App):
        raise ConfigurationError(
            f"app {reference!r} is not an App but of type {type(found).__name__}{_candidates(module, found, '')}"
        )
    return found


def load_object(what: str, reference: str) -> object:
    """What `package.module:name` names, found as the app is; `what` is what errors call it."""
    return _found(what, reference)[0]


def _found(what: str, reference: str, folder: str = "") -> tuple[object, ModuleType]:
    match = _REFERENCE.fullmatch(reference)
    if match is None or match["module"].endswith(".py"):
        raise ConfigurationError(f"{what} {reference!r} is not written as package.module:app{_spelling(reference)}")
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
    except ConfigurationError:  # a declaration that was refused: it says where itself
        raise
    except SyntaxError as error:
        raise ConfigurationError(
            f"{what} {reference!r} cannot be imported: {error.filename}:{error.lineno}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:  # importing runs the user's code: it may fail in any way
        where = _place(error, directory)
        if isinstance(error, ModuleNotFoundError) and where is None:
            raise ConfigurationError(
                f"{what} {reference!r}: there is no module {error.name!r} in {directory} or among the installed "
                "packages: start from the folder that holds it, or set PYTHONPATH"
            ) from None
        raise ConfigurationError(
            f"{what} {reference!r} cannot be imported: {where or name}: {one_line(error)}"
        ) from error


def _place(error: BaseException, directory: str) -> str | None:
    """The last `file:line` of the user's own code in the traceback, else the last one outside the importing."""
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
    """The apps of the module, else names like the wanted one, as the end of a message."""
    apps = sorted(name for name, value in vars(module).items() if isinstance(value, App))
    if apps:
        return f": its apps are {', '.join(apps)}"
    near = difflib.get_close_matches(wanted, dir(found), n=3) if wanted else []
    return f": did you mean {', '.join(near)}?" if near else ": write app = App('name') in it"


def _spelling(reference: str) -> str:
    """The likely spelling, as the end of a message."""
    module, _, attribute = reference.partition(":")
    module = module.removesuffix(".py").strip("./").replace("/", ".").replace(os.sep, ".")
    likely = f"{module}:{attribute or 'app'}"
    return f": did you mean {likely}?" if _REFERENCE.fullmatch(likely) else ""
