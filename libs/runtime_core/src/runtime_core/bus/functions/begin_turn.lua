-- Begins the part of a turn that an owner executes itself, before its first step there. Returns the journaled steps of
-- the run, and keeps other live owners out: a recreated group delivers an entry that another process still works on.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run
-- RETURNS {steps journaled since the last committed turn (the run's field `w`), '1' if the run has called in mid-turn}
--         · 'FENCED' · 'DONE' if the turn is no longer this entry's · 'BUSY' if another live owner is in this turn
local function begin_turn(keys, args)
  local base, owner, entry, task = keys[1], args[1], args[2], args[3]
  local alive = base .. 'alive'
  if not redis.call('ZSCORE', alive, owner) then return redis.status_reply('FENCED') end
  local rk = run_key(base, task, args[4])
  local v = redis.call('HMGET', rk, RUN.current, RUN.unrecorded, RUN.asks_in_turn, RUN.turn_owner)
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if v[1] ~= entry or not status or ENDED[status] then return redis.status_reply('DONE') end
  local begun, other = string.match(v[4] or '', '^(%S+) (.*)$')
  if begun == entry and other ~= owner and redis.call('ZSCORE', alive, other) then return redis.status_reply('BUSY') end
  if not other or begun ~= entry or other ~= owner then redis.call('HSET', rk, RUN.turn_owner, entry .. ' ' .. owner) end
  return {v[2] or '', v[3] and '1' or ''}
end
