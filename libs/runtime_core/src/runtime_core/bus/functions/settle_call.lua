-- Journals the result of a model call, put if absent, and in the same step adds its usage to the task's and releases
-- its reservation.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 value (digest, status, ms, payload) · 7 journal limit
--      8 usage (JSON) or '' · 9 the step's kind and name, separated by a tab
-- RETURNS the value now stored: the caller continues with it, even if another process wrote it
--         · {the value, why} if the task is over a limit now · 'FENCED' · 'DONE' if the turn is no longer this
--         entry's · 'LIMIT' if the journal is full
local function settle_call(keys, args)
  local base, task, run, step = keys[1], args[3], args[4], args[5]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  local key = base .. 'task:' .. task
  local rk = run_key(base, task, run)
  local t = redis.call('HMGET', key, 'status', TASK.usage, TASK.limits, TASK.reserved, TASK.flags)
  local v = redis.call('HMGET', rk, RUN.current, RUN.unrecorded, RUN.result .. step)
  if v[1] ~= args[2] or ENDED[t[1]] then return redis.status_reply('DONE') end
  if v[3] then return v[3] end
  if redis.call('HLEN', rk) >= tonumber(args[7]) then return redis.status_reply('LIMIT') end
  local usage, over
  if args[8] ~= '' then
    local used = usage_with(t[2], {args[8]})
    usage, over = cjson.encode(used), over_limit(used, t[3])
  end
  redis.call('HSET', rk, RUN.result .. step, args[6], RUN.unrecorded, (v[2] or '') .. step .. '\t' .. args[9] .. '\n')
  redis.call('HDEL', rk, RUN.attempts .. step)
  if usage then redis.call('HSET', key, TASK.usage, usage, TASK.flags, flag(t[5] or '', FLAG.usage)) end
  if t[4] then give_back(key, t[4], run .. '|' .. step) end
  if over then return {args[6], over} end
  return args[6]
end
