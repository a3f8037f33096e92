-- Journals the result of a model call unless it has one. The same step adds its usage to the task's and releases its
-- reservation.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 value (digest, status, ms, payload) · 7 journal limit
--      8 usage (JSON) or '' · 9 the step's kind and name, separated by a tab
--      10 stream of an entry that was delivered again, else ''
--      11 a step that this turn has journaled before, the newest one, or ''
-- RETURNS the value now stored: the caller continues with it, even if another process wrote it
--         · {the value, why} if the task is over a limit now · 'FENCED' · 'DONE' if the turn is no longer this
--         entry's · 'LIMIT' if the journal is full · 'LOST' if it lacks the step before: nothing was written
local function settle_call(keys, args)
  local base, task, run, step, value = keys[1], args[3], args[4], args[5], args[6]
  local key, run_hash = base .. 'task:' .. task, run_key(base, task, run)
  local status, used, limits, reserved, flags, current, unrecorded, stored = read_run(base, task, run, 5,
    'status', TASK.usage, TASK.limits, TASK.reserved, TASK.flags, RUN.current, RUN.unrecorded, RUN.result .. step)
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if stored then return stored end
  if lacks_earlier(run_hash, args[11]) then return redis.status_reply('LOST') end
  local usage, over
  if args[8] ~= '' then
    local sum = usage_with(used, {args[8]})
    usage, over = cjson.encode(sum), over_limit(sum, limits)
  end
  -- The usage is kept with the step: a process that replays it writes its row, and may have to store it again.
  local label = usage and (args[9] .. '\t' .. args[8]) or args[9]
  if not journal_step(run_hash, unrecorded, step, value, label, args[7]) then return redis.status_reply('LIMIT') end
  clear_deaths(base, args[1], args[10], args[2])
  redis.call('HDEL', run_hash, RUN.attempts .. step)
  if usage then redis.call('HSET', key, TASK.usage, usage, TASK.flags, flag(flags or '', FLAG.usage)) end
  if reserved then give_back(key, reserved, run .. '|' .. step) end
  if over then return {value, over} end
  return value
end
