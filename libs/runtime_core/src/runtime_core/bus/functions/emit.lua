-- Appends a delta to the task's output, once per step: a replayed step finds its journal entry and does nothing.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 journal value · 7 attempt · 8 value (JSON)
-- RETURNS 'OK' · 'DONE' · 'FENCED' · 'LIMIT <bytes>' if the task's output would be over its limit
local function emit(keys, args)
  local base, task, run = keys[1], args[3], args[4]
  local key, run_hash = base .. 'task:' .. task, run_key(base, task, run)
  local status, flags, written = unpack(redis.call('HMGET', key, 'status', TASK.flags, TASK.output_bytes))
  local current, unrecorded = unpack(redis.call('HMGET', run_hash, RUN.current, RUN.unrecorded))
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  redis.call('XLEN', base .. 'out:' .. task)
  local size, most = output_with(base, written, args[8])
  if not size and redis.call('HEXISTS', run_hash, RUN.result .. args[5]) == 0 then return 'LIMIT ' .. most end
  if redis.call('HSETNX', run_hash, RUN.result .. args[5], args[6]) == 0 then return 'DONE' end
  redis.call('HSET', run_hash, RUN.unrecorded, (unrecorded or '') .. args[5] .. '\temit\temit\n')
  local seq = redis.call('HINCRBY', key, 'seq', 1)
  publish_delta(base, task, run, args[7], seq, args[8])
  redis.call('HSET', key, TASK.output_bytes, size, TASK.flags, flag(flags or '', FLAG.output))
  return 'OK'
end
