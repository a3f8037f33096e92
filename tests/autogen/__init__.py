"""AutoGen programs on Weft: AutoGen's own tests, unchanged, and ours. `make test-autogen` runs them.

1. `sources.py` fetches AutoGen's source packages, which hold its tests.
2. `helpers/autogen_test_utils` stands in for the agents that those tests import and that no package ships.
3. `exchanged.py` is a plugin of pytest: it puts Weft's runtime where AutoGen's was, before a test module is imported.
4. `excepted.py` lists the tests that are not expected to pass, each with its reason.
5. `suite.py` runs one of their modules in a separate process and reads its report.
"""
