"""Rules of the broker's users: what `weft acl` prints, and the passwords that it keeps."""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path

import pytest

from runtime_core.bus.acl.rules import SERVERS, Target, digests, find_users, lacking, rules, user_line
from runtime_core.bus.acl.users import SERVICES, USERS, function_rights
from runtime_core.bus.library import FUNCTIONS
from runtime_core.cli.main import main
from runtime_core.errors import ConfigurationError
from runtime_core.host import service


def test_every_service_has_a_user_and_every_function_a_caller() -> None:
    assert {user.name for user in SERVICES} == set(service.SERVICES)
    called = {name for user in USERS.values() for name in user.called(2)}
    assert set(FUNCTIONS) - called == set(), "say in bus/acl/users.py who calls them"


def test_helpers_of_a_function_count_too() -> None:
    # `fork` calls `submit`, and `release` pops from lists whose names are variables.
    assert function_rights("submit").commands <= function_rights("fork").commands
    assert {"mail:", "nest:"} <= function_rights("commit_call").writes
    assert "xadd" in function_rights("commit_turn").commands
    assert function_rights("gateways").writes == frozenset()


def test_only_leaders_write_where_leaders_are_kept_and_only_consumers_may_take_work() -> None:
    for user in USERS.values():
        _, writes = user.keys(2)
        assert {key for key in writes if key.startswith("leader:")} == {f"leader:{role}" for role in user.leads}
        takes = [grant for grant in user.selectors() if "xreadgroup" in grant.commands]
        assert bool(takes) == (bool(user.serves) or user.name == "state-manager"), user.name
    handlers = [user for user in SERVICES if user.serves]
    assert {user.name for user in handlers} == set(service.SERVICES) - {"state-manager", "trajectory-recorder"}
    for user in handlers:
        assert not {"schedules", "scheduled"} & {key for keys in user.keys(2) for key in keys}


def test_an_older_server_gets_no_command_that_it_does_not_know() -> None:
    for server in SERVERS:
        target = Target(lacks=lacking(server))
        text = " ".join(" ".join(rules(user, target, [])) for user in USERS.values())
        assert ("waitaof" in text) == ("client|setinfo" in text) == (server != "redis-7.0")


def test_partitions_database_and_namespace_are_in_the_keys() -> None:
    [user] = find_users(["tool-handler"], ())
    assert "~weft:{??}:" not in user_line(user, Target(partitions=10), [])
    assert {"~weft:{?}:", "~weft:{??}:"} <= set(rules(user, Target(partitions=11), []))
    assert "+select" in rules(user, Target(database=3), [])
    # A namespace is a name and no pattern.
    assert r"%R~a\*:settings" in rules(user, Target(namespace="a*"), [])
    # Valkey's WAITAOF promises nothing under `everysec`, so the setting must be readable there.
    [manager] = find_users(["state-manager"], ())
    assert "+config|get" in rules(manager, Target(reads_config=True), [])
    assert "+config|get" not in rules(manager, Target(), [])


@pytest.mark.parametrize("name", ["Shop", "a:b", "a*", "", "admin", "default", "x" * 65, "a b"])
def test_a_publisher_has_its_own_plain_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match="a publisher cannot be named"):
        find_users((), [name])


def test_passwords_stay_in_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.env", tmp_path / "new.env"
    old.write_text("# of compose\nUSERS_FILE=./users.acl\nTOOL_HANDLER_PASSWORD=secret\n")
    known = digests([old], ["tool-handler", "shop"])
    assert known["tool-handler"] == [hashlib.sha256(b"secret").hexdigest()]
    assert digests([old], ["tool-handler", "shop"]) == known
    both = digests([new, old], ["shop"])["shop"]
    assert len(set(both)) == 2
    assert known["shop"] == both[1:]
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert main(["acl", "--user", "tool-handler", "--for", "redis-8", "--passwords", str(old)]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert known["tool-handler"][0] in printed
    old.write_text("secret\n")
    with pytest.raises(ConfigurationError, match=r"old\.env, line 1") as refused:
        digests([old], ["shop"])
    assert "secret" not in str(refused.value)


def test_rules_without_a_password_admit_no_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "--for", "redis-8", "--commands"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert re.search(r" reset on (#SHA256-OF-THE-PASSWORD|>probe) ", line), line
    assert main(["acl", "--for", "redis-6"]) == 1
    assert main(["acl", "--for", "redis-8", "--ask"]) == 1
    assert "give one of them" in capsys.readouterr().err
    assert main(["acl", "--user", "nobody"]) == 1
    assert "there is no user 'nobody'" in capsys.readouterr().err
