-- Rows for the trajectory: the steps of a task, appended to the record stream.

local function record_rows(base, task, flags, rows)
  redis.call('XADD', base .. 'record', '*', RECORD.task, task, RECORD.rows, rows)
  tell_steps(base, task, flags, rows)
end

-- A row's member for usage (JSON) that was kept with its step.
local function usage_of_row(usage)
  if usage == '' then return '' end
  local amounts = cjson.decode(usage)
  amounts.models = nil
  return ',"usage":' .. cjson.encode(amounts)
end

-- The row of the pieces that a branch has emitted since the last commit; nil if there are none: output that started over
-- has no more pieces than the rows of the earlier one.
local function emitted_row(base, task, run, step, branch)
  local stored = redis.call('HGET', run_key(base, task, run), RUN.emitted .. branch)
  local _, count, recorded = branch_output(stored)
  if count <= recorded then return nil end
  local ms = string.match(stored or '', '(%d+)$') or '0'
  return '{"run":' .. quote(run) .. ',"kind":"emit","name":"emit","status":"completed","started":' .. ms ..
    ',"ended":' .. ms .. ',"step":' .. quote(step) .. ',"attributes":{"weft.pieces":' ..
    text(count - recorded) .. '}}'
end

-- Rows of the steps that a run has finished in mid-turn and no commit will write: `w` is the run's field. They
-- have kind, name, time and usage. Values stay out, since the process that commits them would redact their secrets.
-- Returns the rows without brackets, and their number.
local function unwritten_rows(base, task, run, w)
  local rows = {}
  for line in string.gmatch(w or '', '[^\n]+') do
    local step, kind, name, usage = string.match(line, '^([^\t]*)\t([^\t]*)\t([^\t]*)\t?(.*)$')
    step = step or line
    local branch = kind == 'emit' and string.match(name, '^@(.*)$')
    if branch then rows[#rows + 1] = emitted_row(base, task, run, step, branch) end
    local value = not branch and redis.call('HGET', run_key(base, task, run), RUN.result .. step)
    if value then
      local ms, done = ms_of_result(value), status_of(value) == RESULT.ok
      rows[#rows + 1] = '{"run":' .. quote(run) .. ',"kind":' .. quote(kind or 'step') .. ',"name":' ..
        quote(name or '') .. ',"status":"' .. (done and 'completed' or 'failed') ..
        '","started":' .. ms .. ',"ended":' .. ms ..
        ',"step":' .. quote(step) .. usage_of_row(usage or '') .. '}'
    end
  end
  return table.concat(rows, ','), #rows
end

local function with_rows(record, rows)
  if rows == '' then return record end
  if record == '' or record == '[]' then return '[' .. rows .. ']' end
  return string.sub(record, 1, -2) .. ',' .. rows .. ']'
end

-- The same for all runs of a task that ends: its first run (`w`) and its child runs, by the task's `fields`.
local function unwritten_of_task(base, task, w, fields)
  local all, count = unwritten_rows(base, task, FIRST_RUN, w)
  for i = 1, fields and #fields or 0, 2 do
    local child = child_of(fields[i])
    if child and string.sub(fields[i + 1], 1, 1) ~= '@' then
      local rows, more = unwritten_rows(base, task, child,
        redis.call('HGET', run_key(base, task, child), RUN.unrecorded))
      if more > 0 then all, count = all .. (count > 0 and ',' or '') .. rows, count + more end
    end
  end
  return all, count
end

-- The row of a step that the broker itself answered, as a JSON array.
local function answer_row(run, step, kind, name, input, asked, ended, status, payload)
  return '[{"run":' .. quote(run) .. ',"kind":"' .. kind .. '","name":' .. quote(name) .. ',"status":"' ..
    (status == RESULT.ok and 'completed' or 'failed') .. '","started":' .. asked .. ',"ended":' .. ended ..
    ',"step":' .. quote(step) .. (input and (',"input":' .. input) or '') ..
    (status == RESULT.ok and ',"output":' or ',"error":') .. payload .. '}]'
end

-- Records a step that the broker itself answered: a sleep, a question, a wait for a message, or (by its `kind`) for the
-- run's key.
local function record_answer(base, task, run, step, asked, ended, status, payload, kind)
  local question, receives = unpack(redis.call('HMGET', run_key(base, task, run), RUN.question .. step,
    RUN.receives .. step))
  local row
  if kind then
    row = answer_row(run, step, kind, 'key', nil, asked, ended, status, payload)
  elseif receives then
    row = answer_row(run, step, 'receive', data_of(receives), nil, asked, ended, status, payload)
  elseif question then
    row = answer_row(run, step, 'human', 'human', data_of(question), asked, ended, status, payload)
  else
    row = answer_row(run, step, 'timer', 'sleep', nil, asked, ended, status, payload)
  end
  redis.call('HINCRBY', base .. 'task:' .. task, 'steps', 1)
  record_rows(base, task, redis.call('HGET', base .. 'task:' .. task, TASK.flags), row)
end

-- Writes the rows of steps that a child run has finished in mid-turn, if the process that ends it does not know them.
local function record_unwritten(base, task, run, flags)
  local rows, count = unwritten_rows(base, task, run, redis.call('HGET', run_key(base, task, run), RUN.unrecorded))
  if count == 0 then return end
  redis.call('HINCRBY', base .. 'task:' .. task, 'steps', count)
  record_rows(base, task, flags, '[' .. rows .. ']')
end

-- The record's row of a call that nobody takes: no handler sees it, so no handler would write it.
local CALL_KINDS = {a = 'agent', t = 'tool', r = 'ray', s = 'spark'}

local function record_refused(base, task, flags, child, target, name, call_key, data, ms, error)
  local kind = CALL_KINDS[string.match(target, '^%??(.)')]
  record_rows(base, task, flags, '[{"run":' .. quote(child) .. ',"kind":"' .. kind .. '","name":' .. quote(name) ..
    ',"status":"failed","started":' .. ms .. ',"ended":' .. ms ..
    (call_key ~= '' and ',"key":' .. quote(call_key) or '') ..
    (data ~= '' and ',"input":' .. data or '') .. ',"error":' .. error .. '}]')
end
