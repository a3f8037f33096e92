"""The requirements of the local Spark Connect server, checked before it starts; this needs no Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.engines.protocol import Away
from runtime_core.engines.spark.connect import address_of, answers, java_checked
from tests.servers.process import free_port


def test_java_is_found_as_sparks_scripts_find_it(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    assert java_checked({"JAVA_HOME": str(tmp_path), "PATH": ""}) == str(java)
    assert java_checked({"PATH": str(java.parent)}) == str(java)


def test_missing_java_is_reported_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        Away,
        match=r"^there is no Java; Spark needs Java 17 or newer: install it, .*WEFT_SPARK_REMOTE to a running server$",
    ):
        java_checked({"PATH": str(tmp_path)})
    with pytest.raises(Away, match=r"^JAVA_HOME='.*' has no bin/java; Spark needs Java 17"):
        java_checked({"JAVA_HOME": str(tmp_path)})


def test_the_address_of_a_server_is_parsed() -> None:
    assert address_of("sc://spark:15555/;token=x") == ("spark", 15555)
    assert address_of("sc://spark") == ("spark", 15002)
    assert address_of("sc://[::1]:7/") == ("::1", 7)
    for wrong in ("spark:15002", "http://spark", "sc://", "sc://spark:many", "local"):
        with pytest.raises(Away, match=r"is not the address of a Spark Connect server: write sc://host:15002"):
            address_of(wrong)


async def test_a_port_without_a_listener_does_not_answer() -> None:
    assert not await answers("127.0.0.1", free_port())
