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

-- `mark`: `progress` of a call's progress report, `chunk` of a piece of an answer that is being written, nil of an
-- agent's whole output. `seq`: the delta's number, a text.
local function publish_delta(base, task, run, attempt, seq, value, mark)
  local name = string.sub(value, 1, 1) == '"' and 'text' or 'value'
  publish_out(base, task, 'weft.output.delta', '{"task_id":' .. quote(task) .. ',"run_id":' .. quote(run) ..
    ',"attempt":' .. attempt .. ',"seq":' .. seq .. (mark and ',"' .. mark .. '":true,"' or ',"') .. name .. '":' ..
      value .. '}')
end

-- The task's output so far, and this value with it. Returns nil and the limit if that exceeds it; `share` is the usable
-- part of the limit. Small outputs never read the limit.
local OUTPUT_PIECE, OUTPUT_SMALL, OUTPUT_MAX = 128, 1048576, 16777216

local function output_with(base, written, value, share)
  local size = (tonumber(written) or 0) + #value + OUTPUT_PIECE
  if size <= OUTPUT_SMALL then return text(size) end
  local most = tonumber(redis.call('HGET', base .. 'meta', 'output_max')) or OUTPUT_MAX
  if size > most * (share or 1) then return nil, text(most) end
  return text(size)
end

local function next_seq(seq) return text(tonumber(seq or '0') + 1) end

-- Appends a chunk that is not journaled. `seq`: the number of the last one; `size`: of the output with this one. The
-- stream comes first: a write that fails has changed nothing.
local function add_chunk(base, task, run, attempt, seq, value, mark, size, flags)
  seq = next_seq(seq)
  publish_delta(base, task, run, attempt, seq, value, mark)
  redis.call('HSET', base .. 'task:' .. task, 'seq', seq, TASK.output_bytes, size, TASK.flags,
    flag(flags or '', FLAG.output))
end

-- A question goes to the task's stream, where any client finds it, and to the stream that the user named.
local function tell_question(base, task, header, data, trace)
  publish_out(base, task, 'weft.human.requested', data, nil, trace)
  local to = string.match(header, '^[^\n]*\n[^\n]*\n[^\n]*\n([^\n]*)')
  if to ~= '' and string.sub(to, 1, 1) ~= '@' and not is_client(base, to) then
    local fields = {'to', to, 'type', 'weft.human.requested', REPLY.task, task, REPLY.data, data}
    if trace then fields[9], fields[10] = REPLY.trace, trace end
    redis.call('XADD', base .. 'replies', '*', unpack(fields))
  end
end

-- Announces on the partition's stream of states that a run, a node or a group has changed, for waiters. The stream is
-- short: a reader that may have missed an entry reads the thing itself.
local STATES_MAX = '10000'

local function tell_state(base, name, status)
  redis.call('XADD', base .. 'states', 'MAXLEN', '~', STATES_MAX, '*', STATE.name, name, STATE.status, status)
end
