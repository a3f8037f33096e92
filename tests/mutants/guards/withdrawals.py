"""Steps that a run withdraws, and the work that ends with them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, lua

MUTANTS: tuple[Mutant, ...] = (
    lua(
        "withdrawals",
        "elsewhere",
        "    return cancel_elsewhere(base, inst, task)\n",
        "    return\n",
        "a withdrawn request to another partition is cancelled there",
        "contracts:withdrawals",
    ),
    lua(
        "withdrawals",
        "request",
        "    redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)\n",
        "",
        "a withdrawn request to another partition is not repeated",
        "contracts:withdrawals",
    ),
    lua(
        "withdrawals",
        "reserved",
        "  if held then give_back(key, held, child .. '|') end\n",
        "",
        "a withdrawn run releases the reservations of its calls",
        "contracts:withdrawals",
    ),
    lua(
        "withdrawals",
        "watched",
        "  if string.find(flags, FLAG.watched, 1, true) then tell_state(base, 'run/' .. task .. '/' .. child, "
        "'cancelled') end\n",
        "",
        "watchers learn that a run was withdrawn",
        "contracts:withdrawals",
    ),
    lua(
        "withdrawals",
        "kept_journal",
        "      open.kept[#open.kept + 1] = field\n",
        "",
        "the journal of a failed run is deleted when the run above it is withdrawn",
        "contracts:withdrawals",
    ),
    lua(
        "drop_agent",
        "silence",
        "  if not beat_at or server_ms() - tonumber(beat_at) > silent_ms then return 0 end\n",
        "  if not beat_at then return 0 end\n",
        "readers that have long been silent do not keep an agent",
        "contracts:dropped_agents",
    ),
    lua(
        "send_message",
        "row",
        "    if answer(base, task, run, step, RESULT.ok, now, value) then\n",
        "    if answer(base, task, run, step, RESULT.ok, now, value) and false then\n",
        "a message that wakes a run is on the record",
        "contracts:messages",
    ),
    lua(
        "rows",
        "kind",
        "  if kind then\n    row = answer_row(run, step, kind,",
        "  if kind and false then\n    row = answer_row(run, step, kind,",
        "the return of a key is recorded under its own kind",
        "contracts:released_keys",
    ),
    lua(
        "mailbox",
        "nested_first",
        "  if start_nested(base, inst, rest) then return end\n",
        "  start_nested(base, inst, rest)\n",
        "a holder is not resumed while the next reentrant call into its instance runs",
        "contracts:nested_calls",
    ),
    lua(
        "commit_turn",
        "withdrawn_at_end",
        "  local ending = check_end_of_run(base, args, turn, mode)\n"
        "  if turn.withdrawn then rows = withdraw_steps(base, task, turn, rows) end\n",
        "  local ending = check_end_of_run(base, args, turn, mode)\n",
        "a run withdraws its open steps when it ends",
        "contracts:withdrawals",
    ),
)
