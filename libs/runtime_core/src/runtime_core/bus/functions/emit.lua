-- Appends a delta to the task's output, once per step: a replayed step finds its journal entry and does nothing.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 journal value · 7 attempt · 8 value (JSON)
--      9 name: `emit`, or `chunk` for a piece of a longer output; an older handler passes none
-- RETURNS 'OK' · 'DONE' · 'FENCED' · 'LIMIT <bytes>' if the task's output would be over its limit
local function emit(keys, args)
  local base, task, run, step = keys[1], args[3], args[4], RUN.result .. args[5]
  local status, flags, written, seq, current, unrecorded, stored = read_run(base, task, run, 4,
    'status', TASK.flags, TASK.output_bytes, 'seq', RUN.current, RUN.unrecorded, step)
  local name = args[9] or 'emit'
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if stored then return 'DONE' end
  local size, most = output_with(base, written, args[8])
  if not size then return 'LIMIT ' .. most end
  seq, flags, unrecorded = next_seq(seq), flag(flags or '', FLAG.output), (unrecorded or '') .. args[5] .. '\temit\t' ..
    name .. '\n'
  -- First: it needs no check before, since it changes nothing if it fails.
  publish_delta(base, task, run, args[7], seq, args[8], name == 'chunk' and name or nil)
  local key = base .. 'task:' .. task
  if run == FIRST_RUN then
    redis.call('HSET', key, step, args[6], RUN.unrecorded, unrecorded, 'seq', seq, TASK.output_bytes, size, TASK.flags,
      flags)
  else
    redis.call('HSET', run_key(base, task, run), step, args[6], RUN.unrecorded, unrecorded)
    redis.call('HSET', key, 'seq', seq, TASK.output_bytes, size, TASK.flags, flags)
  end
  return 'OK'
end
