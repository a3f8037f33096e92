-- An ended task continues. Its first run is queued like any event, through the mailbox of its instance, which may serve
-- others by now. It replays from its journal. The end dropped the steps that it waited for, so it requests them again,
-- and child runs that were open continue from their journals. State that reentrant calls left for it is gone too, since
-- others may have written the instance's state in the meantime.
local function reopen(base, task, first_run, context)
  local key = base .. 'task:' .. task
  local gone = {TASK.final, 'ended', TASK.own_row, RUN.asks_in_turn, RUN.open_asks, RUN.override, RUN.turn_owner}
  KEY.keep(key, gone)
  forget_waits(base, task, FIRST_RUN, gone)
  redis.call('HSET', key, 'status', 'running', TASK.flags, flag(first_run.flags, FLAG.reopened))
  redis.call('PERSIST', key)
  local now, tenant = text(now_ms(base)), header_of(first_run.header).tenant
  redis.pcall('ZADD', base .. 'open', now, task)
  if tenant and tenant ~= '' then redis.pcall('ZADD', base .. 'open:' .. tenant, now, task) end
  redis.call('ZREM', base .. 'stopped', task)
  local stream, agent, instance_key = target_of(first_run.header)
  redis.call('HSET', key, RUN.current,
    deliver(base, task, FIRST_RUN, stream, agent, instance_key, first_run.input, context, false, '-1'))
end

-- The delivery's fields, as for its first attempt. `data`: new data, or '' for the old data. `digest` is that of a
-- call's request: a call with new data keeps it, so that its row says what the code requested.
local function fields_again(named, head, is_turn, data, digest)
  head[7] = '1'
  if not is_turn and data ~= '' then named[ENTRY.step] = digest end
  -- A turn number that no warm run has and no new run starts with, so journaled steps do not run again.
  if is_turn then head[8] = '-1' end
  local fields = {ENTRY.header, table.concat(head, '\n')}
  for _, name in ipairs({ENTRY.step, ENTRY.data, ENTRY.context}) do
    if named[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = (name == ENTRY.data and data ~= '') and data or named[name]
    end
  end
  return fields
end

local function check_redrive(base, stream, ended, own_stream, agent, instance_key)
  redis.call('ZCARD', base .. 'letters')
  check_stream(base, stream)
  redis.call('ZCARD', base .. 'stopped')
  redis.call('HLEN', base .. 'meta')
  if ended then
    check_stream(base, own_stream)
    if instance_key ~= '' then check_instance(base, agent .. '/' .. instance_key) end
  end
end

-- Rows of repeated work replace those that were counted: the delivery's own, and if the task had ended, that of its
-- first run.
local function uncount_rows(key, again)
  local counted = tonumber(redis.call('HGET', key, 'steps') or '0')
  if again > 0 and counted >= again then redis.call('HSET', key, 'steps', text(counted - again)) end
end

-- Finds the child runs through which a dead letter has failed its task, from `run` up. Returns {run, step, whether the
-- step has its error} for each step that waited for one, or nil if one of the runs cannot continue from its journal: its
-- caller has a different result, or has ended otherwise.
local function failed_above(base, task, run)
  local key, found = base .. 'task:' .. task, {}
  while run ~= FIRST_RUN do
    local parent, step = parent_of(run)
    if parent ~= FIRST_RUN and redis.call('HEXISTS', key, TASK.kept_child .. parent) == 0 then return nil end
    local value = redis.call('HGET', run_key(base, task, parent), RUN.result .. step)
    if value and status_of(value) ~= RESULT.error then return nil end
    found[#found + 1] = {parent, step, value and 1 or 0}
    run = parent
  end
  return found
end

-- The steps that waited for the failed runs lose their errors, so their runs are requested again. Returns how many.
local function forget_failures(base, task, failed)
  local count = 0
  for _, each in ipairs(failed) do
    redis.call('HDEL', run_key(base, task, each[1]), RUN.result .. each[2])
    count = count + each[3]
  end
  return count
end

-- Sends a call again. A reopened run is already queued, and its turn finds the step requested or answered. The answer
-- wakes a parked run.
local function ask_again(base, rk, step, stream, digest, ended, fields)
  redis.call('HDEL', rk, RUN.result .. step)
  redis.call('HSET', rk, RUN.missing .. step, digest .. string.sub(stream, 1, 1) ..
    (ended and WAKES.never or WAKES.alone))
  if not ended then redis.call('HSET', rk, RUN.current, 'held') end
  redis.call('XADD', base .. stream, '*', unpack(fields))
end

-- Removes a dead letter and returns its delivery to its stream, with its attempts counted from one. A child run that
-- has failed its task is requested again by the run that called it.
-- KEYS 1 base
-- ARGV 1 letter id · 2 '1' to reopen an ended task · 3 new data (JSON) or '' for the old data
-- RETURNS {'ok', task} · {'missing'} · {'ended', task, status} · {'gone', task} if nothing waits for it any more
--         {'cut', task} if parts of it were too large to keep
--         {'called', task} for new data of a child run, whose input comes from the run that calls it
--         {'answered', task} if the task has answered a run in another partition
local function redrive(keys, args)
  local base = keys[1]
  local found = redis.call('XRANGE', base .. 'dead', args[1], args[1])[1]
  if not found then return {'missing'} end
  local named = {}
  for i = 1, #found[2], 2 do named[found[2][i]] = found[2][i + 1] end
  if named.cut then return {'cut', named.taskid or ''} end
  if not named.h or not named.stream then return {'gone', ''} end
  local head = lines(named.h)
  local task, run, stream = head[3], head[4], named.stream
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', TASK.flags, TASK.own_row, RUN.context, RUN.current, RUN.header,
    RUN.input)
  local ended, flags = ENDED[v[1]], v[2] or ''
  if ended and args[2] ~= '1' then return {'ended', task, v[1]} end
  -- Without `cur` the task is gone, or its journal was dropped with its end: there is nothing to continue from.
  if not v[5] or not v[6] then return {'gone', task} end
  local is_turn = is_agent_stream(stream)
  local waiting, step = run, nil
  if not is_turn then waiting, step = parent_of(run) end
  local rk = run_key(base, task, waiting)
  -- A running run has the error and may have acted on it, so the error cannot be withdrawn.
  if not ended and redis.call('HGET', rk, RUN.current) ~= 'park' then return {'gone', task} end
  local own_stream, agent, instance_key = target_of(v[6])
  -- The completed run of an instance has written its state: running it again would write it twice. A completed run has
  -- acted on the error of its child run.
  if v[1] == 'completed' and (instance_key ~= '' or waiting ~= FIRST_RUN) then return {'gone', task} end
  local failed = {}
  if ended then failed = failed_above(base, task, waiting) end
  if not failed then return {'gone', task} end
  local digest = '00000000'
  if not is_turn then
    local journal = redis.call('HGET', rk, RUN.result .. step)
    if not journal then return {'gone', task} end
    if status_of(journal) ~= RESULT.error then return {'gone', task} end
    digest = digest_of(journal)
  elseif ended and run ~= FIRST_RUN and args[3] ~= '' then
    return {'called', task}
  end
  if ended and string.sub(header_of(v[6]).to or '', 1, 1) == '@' then return {'answered', task} end
  local fields = fields_again(named, head, is_turn, args[3], digest)
  check_redrive(base, stream, ended, own_stream, agent, instance_key)

  uncount_rows(key, (is_turn and 0 or tonumber(named.rows or '1')) + ((ended and v[3] ~= '0') and 1 or 0) +
    forget_failures(base, task, failed))
  if not unpin(key, flags) then flags = redis.call('HGET', key, TASK.flags) or '' end
  dead.forget(base, args[1], found[2])
  redis.call('ZREM', base .. 'letters', task .. '|' .. args[1])
  if is_turn and args[3] ~= '' and head[2] == 'start' then redis.call('HSET', rk, RUN.input, args[3]) end
  if ended then
    local own = is_turn and run == FIRST_RUN
    local input = own and args[3] ~= '' and head[2] == 'start' and args[3] or v[7] or ''
    reopen(base, task, {header = v[6], input = input, flags = flags}, own and named.x or v[4] or '')
  end
  if not is_turn then
    ask_again(base, rk, step, stream, digest, ended, fields)
  elseif not ended then
    redis.call('HSET', rk, RUN.current, redis.call('XADD', base .. stream, '*', unpack(fields)))
  end
  return {'ok', task}
end
