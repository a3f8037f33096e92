-- Starts a run's output over: a replay has emitted different pieces from the previous attempt. All pieces are sent
-- again, with the next attempt of the output, and readers replace the earlier ones. A mark notifies them at once.
-- KEYS 1 base · ARGV 1 owner · 2 entry · 3 task · 4 run · 5 the next attempt
-- RETURNS 'OK' · 'DONE' if the turn is no longer this entry's · 'FENCED'
local function restart_output(keys, args)
  local base, task, run = keys[1], args[3], args[4]
  local status, flags, written, seq, current, attempt = read_run(base, task, run, 4,
    'status', TASK.flags, TASK.output_bytes, 'seq', RUN.current, RUN.output_attempt)
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if tonumber(args[5]) <= tonumber(attempt or '1') then return 'OK' end
  -- Its size does not count, so that the limit of the output cannot hide it.
  local number = publish_pieces(base, task, run, args[5], seq, '0', {'restart', '""'}, 1)
  redis.call('HSET', run_key(base, task, run), RUN.output_attempt, args[5])
  note_output(base, task, number, written or '0', flags)
  return 'OK'
end
