"""The command. As a package, so that its shared `weft up` ends with its last test, not with the last of all tests."""
