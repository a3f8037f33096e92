"""What follows each error of the client. The errors are the client's own."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import exceptions as client

from runtime_core.llm.failures import (
    ContextTooLong,
    Endpoint,
    ModelOutage,
    ModelProblem,
    QuotaUsedUp,
    RequestRefused,
    StreamBroken,
    Transient,
    UnknownModel,
    WrongKey,
    WrongModelSettings,
    classify,
    final_error,
)

ENDPOINT = Endpoint("openai", "gpt-x", "http://127.0.0.1:1/v1")


def http(status: int, category: Any = None, **more: Any) -> client.ModelHTTPError:
    return client.ModelHTTPError.for_category(category, status_code=status, model_name="gpt-x", **more)


@pytest.mark.parametrize(
    ("error", "kind", "after"),
    [
        (http(429, client.ModelRateLimitError, headers={"Retry-After": "7"}), "RateLimited", 7.0),
        (http(429, client.ModelRateLimitError, headers={"retry-after-ms": "1500"}), "RateLimited", 1.5),
        (http(429, client.ModelRateLimitError), "RateLimited", None),
        (http(429), "RateLimited", None),
        (http(500, client.ModelServerError), "ModelOutage", None),
        (http(529, client.ModelOverloadedError, headers={"retry-after": "3"}), "ModelOutage", 3.0),
        (http(502), "ModelOutage", None),
        (http(408, client.ModelRequestRejectedError), "ModelOutage", None),
        (http(409, client.ModelRequestRejectedError), "ModelOutage", None),
        (http(425), "ModelOutage", None),
        (client.ModelConnectionError("gpt-x", "refused"), "ModelUnreachable", None),
        (client.ModelTimeoutError("gpt-x", "too slow"), "ModelOutage", None),
        (client.ModelRequestTimeout("gpt-x", 5.0), "ModelOutage", None),
        (client.ModelAPIError("gpt-x", "broke off"), "ModelOutage", None),
        (client.UnexpectedModelBehavior("no JSON"), "ModelOutage", None),
        (StreamBroken("silent"), "ModelOutage", None),
        (TimeoutError(), "ModelOutage", None),
        (ConnectionResetError("reset"), "ModelUnreachable", None),
    ],
)
def test_transient_errors_are_distinguished_from_permanent_ones(
    error: Exception, kind: str, after: float | None
) -> None:
    verdict = classify(error, ENDPOINT)
    assert isinstance(verdict, Transient)
    assert (verdict.type, verdict.after_seconds) == (kind, after)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (http(401, client.ModelAuthenticationError), WrongKey),
        (http(403, client.ModelAuthenticationError), WrongKey),
        (http(404, client.ModelNotFoundError), UnknownModel),
        (http(400, client.ModelRequestRejectedError), RequestRefused),
        (http(422), RequestRefused),
        (http(429, client.ModelQuotaExceededError), QuotaUsedUp),
        (http(400, client.ModelContextWindowExceededError), ContextTooLong),
        (client.UserError("no such thing"), WrongModelSettings),
    ],
)
def test_a_permanent_error_names_the_endpoint_and_the_remedy(error: Exception, kind: type[ModelProblem]) -> None:
    verdict = classify(error, ENDPOINT)
    assert type(verdict) is kind
    assert str(verdict).startswith("model 'gpt-x' of openai at http://127.0.0.1:1/v1: ")
    assert str(verdict).endswith(kind.remedy)


def test_a_foreign_error_passes_through() -> None:
    assert classify(ZeroDivisionError("theirs"), ENDPOINT) is None


def test_a_message_is_one_line_without_keys_and_not_endless() -> None:
    body = {"error": {"message": "wrong key\n sk-abcdefghijklmnopqrstuvwxyz0123 " + "x" * 5_000}}
    verdict = classify(http(401, client.ModelAuthenticationError, body=body), ENDPOINT)
    text = str(verdict)
    assert "\n" not in text
    assert "abcdefghijklmnop" not in text
    assert len(text) < 700
    assert "HTTP 401: wrong key" in text


def test_a_key_at_the_end_of_a_shortened_message_is_not_shown_in_half() -> None:
    key = "sk-" + "abcdefghijklmnopqrstuvwxyz0123"
    for spaces in range(20):
        body = {"error": {"message": "x" * (295 - spaces) + f" {key} and more" * 3}}
        text = str(classify(http(401, client.ModelAuthenticationError, body=body), ENDPOINT))
        assert "sk-" not in text


def test_giving_up_says_why() -> None:
    error = final_error(Transient("ModelOutage", "HTTP 503: down"), ENDPOINT, "tried 8 times")
    assert type(error) is ModelOutage
    assert "HTTP 503: down; tried 8 times: " in str(error)
