"""Event-driven runs by AWorld's names: messages, their manager, handlers."""
