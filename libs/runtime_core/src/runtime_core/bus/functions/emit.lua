-- Appends pieces of a run's output to its task's stream, and notes how far its branch is. A branch is a sequence of
-- steps, such as a part of a gather, and numbers its pieces from 1. A piece that the stream has is skipped, so a replay
-- shows nothing twice.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 branch (the prefix of its steps, and `e`) · 6 attempt of the output
--      7 number of the first piece · 8 checksum of the branch's output up to the last piece · 9 step of the first piece
--      10 … for each piece: `chunk` for a piece of a longer output, else '' · value (JSON)
--      Without pieces it only notes that the stream had those before number 7: the server has lost its last writes.
-- RETURNS 'OK' · 'DONE' if the stream has all of them, or the output has started over · 'FENCED'
--         · 'DONE' too if the turn is no longer this entry's
--         · 'LIMIT <bytes>' if the task's output would be over its limit: the pieces that fit are written
local FIRST_PIECE = 10

local function emit(keys, args)
  local base, task, run, branch = keys[1], args[3], args[4], args[5]
  local status, flags, written, seq, current, unrecorded, stored, attempt = read_run(base, task, run, 4,
    'status', TASK.flags, TASK.output_bytes, 'seq', RUN.current, RUN.unrecorded, RUN.emitted .. branch,
    RUN.output_attempt)
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  if args[6] ~= (attempt or '1') then return 'DONE' end
  local held, count, recorded = branch_output(stored)
  -- The branch's first pieces since the last commit: the rows of all earlier ones are recorded.
  local mark = branch_mark(branch)
  local before = tonumber(args[7]) - 1
  unrecorded = unrecorded or ''
  if not string.find(unrecorded, mark, 1, true) then
    recorded = math.max(recorded, count)
    -- The first pieces of output that started over share the row of the earlier ones.
    if before >= recorded then unrecorded = unrecorded .. args[9] .. mark end
  end
  if held ~= args[6] then count = 0 end
  local at = FIRST_PIECE + 2 * math.max(0, count - before)
  if at > #args + 1 or at > #args and #args >= FIRST_PIECE then return 'DONE' end
  -- Before the first write: it reads a key, which may have another type.
  local now = text(now_ms(base))
  local number, size, last, most = publish_pieces(base, task, run, args[6], seq, written, args, at)
  if most and last < at then return 'LIMIT ' .. most end
  count = math.max(count, before + (last - FIRST_PIECE + 1) / 2)
  redis.call('HSET', run_key(base, task, run), RUN.unrecorded, unrecorded, RUN.emitted .. branch,
    args[6] .. ' ' .. text(count) .. ' ' .. text(recorded) .. ' ' .. args[8] .. ' ' .. now)
  note_output(base, task, number, size, flags)
  return most and 'LIMIT ' .. most or 'OK'
end
