"""Makes programs start fast: names of a package are loaded at their first use, and garbage is collected seldom."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Mapping

_OURS = ("runtime_core", "weft")


def collect_seldom() -> None:
    """Collect this process's garbage seldom, and none when it exits.

    Only for Weft's own processes, at their start. Imports and loaded modules create much and drop little, and the
    interpreter looks through all of it before it exits.
    """
    gc.set_threshold(20_000, 20, 50)
    atexit.register(gc.freeze)


class _Hidden:
    """Hides a module from imports of this thread."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == self._module and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is not loaded here", name=fullname)


def load_redis() -> None:
    """Import redis-py without the metrics of OpenTelemetry's SDK.

    Where the SDK is installed, redis-py imports them for a type hint alone: almost half of the time of its import.
    If a program asks it for metrics, it imports them then.
    """
    if "redis" in sys.modules:
        return
    finder = _Hidden("opentelemetry.sdk.metrics")
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("redis")
    finally:
        sys.meta_path.remove(finder)


def loader(package: str, places: Mapping[str, str], extras: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """Return the `__getattr__` of a package.

    Args:
        package: The package's name.
        places: Public name → its module.
        extras: Public name → the extra of the wheel that installs the libraries it needs.
    """

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found: object = getattr(importlib.import_module(places[name]), name)
        except ModuleNotFoundError as error:
            extra = (extras or {}).get(name)
            if extra is None:
                raise
            raise needs_extra(f"{package}.{name}", extra, error) from error
        # The next use finds it without this function.
        vars(sys.modules[package])[name] = found
        return found

    return load


def needs_extra(what: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return an error that names the extra to install; the error for a missing module of Weft stays as it is."""
    missing = error.name or "a library"
    if missing.partition(".")[0] in _OURS:
        return error
    return ModuleNotFoundError(
        f"{what} needs {missing}, which is not installed: pip install 'weft[{extra}]'", name=missing
    )
