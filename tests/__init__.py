"""The tests of Weft. `tests.servers` starts the real servers; `tests.architecture` guards the structure."""
