"""The environment of the embedded server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest

from runtime_core.bus.embedded import MALLOC, MIMALLOC, EmbeddedServer, tuned
from runtime_core.bus.namespace import connect

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux")


def test_the_server_uses_mimalloc_where_it_is_installed(tmp_path: Path) -> None:
    library = tmp_path / "second" / MIMALLOC
    library.parent.mkdir(parents=True)
    library.touch()

    found = tuned({"HOME": "/root"}, [str(tmp_path / "first"), str(tmp_path / "second")])

    assert found == {"HOME": "/root", "LD_PRELOAD": str(library)}


def test_without_mimalloc_the_servers_own_allocator_is_tuned(tmp_path: Path) -> None:
    assert tuned({"HOME": "/root"}, [str(tmp_path)]) == {"HOME": "/root", "GLIBC_TUNABLES": MALLOC}


async def test_the_installed_mimalloc_is_in_the_servers_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ("LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(chosen, raising=False)
    server = EmbeddedServer(tmp_path)
    await server.start()
    try:
        transport = await connect(server.url)
        told = cast(bytes, await transport.call("INFO", "server")).decode()
        await transport.close()
        pid = next(line.partition(":")[2] for line in told.splitlines() if line.startswith("process_id:"))
        mapped = Path("/proc", pid, "maps").read_text()
    finally:
        await server.stop()

    assert MIMALLOC in mapped


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
    library = tmp_path / MIMALLOC
    library.parent.mkdir(parents=True)
    library.touch()

    assert tuned(chosen, [str(tmp_path)]) == given
