"""Test an app: run it in one process, move its time, fake its tools and models, and kill it at each step.

The wheel installs a pytest plugin with the fixture `weft_app`, an `AppTest`.
"""

from __future__ import annotations

from runtime_core.host.local import LocalApp
from runtime_core.testing.app_test import AppTest, Clock, FakeTool, ScriptedModel, ToolCall
from runtime_core.testing.crashes import KillReport

__all__ = ["AppTest", "Clock", "FakeTool", "KillReport", "LocalApp", "ScriptedModel", "ToolCall"]
