"""Agents that a language model drives: windows, prices, usage and failures. The extra `llm` has the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.llm.failures import ModelFailed
    from runtime_core.llm.tokens import KeepAll, KeepRecent, Price, Summarise
    from runtime_core.runs.model_step import ModelCall
    from runtime_core.wire.step import Usage

__all__ = [
    "KeepAll",
    "KeepRecent",
    "ModelCall",
    "ModelFailed",
    "Price",
    "Summarise",
    "Usage",
]

_PLACES = {
    "KeepAll": "runtime_core.llm.tokens",
    "KeepRecent": "runtime_core.llm.tokens",
    "ModelCall": "runtime_core.runs.model_step",
    "ModelFailed": "runtime_core.llm.failures",
    "Price": "runtime_core.llm.tokens",
    "Summarise": "runtime_core.llm.tokens",
    "Usage": "runtime_core.wire.step",
}

_EXTRAS = {"KeepAll": "llm", "KeepRecent": "llm", "ModelFailed": "llm", "Price": "llm", "Summarise": "llm"}

__getattr__ = loader(__name__, _PLACES, _EXTRAS)
