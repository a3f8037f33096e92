"""Agents that think: a model is asked, and its tool calls are run, until it answers. Each call is a journaled step."""
