"""The list of mutants is valid: each anchor exists exactly once, and its replacement compiles."""

from __future__ import annotations

import ast
import socket

import hiredis
import pytest

from tests.mutants.commands import command
from tests.mutants.guards import MUTANTS
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


BY_FILE = {
    file: [mutant for mutant in MUTANTS if mutant.file == file] for file in {each.file: None for each in MUTANTS}
}


@pytest.mark.parametrize("file", BY_FILE)
def test_the_mutants_of_a_file_fit_it(file: str, valkey: Server) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    wrong = []
    for mutant in BY_FILE[file]:
        try:
            mutated = mutant.apply(source)
        except ValueError as error:
            wrong.append(str(error))
            continue
        if file.endswith(".py"):
            ast.parse(mutated)
        else:
            compile_lua(valkey, mutated)
        missing = [test for test in mutant.tests if command(test, ROOT) is None]
        wrong += [f"{mutant.id} names tests that do not exist: {test}" for test in missing]
    assert not wrong, "\n".join(wrong)
