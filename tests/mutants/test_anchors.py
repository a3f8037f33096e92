"""The list of mutants is valid: each anchor exists exactly once, and its replacement compiles."""

from __future__ import annotations

import ast
import socket

import hiredis
import pytest

from tests.mutants.commands import command
from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.scratch import ROOT
from tests.servers.process import HOST, Server


def compile_lua(server: Server, source: str) -> None:
    """Make the server compile a script without running it."""
    with socket.create_connection((HOST, server.port)) as connection:
        connection.sendall(hiredis.pack_command(("SCRIPT", "LOAD", source)))  # type: ignore[arg-type]  # its stub wants one-element tuples
        answer = connection.recv(4096)
    assert answer.startswith(b"$"), answer.decode()


def test_ids_are_unique() -> None:
    ids = [mutant.id for mutant in MUTANTS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_fits_the_tree(mutant: Mutant, valkey: Server) -> None:
    mutated = mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
    if mutant.file.endswith(".py"):
        ast.parse(mutated)
    else:
        compile_lua(valkey, mutated)
    for test in mutant.tests:
        assert command(test, ROOT) is not None, f"{mutant.id} names tests that do not exist: {test}"
