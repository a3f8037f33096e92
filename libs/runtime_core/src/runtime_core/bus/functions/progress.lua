-- Appends a call's progress to the task's output. It is not journaled: a repeated call reports again, with a higher
-- attempt.
-- KEYS 1 base · ARGV 1 owner · 2 task · 3 run (the call's own) · 4 attempt · 5 value (JSON)
-- RETURNS 'OK' · 'DONE' if the call has its result or the task is over · 'FENCED'
--         · 'LIMIT <bytes>' if progress has filled its half of the task's output
local function progress(keys, args)
  local base, task, run = keys[1], args[2], args[3]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local parent, step = parent_of(run)
  local status, flags, written, seq, missing = read_run(base, task, parent, 4,
    'status', TASK.flags, TASK.output_bytes, 'seq', RUN.missing .. step)
  if not status or ENDED[status] then return 'DONE' end
  if not missing then return 'DONE' end
  local number, size, last, most =
    publish_pieces(base, task, run, args[4], seq, written, {'progress', args[5]}, 1, 0.5)
  if last < 1 then return 'LIMIT ' .. most end
  note_output(base, task, number, size, flags)
  return 'OK'
end
