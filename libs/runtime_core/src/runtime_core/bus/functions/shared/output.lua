-- A task's output stream, and the partition's stream of state changes.

local function publish_out(base, task, kind, data, retention, trace)
  local key = base .. 'out:' .. task
  if trace then
    redis.call('XADD', key, '*', 'type', kind, 'source', 'weft', 'taskid', task, 'traceparent', trace, 'data', data)
  else
    redis.call('XADD', key, '*', 'type', kind, 'source', 'weft', 'taskid', task, 'data', data)
  end
  if retention then redis.call('EXPIRE', key, retention) end
end

-- A task whose client requested its steps shows the rows of each commit on its stream.
local function tell_steps(base, task, flags, rows)
  if not flags or rows == '' or rows == '[]' or not string.find(flags, FLAG.steps_shown, 1, true) then return end
  publish_out(base, task, 'weft.step.recorded', '{"task_id":' .. quote(task) .. ',"steps":' .. rows .. '}')
end

local KINDS = {completed = 'weft.task.completed', failed = 'weft.task.failed', cancelled = 'weft.task.cancelled'}

-- Room that a piece takes in the output besides its value, and the limits of an output. Small outputs never read theirs.
local OUTPUT_PIECE, OUTPUT_SMALL, OUTPUT_MAX = 128, 1048576, 16777216

-- The last of these pieces that is within the task's limit, the output's size with it, and the limit if one is not.
-- `pieces` has pairs of mark and value from `at` on; `share` is the usable part of the limit.
local function fitting_pieces(base, written, pieces, at, share)
  local size, last, most = tonumber(written or '0'), at - 1, nil
  for i = at, #pieces, 2 do
    local with = size + #pieces[i + 1] + OUTPUT_PIECE
    if with > OUTPUT_SMALL then
      most = most or tonumber(redis.call('HGET', base .. 'meta', 'output_max')) or OUTPUT_MAX
      if with > most * (share or 1) then return last, size, most end
    end
    size, last = with, i + 1
  end
  return last, size, nil
end

-- Appends pieces of a run's output, as many as fit, one entry each. The mark is `progress` for a report of progress,
-- `chunk` for a piece of a longer output, `restart` for a new attempt, '' for a whole output. `seq`: the number of the
-- task's last piece. Returns the number of its last piece now, the size of the output, the place of the last piece that
-- fits, and the limit if one does not. The entries come before any other write: one that fails has changed nothing.
local function publish_pieces(base, task, run, attempt, seq, written, pieces, at, share)
  local last, size, most = fitting_pieces(base, written, pieces, at, share)
  local key, number = base .. 'out:' .. task, tonumber(seq or '0')
  local head = '{"task_id":' .. quote(task) .. ',"run_id":' .. quote(run) .. ',"attempt":' .. attempt .. ',"seq":'
  for i = at, last, 2 do
    local mark, value = pieces[i], pieces[i + 1]
    number = number + 1
    local name = string.byte(value) == 34 and ',"text":' or ',"value":'
    if mark ~= '' then name = ',"' .. mark .. '":true' .. name end
    redis.call('XADD', key, '*', 'type', 'weft.output.delta', 'source', 'weft', 'taskid', task,
      'data', head .. text(number) .. name .. value .. '}')
  end
  return text(number), text(size), last, most and text(most)
end

-- Notes the output of a task after its pieces were appended.
local function note_output(base, task, seq, size, flags)
  redis.call('HSET', base .. 'task:' .. task, 'seq', seq, TASK.output_bytes, size, TASK.flags,
    flag(flags or '', FLAG.output))
end

-- A server keeps 4 KiB for the next entries of a stream. A task may wait for days, so its stream is stored again
-- without that room, if it is small. pcall: a server that forbids these commands keeps the stream as it is.
local COMPACT_BYTES = 16384

local function compact_out(key)
  local used = redis.pcall('MEMORY', 'USAGE', key)
  if type(used) ~= 'number' or used > COMPACT_BYTES then return end
  local stored = redis.pcall('DUMP', key)
  if type(stored) ~= 'string' then return end
  redis.pcall('RESTORE', key, math.max(0, redis.call('PTTL', key)), stored, 'REPLACE')
end

-- A question goes to the task's stream, where any client finds it, and to the stream that the user named.
local function tell_question(base, task, header, data, trace)
  publish_out(base, task, 'weft.human.requested', data, nil, trace)
  compact_out(base .. 'out:' .. task)
  local to = string.match(header, '^[^\n]*\n[^\n]*\n[^\n]*\n([^\n]*)')
  if to ~= '' and string.sub(to, 1, 1) ~= '@' and not is_client(base, to) then
    local fields = {'to', to, 'type', 'weft.human.requested', REPLY.task, task, REPLY.data, data}
    if trace then fields[9], fields[10] = REPLY.trace, trace end
    redis.call('XADD', base .. 'replies', '*', unpack(fields))
  end
end

-- Announces on the partition's stream of states that a run, a node or a group has changed, for waiters. The stream is
-- short: a reader that may have missed an entry reads the thing itself.
local function tell_state(base, name, status)
  redis.call('XADD', base .. 'states', 'MAXLEN', '~', KEPT.states, '*', STATE.name, name, STATE.status, status)
end
