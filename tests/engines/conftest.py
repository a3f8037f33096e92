"""Fixtures of the tests that need Ray and Spark; without them (in the usual environment) nothing is collected here."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") and find_spec("pyspark") else ["*"]
