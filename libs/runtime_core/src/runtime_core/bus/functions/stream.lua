-- Appends pieces of a model's answer to the task's output while the model writes it. They are not journaled: a repeated
-- call sends them again with a higher attempt. The run id is that of the call: the run's and the step's.
-- It also reports the progress of a step of the turn that was not begun as a model call.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 attempt
--      7 … for each piece: `chunk`, or `progress` in all of them · value (JSON)
-- RETURNS 'OK' · 'DONE' if the call is over, was begun again, or the turn is no longer this entry's · 'FENCED'
--         · 'LIMIT <bytes>' if the task's output would be over its limit, of which progress may fill half: the pieces
--         that fit are written
local function stream(keys, args)
  local base, task, run = keys[1], args[3], args[4]
  local progress = args[7] == 'progress'
  local status, flags, written, seq, current, attempt = read_run(base, task, run, 4,
    'status', TASK.flags, TASK.output_bytes, 'seq', RUN.current, RUN.attempts .. args[5])
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if not progress and attempt ~= args[6] then return 'DONE' end
  local number, size, last, most =
    publish_pieces(base, task, run .. '/' .. args[5], args[6], seq, written, args, 7, progress and 0.5)
  if last > 7 then note_output(base, task, number, size, flags) end
  return most and 'LIMIT ' .. most or 'OK'
end
