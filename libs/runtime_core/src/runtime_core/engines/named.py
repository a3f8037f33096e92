"""An engine by its name."""

from __future__ import annotations

import importlib
from dataclasses import replace

from runtime_core.engines.local import LocalEngine
from runtime_core.engines.runtime_engine import RunConfig, RuntimeEngine
from runtime_core.errors import ConfigurationError

_CLUSTERS = {
    "ray": "runtime_core.clusters.ray.engine:RayEngine",
    "spark": "runtime_core.clusters.spark.engine:SparkEngine",
}
"""Loaded by their names, so that nobody pays for those that are not used."""


def engine_named(name: str, config: RunConfig | None = None) -> RuntimeEngine:
    """The engine `local`, `ray` or `spark`, or one of one's own as `package.module:Class`; not started.

    `config` has its settings; `name` goes before the name in it. Raises ConfigurationError for what is no engine.
    """
    config = replace(config or RunConfig(), name=name)
    if name == "local":
        return LocalEngine(config)
    name = _CLUSTERS.get(name, name)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigurationError(
            f"engine {name!r} is none; there are 'local', 'ray', 'spark', and engines of your own as "
            "'package.module:Class'"
        )
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"engine {name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RuntimeEngine)):
        raise ConfigurationError(f"engine {name!r} is {found!r}: give a subclass of RuntimeEngine")
    return found(config)
