-- An ended task continues. Its first run is queued like any event, through the mailbox of its instance, which may serve
-- others by now. It replays from its journal. The steps it waited for were dropped at the end: it requests them again,
-- and child runs that were open continue from their journals. The state that calls back into the instance had left for
-- it is gone too: others may have written the state since.
local function reopen(base, task, v, context)
  local key = base .. 'task:' .. task
  forget_waits(base, task, FIRST_RUN, {TASK.final, 'ended', TASK.own_row, RUN.asks_in_turn, RUN.override, RUN.turn_owner,
    RUN.state_at_start})
  redis.call('HSET', key, 'status', 'running', TASK.flags, flag(v.flags, FLAG.reopened))
  redis.call('PERSIST', key)
  local now, tenant = text(now_ms(base)), header_of(v.h).tenant
  redis.pcall('ZADD', base .. 'open', now, task)
  if tenant and tenant ~= '' then redis.pcall('ZADD', base .. 'open:' .. tenant, now, task) end
  redis.call('ZREM', base .. 'stopped', task)
  local stream, agent, instance_key = target_of(v.h)
  local cur
  if instance_key ~= '' then
    cur = deliver(base, task, FIRST_RUN, stream, agent, instance_key, v.d, context)
  else
    cur = append_start(base, task, FIRST_RUN, stream, agent, '', v.d, context, '-1')
  end
  redis.call('HSET', key, RUN.current, cur)
end

-- The delivery's fields, as for its first attempt. `data`: new data, or '' for the old data.
local function fields_again(named, head, is_turn, data)
  head[7] = '1'
  -- A turn that no warm run has, and that no new run begins with: journaled steps do not run again.
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

-- Sends a call again. A reopened run is on its way: its turn finds the step requested, or answered. The answer wakes a
-- parked one.
local function ask_again(base, rk, step, stream, digest, ended, fields)
  redis.call('HDEL', rk, RUN.result .. step)
  redis.call('HSET', rk, RUN.missing .. step, digest .. string.sub(stream, 1, 1) .. (ended and WAKES.never or WAKES.alone))
  if not ended then redis.call('HSET', rk, RUN.current, 'held') end
  redis.call('XADD', base .. stream, '*', unpack(fields))
end

-- Removes a dead letter and returns its delivery to its stream, with its attempts counted from one.
-- KEYS 1 base
-- ARGV 1 letter id · 2 '1' to reopen an ended task · 3 new data (JSON) or '' for the old data
-- RETURNS {'ok', task} · {'missing'} · {'ended', task, status} · {'gone', task} if nothing waits for it any more
--         {'cut', task} if parts of it were too large to keep
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
  local v = redis.call('HMGET', key, 'status', TASK.flags, TASK.own_row, RUN.context)
  if not v[1] then return {'gone', task} end
  local ended, flags = ENDED[v[1]], v[2] or ''
  if ended and args[2] ~= '1' then return {'ended', task, v[1]} end
  local is_turn = is_agent_stream(stream)
  local waiting, step = run, nil
  if not is_turn then waiting, step = parent_of(run) end
  local rk = run_key(base, task, waiting)
  local r = redis.call('HMGET', rk, RUN.current, RUN.header, RUN.input)
  -- Without `cur` the journal was dropped with the task's end: there is nothing to continue from.
  if not r[1] or not r[2] then return {'gone', task} end
  local own_stream, agent, instance_key = target_of(r[2])
  -- The completed run of an instance has written its state: running it again would write it twice.
  if v[1] == 'completed' and instance_key ~= '' then return {'gone', task} end
  -- A running run has its error and may have acted on it: the error cannot be taken back.
  if not ended and r[1] ~= 'park' then return {'gone', task} end
  local fields = fields_again(named, head, is_turn, args[3])
  local digest = '00000000'
  if not is_turn then
    local journal = redis.call('HGET', rk, RUN.result .. step)
    if not journal then return {'gone', task} end
    if status_of(journal) ~= RESULT.error then return {'gone', task} end
    digest = digest_of(journal)
  end
  check_redrive(base, stream, ended, own_stream, agent, instance_key)

  uncount_rows(key, (is_turn and 0 or tonumber(named.rows or '1')) + ((ended and v[3] ~= '0') and 1 or 0))
  if not unpin(key, flags) then flags = redis.call('HGET', key, TASK.flags) or '' end
  dead.forget(base, args[1], found[2])
  redis.call('ZREM', base .. 'letters', task .. '|' .. args[1])
  if is_turn and args[3] ~= '' and head[2] == 'start' then
    redis.call('HSET', rk, RUN.input, args[3])
    r[3] = args[3]
  end
  if ended then reopen(base, task, {h = r[2], d = r[3] or '', flags = flags}, is_turn and named.x or v[4] or '') end
  if not is_turn then
    ask_again(base, rk, step, stream, digest, ended, fields)
  elseif not ended then
    redis.call('HSET', rk, RUN.current, redis.call('XADD', base .. stream, '*', unpack(fields)))
  end
  return {'ok', task}
end
