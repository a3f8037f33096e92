"""The list of guards, by what they guard."""

from __future__ import annotations

from tests.mutants.guards import (
    admission,
    connections,
    consumers,
    dead_letters,
    ends,
    gateway,
    handlers,
    mailboxes,
    output,
    owners,
    private_server,
    public_names,
    publishers,
    queues,
    redaction,
    results,
    services,
    slots,
    steps,
    timers,
    users,
    withdrawals,
)
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *admission.MUTANTS,
    *owners.MUTANTS,
    *mailboxes.MUTANTS,
    *queues.MUTANTS,
    *slots.MUTANTS,
    *results.MUTANTS,
    *steps.MUTANTS,
    *output.MUTANTS,
    *ends.MUTANTS,
    *dead_letters.MUTANTS,
    *public_names.MUTANTS,
    *gateway.MUTANTS,
    *timers.MUTANTS,
    *handlers.MUTANTS,
    *consumers.MUTANTS,
    *services.MUTANTS,
    *redaction.MUTANTS,
    *publishers.MUTANTS,
    *users.MUTANTS,
    *withdrawals.MUTANTS,
    *private_server.MUTANTS,
    *connections.MUTANTS,
)
