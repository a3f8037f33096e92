"""The environment of the embedded server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runtime_core.bus.embedded import JEMALLOC, MALLOC, tuned

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux")


def test_the_server_uses_jemalloc_where_the_machine_has_it(tmp_path: Path) -> None:
    library = tmp_path / "second" / JEMALLOC
    library.parent.mkdir()
    library.touch()

    found = tuned({"HOME": "/root"}, [str(tmp_path / "first"), str(library.parent)])

    assert found == {"HOME": "/root", "LD_PRELOAD": str(library)}


def test_without_jemalloc_the_servers_own_allocator_is_tuned(tmp_path: Path) -> None:
    assert tuned({"HOME": "/root"}, [str(tmp_path)]) == {"HOME": "/root", "GLIBC_TUNABLES": MALLOC}


@pytest.mark.parametrize(
    ("chosen", "given"),
    [
        ({"LD_PRELOAD": ""}, {"LD_PRELOAD": "", "GLIBC_TUNABLES": MALLOC}),
        ({"GLIBC_TUNABLES": "glibc.malloc.mxfast=0"}, {"GLIBC_TUNABLES": "glibc.malloc.mxfast=0"}),
    ],
)
def test_an_environment_that_chooses_an_allocator_keeps_it(
    tmp_path: Path, chosen: dict[str, str], given: dict[str, str]
) -> None:
    (tmp_path / JEMALLOC).touch()

    assert tuned(chosen, [str(tmp_path)]) == given
