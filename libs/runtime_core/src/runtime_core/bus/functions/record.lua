-- Journals a step that was finished in mid-turn (a `ctx.step`), unless it has a result.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 value (digest, status, ms, payload) · 7 journal limit
--      8 the step's kind and name, with a tab between · 9 stream of an entry that was delivered again, else ''
--      10 a step that this turn has journaled before, the newest one, or ''
-- RETURNS the value now stored: the caller continues with it, even if another process wrote it
--         · 'FENCED' · 'DONE' if the turn is no longer this entry's · 'LIMIT' · 'LOST' if the journal lacks the step
--         before: nothing was written
local function record(keys, args)
  local base, task, step, value = keys[1], args[3], args[5], args[6]
  local run_hash = run_key(base, task, args[4])
  local status, current, unrecorded, stored = read_run(base, task, args[4], 1,
    'status', RUN.current, RUN.unrecorded, RUN.result .. step)
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if stored then return stored end
  if lacks_earlier(run_hash, args[10]) then return redis.status_reply('LOST') end
  if not journal_step(run_hash, unrecorded, step, value, args[8], args[7]) then return redis.status_reply('LIMIT') end
  clear_deaths(base, args[1], args[9], args[2])
  return value
end
