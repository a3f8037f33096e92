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

-- Rows of the steps that a run has finished in mid-turn and that no commit will write: `w` is the run's field. They
-- have kind, name, time and usage. Values stay out, since the process that commits them would redact their secrets.
-- Returns the rows without brackets, and their number.
local function unwritten_rows(base, task, run, w)
  local rows = {}
  for line in string.gmatch(w or '', '[^\n]+') do
    local step, kind, name, usage = string.match(line, '^([^\t]*)\t([^\t]*)\t([^\t]*)\t?(.*)$')
    step = step or line
    local value = redis.call('HGET', run_key(base, task, run), RUN.result .. step)
    if value then
      local ms, done = ms_of_result(value), status_of(value) == RESULT.ok
      rows[#rows + 1] = '{"run":' .. quote(run) .. ',"kind":' .. quote(kind or 'step') .. ',"name":' .. quote(name or '') ..
        ',"status":"' .. (done and 'completed' or 'failed') .. '","started":' .. ms .. ',"ended":' .. ms ..
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

-- Rows of a call are counted as steps when the call commits, so rows that a run carries add nothing to the number.
local function with_carried(record, carried)
  if not carried or carried == '' then return record end
  return with_rows(carried, string.sub(record, 2, -2))
end

-- Adds the rows that a task's end finds unrecorded: of its first run (`w` and `carried`) and of its child runs, by the
-- task's `fields`. Returns the rows, and how many of them are not counted as steps yet.
local function with_unrecorded(base, task, record, w, carried, fields)
  local rows, count = unwritten_rows(base, task, FIRST_RUN, w)
  record = with_rows(with_carried(record, carried), rows)
  for i = 1, fields and #fields or 0, 2 do
    local child = child_of(fields[i])
    if child and string.sub(fields[i + 1], 1, 1) ~= '@' then
      local own, more = redis.call('HMGET', run_key(base, task, child), RUN.unrecorded, RUN.carried), nil
      rows, more = unwritten_rows(base, task, child, own[1])
      record, count = with_rows(with_carried(record, own[2]), rows), count + more
    end
  end
  return record, count
end

-- The record's row of a step that the broker itself answered: a sleep, or a question.
local function record_answer(base, task, run, step, asked, ended, status, payload)
  local question = redis.call('HGET', run_key(base, task, run), RUN.question .. step)
  local row = '[{"run":' .. quote(run) .. ',"kind":"' .. (question and 'human' or 'timer') .. '","name":"' ..
    (question and 'human' or 'sleep') .. '","status":"' .. (status == RESULT.ok and 'completed' or 'failed') ..
    '","started":' .. asked .. ',"ended":' .. ended .. ',"step":' .. quote(step) ..
    (question and (',"input":' .. data_of(question)) or '') ..
    (status == RESULT.ok and ',"output":' or ',"error":') .. payload .. '}]'
  redis.call('HINCRBY', base .. 'task:' .. task, 'steps', 1)
  record_rows(base, task, redis.call('HGET', base .. 'task:' .. task, TASK.flags), row)
end

-- Writes the rows of a child run that the process that ends it does not know: of steps in mid-turn, and carried ones.
local function record_unwritten(base, task, run, flags)
  local own = redis.call('HMGET', run_key(base, task, run), RUN.unrecorded, RUN.carried)
  local rows, count = unwritten_rows(base, task, run, own[1])
  local record = with_rows(with_carried('', own[2]), rows)
  if record == '' then return end
  if count > 0 then redis.call('HINCRBY', base .. 'task:' .. task, 'steps', count) end
  record_rows(base, task, flags, record)
end

-- The record's row of a call that nobody takes: no handler sees it, so no handler would write it.
local CALL_KINDS = {a = 'agent', t = 'tool', r = 'ray', s = 'spark'}

local function record_refused(base, task, flags, child, target, name, call_key, data, ms, error)
  local kind = CALL_KINDS[string.match(target, '^%??(.)')]
  record_rows(base, task, flags, '[{"run":' .. quote(child) .. ',"kind":"' .. kind .. '","name":' .. quote(name) ..
    ',"status":"failed","started":' .. ms .. ',"ended":' .. ms .. (call_key ~= '' and ',"key":' .. quote(call_key) or '') ..
    (data ~= '' and ',"input":' .. data or '') .. ',"error":' .. error .. '}]')
end
