"""Which calls need a human's approval."""

from __future__ import annotations

from datetime import timedelta

import pytest

from runtime_core.llm.agent import MatchedRule, applicable_rule, matching_rules
from weft import Approve
from weft.errors import ConfigurationError


def test_a_rule_fits_by_the_name_of_the_tool() -> None:
    rules = [Approve("delete_*"), Approve("files.write")]
    assert matching_rules(rules, "delete_all", {}) == [MatchedRule()]
    assert matching_rules(rules, "files.write", {}) == [MatchedRule()]
    assert matching_rules(rules, "search", {}) == []


def test_a_rule_fits_by_the_arguments() -> None:
    rules = [Approve("pay", when=lambda arguments: arguments["amount"] > 100)]
    assert matching_rules(rules, "pay", {"amount": 101}) == [MatchedRule()]
    assert matching_rules(rules, "pay", {"amount": 100}) == []


def test_a_failing_condition_of_an_approval_asks() -> None:
    assert matching_rules([Approve("pay", when=lambda arguments: arguments["amount"] > 100)], "pay", {}) == [
        MatchedRule()
    ]


def test_a_rule_of_cost_waits_for_its_cost() -> None:
    [rule] = matching_rules([Approve(cost_over=1.0)], "anything", {})
    assert applicable_rule([rule], 1.0) is None
    assert applicable_rule([rule], 1.01) == rule


def test_the_first_rule_that_asks_says_how_long() -> None:
    rules = [Approve("a", cost_over=5, timeout=1), Approve("a", timeout=timedelta(days=2), default=False), Approve("a")]
    found = matching_rules(rules, "a", {})
    assert found == [MatchedRule(5.0, 1.0), MatchedRule(None, 172_800.0, False)]
    assert applicable_rule(found, 0.0) == found[1]
    assert applicable_rule(found, 6.0) == found[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pattern": ""}, "pattern"),
        ({"when": "always"}, "when"),
        ({"cost_over": -1}, "cost_over"),
        ({"cost_over": True}, "cost_over"),
        ({"timeout": "1 day"}, "timeout"),
        ({"default": "maybe"}, "default"),
    ],
)
def test_a_rule_that_cannot_work_names_the_argument(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Approve(**arguments)  # type: ignore[arg-type]  # wrong on purpose
