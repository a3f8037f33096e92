"""The engine with the names of other frameworks: AWorld's tasks and swarms, and AutoGen's actors."""
