"""The public names, and the start of services from an installed wheel."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, python

MUTANTS: tuple[Mutant, ...] = (
    python(
        "base/lazy.py",
        "extra",
        "            if extra is None:\n",
        "            if True:\n",
        "a name without its library says which extra installs it",
        "unit/base:lazy",
    ),
    python(
        "base/lazy.py",
        "ours",
        '    if missing.partition(".")[0] in _OURS:\n',
        "    if False:\n",
        "a broken module of Weft is not reported as a missing extra",
        "unit/base:lazy",
    ),
    python(
        "host/service.py",
        "unknown",
        "    if len(arguments) > 1 or name not in _BUILDERS:\n",
        "    if False:\n",
        "an unknown service name is reported in one line",
        "unit/host:service",
    ),
    python(
        "host/stack.py",
        "own_modules",
        'argv = [sys.executable, "-P", "-m", ENTRY',
        'argv = [sys.executable, "-m", ENTRY',
        "a user's folder does not shadow Weft's modules",
        "unit/host:stack",
    ),
    python(
        "wire/commands.py",
        "options",
        "    if not isinstance(options, SubmitOptions):\n",
        "    if False:\n",
        "options that are a dict are refused by name",
        "unit/client:client",
    ),
    python(
        "wire/commands.py",
        "size",
        "    if len(data) > codec.MAX_DATA_BYTES:\n",
        "    if False:\n",
        "an input over the limit is refused before it is sent",
        "unit/client:client",
    ),
    python(
        "wire/commands.py",
        "size_of_both",
        "        if len(new.input_json) + len(new.metadata) > codec.MAX_DATA_BYTES:\n",
        "        if False:\n",
        "input and metadata together are within the limit",
        "unit/client:client",
    ),
    python(
        "declare/declaration.py",
        "undeclared_agent",
        "    names = _AGENT_NAMES.get(agent, ())\n    if not names:\n",
        '    names = _AGENT_NAMES.get(agent, ("?",))\n    if not names:\n',
        "a function that is not an agent is refused, with a remedy",
        "unit/client:client",
    ),
    python(
        "declare/declaration.py",
        "one_name",
        "    if len(names) > 1:\n        raise InvalidInput(field,",
        "    if False:\n        raise InvalidInput(field,",
        "a function that is two agents is refused",
        "unit/client:client",
    ),
    python(
        "client/client.py",
        "own_ids",
        "        if options.event_id or options.traceparent:\n",
        "        if False:\n",
        "a schedule has no event id and no trace",
        "unit/client:client",
    ),
)
