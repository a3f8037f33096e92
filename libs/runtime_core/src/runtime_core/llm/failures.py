"""Classifies errors of a model's client: retry later, or give up with one clear line.

It finds the client's classes by name along their bases, so that this file loads without the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from runtime_core.base.text import shortened
from runtime_core.errors import StepError, WeftError
from runtime_core.telemetry.redaction import redactor

RATE_LIMITED = "RateLimited"
"""The type of a failure for which the provider requests a later retry, and of the error when patience runs out."""

_LONGEST_DETAIL = 300
"""The most characters of a provider's message that are shown."""


class ModelFailed(StepError):
    """A model call has failed permanently.

    `type` is the reason: WrongKey, UnknownModel, RequestRefused, ContextTooLong, QuotaUsedUp, RateLimited,
    ModelUnreachable, ModelOutage, WrongModelSettings, or the class of an error raised by the user's own function.
    """


class ConversationFailed(StepError):
    """A model's conversation has ended without an answer.

    `type` is the reason: OutputInvalid, ToolCallsInvalid, RepeatedCall, TurnLimit, HandoffLimit, ContentFiltered.
    """


class ModelProblem(WeftError):
    """Raised inside the step of a model call to fail it permanently. The class's name becomes the error's type."""

    remedy: ClassVar[str] = ""


class WrongKey(ModelProblem):
    """The provider rejects the key, or does not allow it to use this model."""

    remedy = (
        "set OPENAI_API_KEY, or the provider's own variable, or api_key= of the agent, to a key that may use this model"
    )


class UnknownModel(ModelProblem):
    """The provider has no such model, or nothing answers at this path."""

    remedy = "check model= and base_url= (an OpenAI-compatible URL mostly ends with /v1)"


class RequestRefused(ModelProblem):
    """The provider rejects the request."""

    remedy = "the same request would be refused again: check settings=, the tools' schemas and the messages"


class ContextTooLong(ModelProblem):
    """The request is longer than the model's window."""

    remedy = "give the agent a window=, as KeepRecent(max_tokens=…), or a smaller one"


class QuotaUsedUp(ModelProblem):
    """The account has no credit, or has used up its quota; waiting would not help."""

    remedy = "check the account's plan and billing with the provider"


class RateLimited(ModelProblem):
    """Rate limits delayed the call beyond the agent's patience or its task's time limit."""

    remedy = "raise rate_limit_patience_seconds= or the task's time limit, or ask for a higher limit"


class ModelUnreachable(ModelProblem):
    """No connection to the provider, after all attempts."""

    remedy = "check base_url= or OPENAI_BASE_URL, and that this process may connect there"


class ModelOutage(ModelProblem):
    """The provider failed or broke off its answer at every attempt."""

    remedy = "try the task again later, or raise the attempts of retry="


class WrongModelSettings(ModelProblem):
    """The client cannot be created, or cannot send this request."""

    remedy = "correct model=, base_url=, api_key= or settings= of the agent"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model and its provider for error messages, never with the key."""

    provider: str
    model: str
    base_url: str

    def __str__(self) -> str:
        at = f" at {self.base_url}" if self.base_url else ""
        return f"model {self.model!r} of {self.provider or 'an unknown provider'}{at}"


@dataclass(frozen=True, slots=True)
class Transient:
    """A transient failure: the call was not answered, and a retry may succeed."""

    type: str
    """RateLimited, ModelUnreachable or ModelOutage."""
    detail: str
    """The client's description of the failure."""
    after_seconds: float | None = None
    """The wait that the provider requested, in seconds; None if it gave none."""

    @property
    def rate_limited(self) -> bool:
        return self.type == RATE_LIMITED


class StreamBroken(WeftError):
    """Raised if a stream stalled or ended before the answer was complete."""


def classify(error: Exception, endpoint: Endpoint) -> Transient | ModelProblem | None:
    """Classify an error of the client. Return None for any other error, which propagates unchanged."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    detail = _detail(error)
    # Statuses that call for a retry, whatever class the client uses for them.
    if status in (408, 409, 425):
        return Transient("ModelOutage", detail, _retry_after(error))
    for name, verdict in _VERDICTS:
        if name in names:
            return verdict(error, detail, endpoint)
    return None


def final_error(later: Transient, endpoint: Endpoint, why: str) -> ModelProblem:
    """Return the error of a retryable call that is not retried any more."""
    return _problem(_ENDS[later.type], f"{later.detail}; {why}", endpoint)


def wrong_settings(detail: str, endpoint: Endpoint) -> ModelProblem:
    return _problem(WrongModelSettings, detail, endpoint)


def _problem(kind: type[ModelProblem], detail: str, endpoint: Endpoint) -> ModelProblem:
    return kind(f"{endpoint}: {detail}: {kind.remedy}")


def _final(kind: type[ModelProblem]) -> Verdict:
    return lambda error, detail, endpoint: _problem(kind, detail, endpoint)


def _later(kind: str) -> Verdict:
    return lambda error, detail, endpoint: Transient(kind, detail, _retry_after(error))


def _by_status(error: Exception, detail: str, endpoint: Endpoint) -> Transient | ModelProblem:
    """Classify an HTTP error for which the client has no class."""
    status = _status(error) or 0
    if status == 429:
        return Transient(RATE_LIMITED, detail, _retry_after(error))
    if status >= 500:
        return Transient("ModelOutage", detail, _retry_after(error))
    return _problem(RequestRefused, detail, endpoint)


Verdict = Callable[[Exception, str, Endpoint], Transient | ModelProblem]

_ENDS: dict[str, type[ModelProblem]] = {
    RATE_LIMITED: RateLimited,
    "ModelUnreachable": ModelUnreachable,
    "ModelOutage": ModelOutage,
}

_VERDICTS: tuple[tuple[str, Verdict], ...] = (
    ("StreamBroken", _later("ModelOutage")),
    # The client's class hierarchy, specific before general.
    ("ModelContextWindowExceededError", _final(ContextTooLong)),
    ("ModelQuotaExceededError", _final(QuotaUsedUp)),
    ("ModelRateLimitError", _later(RATE_LIMITED)),
    ("ModelAuthenticationError", _final(WrongKey)),
    ("ModelNotFoundError", _final(UnknownModel)),
    ("ModelRequestRejectedError", _final(RequestRefused)),
    ("ModelTimeoutError", _later("ModelOutage")),
    ("ModelConnectionError", _later("ModelUnreachable")),
    ("ModelUnavailableError", _later("ModelOutage")),
    ("ModelServerError", _later("ModelOutage")),
    ("ModelRequestTimeout", _later("ModelOutage")),
    ("ModelHTTPError", _by_status),
    ("ModelAPIError", _later("ModelOutage")),
    # An answer that is not JSON, has no content, or violates the API's schema.
    ("UnexpectedModelBehavior", _later("ModelOutage")),
    ("UserError", _final(WrongModelSettings)),
    # Transport errors that the client does not wrap, as in the middle of a stream.
    ("ConnectError", _later("ModelUnreachable")),
    ("TransportError", _later("ModelOutage")),
    ("DecodingError", _later("ModelOutage")),
    ("JSONDecodeError", _later("ModelOutage")),
    ("TimeoutError", _later("ModelOutage")),
    ("ConnectionError", _later("ModelUnreachable")),
)


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after(error: Exception) -> float | None:
    after = getattr(error, "retry_after", None)
    return float(after) if isinstance(after, int | float) and after >= 0 else None


def _detail(error: Exception) -> str:
    """Return one line with the status and the provider's message, without the rest of the body."""
    status = _status(error)
    body = getattr(error, "body", None)
    text = ""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        text = str(inner.get("message", "")) if isinstance(inner, Mapping) else str(inner)
    elif isinstance(body, str):
        text = body
    text = text or str(getattr(error, "message", "") or error) or type(error).__name__
    cause = error.__cause__
    if cause is not None and status is None:
        root = cause.__cause__ or cause
        if str(root) and str(root) not in text:
            text = f"{text} ({root})"
    # Redacted: providers quote parts of a wrong key in their answer.
    line = shortened(" ".join(redactor().start(text).split()), _LONGEST_DETAIL)
    return f"HTTP {status}: {line}" if status is not None else line
