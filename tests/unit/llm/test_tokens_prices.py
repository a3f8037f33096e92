"""The table of prices."""

from __future__ import annotations

import pytest

from runtime_core.errors import ConfigurationError
from runtime_core.llm.tokens import Price, price_of

CHEAP, DEAR, ANY = Price(1.0, 2.0), Price(10.0, 20.0, 5.0), Price(3.0, 3.0)


def test_the_cost_of_a_million_tokens_of_each_kind() -> None:
    assert DEAR.cost(1_000_000, 0) == 10.0
    assert DEAR.cost(1_000_000, 0, cached_tokens=1_000_000) == 5.0
    assert DEAR.cost(0, 1_000_000) == 20.0
    assert CHEAP.cost(500_000, 500_000, cached_tokens=250_000) == 1.5, "cached input costs as any where nothing is said"


@pytest.mark.parametrize(
    ("names", "price"),
    [
        (("gpt-x",), DEAR),
        (("openai-chat:gpt-x",), DEAR),
        (("gpt-x-2026-11-01", "openai-chat:gpt-x"), DEAR),
        (("gpt-x-mini-2026",), CHEAP),
        (("other",), ANY),
    ],
)
def test_names_precede_patterns_and_longer_patterns_shorter_ones(names: tuple[str, ...], price: Price) -> None:
    assert price_of({"*": ANY, "gpt-x-mini*": CHEAP, "gpt-x": DEAR}, *names) is price


def test_an_unknown_model_has_no_price() -> None:
    assert price_of({"gpt-*": CHEAP}, "claude", "anthropic:claude") is None


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), True, "1"])
def test_a_price_is_a_number(price: float) -> None:
    with pytest.raises(ConfigurationError, match=r"Price\.output is"):
        Price(input=1.0, output=price)


def test_a_table_holds_prices() -> None:
    with pytest.raises(ConfigurationError, match=r"prices\['gpt-x'\] is 3"):
        price_of({"gpt-x": 3}, "gpt-x")
