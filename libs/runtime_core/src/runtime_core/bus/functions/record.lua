-- Journals a step that a turn has finished in its middle (a model call, a `ctx.step`): put if absent.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 value (digest, status, ms, payload) · 7 journal limit
--      8 the step's kind and name, with a tab between
-- RETURNS the value now stored: the caller continues with it, even if another process wrote it
--         · 'FENCED' · 'DONE' if the turn is no longer this entry's · 'LIMIT'
local function record(keys, args)
  local base, task, run = keys[1], args[3], args[4]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', rk, RUN.current, RUN.unrecorded)
  if v[1] ~= args[2] or ENDED[redis.call('HGET', base .. 'task:' .. task, 'status')] then return redis.status_reply('DONE') end
  local field = RUN.result .. args[5]
  local stored = redis.call('HGET', rk, field)
  if stored then return stored end
  if redis.call('HLEN', rk) >= tonumber(args[7]) then return redis.status_reply('LIMIT') end
  redis.call('HSET', rk, field, args[6], RUN.unrecorded, (v[2] or '') .. args[5] .. '\t' .. args[8] .. '\n')
  return args[6]
end
