-- Begins the part of a turn that an owner executes itself, before its first step there. Returns the journaled steps of
-- the run, and keeps other live owners out: a recreated group delivers an entry that another process still works on.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 '1' to begin although another live owner is in this turn, else ''
-- RETURNS {steps journaled since the last committed turn (the run's field `w`), '1' if the run has called in mid-turn,
--          attempt of the run's output}
--         · 'FENCED' · 'DONE' if the turn is no longer this entry's · 'BUSY' if another live owner is in this turn
local function begin_turn(keys, args)
  local base, owner, entry, task = keys[1], args[1], args[2], args[3]
  local run_hash = run_key(base, task, args[4])
  local status, current, unrecorded, has_asked, turn_owner, attempt = read_run(base, task, args[4], 1,
    'status', RUN.current, RUN.unrecorded, RUN.asks_in_turn, RUN.turn_owner, RUN.output_attempt)
  local lost = turn_lost(base, owner, entry, current, status)
  if lost then return lost end
  local begun, other = string.match(turn_owner or '', '^(%S+) (.*)$')
  local is_mine = begun == entry and other == owner
  if begun == entry and not is_mine and args[5] ~= '1' and redis.call('ZSCORE', base .. 'alive', other) then
    return redis.status_reply('BUSY')
  end
  if not is_mine then redis.call('HSET', run_hash, RUN.turn_owner, entry .. ' ' .. owner) end
  return {unrecorded or '', has_asked and '1' or '', attempt or '1'}
end
