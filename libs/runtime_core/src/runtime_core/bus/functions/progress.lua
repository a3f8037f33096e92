-- Appends a call's progress to the task's output. It is not journaled: a repeated call reports again, with a higher
-- attempt.
-- KEYS 1 base · ARGV 1 owner · 2 task · 3 run (the call's own) · 4 attempt · 5 value (JSON)
-- RETURNS 'OK' · 'DONE' if the call has its result or the task is over · 'FENCED'
--         · 'LIMIT <bytes>' if progress has filled its half of the task's output
local function progress(keys, args)
  local base, task, run = keys[1], args[2], args[3]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local parent, step = parent_of(run)
  local key = base .. 'task:' .. task
  local status, flags, written = unpack(redis.call('HMGET', key, 'status', TASK.flags, TASK.output_bytes))
  if not status or ENDED[status] then return 'DONE' end
  if redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 0 then return 'DONE' end
  redis.call('XLEN', base .. 'out:' .. task)
  local size, most = output_with(base, written, args[5], 0.5)
  if not size then return 'LIMIT ' .. most end
  redis.call('HSET', key, TASK.output_bytes, size, TASK.flags, flag(flags or '', FLAG.output))
  publish_delta(base, task, run, args[4], redis.call('HINCRBY', key, 'seq', 1), args[5], true)
  return 'OK'
end
