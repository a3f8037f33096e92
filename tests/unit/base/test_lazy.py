"""Names that load on first use."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from runtime_core.base import lazy
from runtime_core.base.lazy import loader, needs_extra

SETTINGS = """
import gc, sys
from runtime_core.cli.main import main
from weft import App

def settings():
    return gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()

given = settings()
sys.argv[1:] = ["--version"]
main(["--version"])
assert settings() == given, "a program that imports Weft"
main()
assert settings()[2] > given[2], "the command's own process"
"""


def test_only_processes_of_weft_change_how_garbage_is_collected() -> None:
    ended = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


METRICS = """
import sys
from runtime_core.base.lazy import load_redis
from runtime_core.bus.connector import parse_address

parse_address("redis://127.0.0.1:6379").pool()
load_redis()
assert "redis.asyncio" in sys.modules
assert "opentelemetry.sdk.metrics" not in sys.modules, "as long to import as redis-py itself"
from opentelemetry.sdk.metrics import MeterProvider
assert not [each for each in sys.meta_path if "runtime_core" in str(each)]
"""


def test_the_client_of_redis_is_loaded_without_metrics_that_stay_importable() -> None:
    ended = subprocess.run([sys.executable, "-c", METRICS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_only_the_thread_that_loads_the_client_misses_the_metrics() -> None:
    finder = lazy._Hidden("json.decoder")
    with pytest.raises(ModuleNotFoundError, match=r"json\.decoder"):
        finder.find_spec("json.decoder")
    finder.find_spec("json.encoder")
    with ThreadPoolExecutor(1) as threads:
        threads.submit(finder.find_spec, "json.decoder").result()


def test_a_name_is_loaded_once_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("face_of_weft")
    monkeypatch.setitem(sys.modules, "face_of_weft", package)
    load = loader("face_of_weft", {"sqrt": "math"})
    assert load("sqrt") is vars(package)["sqrt"] is math.sqrt


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'nothing'"):
        loader("weft", {})("nothing")


def test_a_missing_library_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_a_library.py").write_text("import a_missing_library.part\nX = 1\nY = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load = loader("weft", {"X": "needs_a_library", "Y": "needs_a_library"}, {"X": "llm"})
    with pytest.raises(ModuleNotFoundError, match=r"weft\.X needs a_missing_library, .*: pip install 'weft\[llm\]'"):
        load("X")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'a_missing_library'"):
        load("Y")


def test_a_missing_module_of_weft_names_no_extra() -> None:
    broken = ModuleNotFoundError("No module named 'runtime_core.gone'", name="runtime_core.gone")
    assert needs_extra("weft.X", "llm", broken) is broken
