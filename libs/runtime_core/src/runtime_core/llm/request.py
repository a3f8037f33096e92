"""A request to a model as the record keeps it: its messages as JSON, and the estimate of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition
from pydantic_core import to_jsonable_python

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.tokens import EstimateErrors, Message, estimate_tokens, tokens_of_json
from runtime_core.wire import codec


def messages_of(given: Sequence[Message]) -> list[ModelMessage]:
    """Decode messages. Raises ValidationError."""
    return ModelMessagesTypeAdapter.validate_json(codec.encode(given))


def messages_json(messages: Sequence[ModelMessage]) -> list[Message]:
    return cast(list[Message], ModelMessagesTypeAdapter.dump_python(list(messages), mode="json"))


def request_json(
    messages: Sequence[ModelMessage], model: str, settings: object, parameters: ModelRequestParameters
) -> dict[str, Any]:
    """Return a request as the record keeps it. Equal messages have equal bytes in every request."""
    written = messages_json(messages)
    for message in written:
        if message.get("kind") == "request":
            # The replaying process sets these from its clock. Messages of the model keep their time.
            message.pop("timestamp", None)
            for part in message.get("parts", ()):
                part.pop("timestamp", None)
    request: dict[str, Any] = {"messages": written, "model": model}
    if settings:
        request["settings"] = to_jsonable_python(settings, serialize_unknown=True)
    if tools := [
        {"name": tool.name, "description": tool.description or "", "arguments": tool.parameters_json_schema}
        for tool in (*parameters.function_tools, *parameters.output_tools)
    ]:
        request["tools"] = tools
    if parameters.output_mode != "text":
        request["output"] = {"mode": parameters.output_mode}
        if parameters.output_object is not None:
            request["output"]["schema"] = parameters.output_object.json_schema
    return request


def with_tools(parameters: ModelRequestParameters, tools: Sequence[Mapping[str, Any]]) -> ModelRequestParameters:
    """Return the parameters with the tools of a request that a hook changed."""
    outputs = {tool.name: tool for tool in parameters.output_tools}
    known = {tool.name: tool for tool in parameters.function_tools} | outputs
    made = [
        replace(
            known.get(tool["name"], ToolDefinition(name=tool["name"])),
            description=tool.get("description"),
            parameters_json_schema=tool["arguments"],
        )
        for tool in tools
    ]
    return replace(
        parameters,
        function_tools=[tool for tool in made if tool.name not in outputs],
        output_tools=[tool for tool in made if tool.name in outputs],
    )


def label_of(model: object) -> str:
    """Return the name of a model that is not open."""
    if isinstance(model, str):
        return model
    name = getattr(model, "model_id", None) or getattr(model, "__qualname__", None)
    return str(name or type(model).__qualname__)


def corrected_tokens(settings: ModelSettings, errors: EstimateErrors, request: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request, corrected by the errors of earlier estimates."""
    return int(errors.corrected(request["model"], estimated_tokens(settings, request)))


def estimated_tokens(settings: ModelSettings, request: Mapping[str, Any]) -> int:
    return (settings.estimate or estimate_tokens)(request["messages"]) + overhead_tokens(request)


def overhead_tokens(request: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request's tools and output schema."""
    schema = request.get("output", {}).get("schema")
    return tokens_of_json([*request.get("tools", ()), *([schema] if schema else ())])
