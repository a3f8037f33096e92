-- Checks before the first write. A function that raises is not rolled back, so it reads each key that it is about to
-- write first, by a cheap command of the key's type, which raises if the type differs.

local function check_stream(base, name) redis.call('XLEN', base .. name) end

-- Rows that the task's client requested.
local function check_shown(base, task, flags)
  if flags and string.find(flags, FLAG.steps_shown, 1, true) then check_stream(base, 'out:' .. task) end
end

-- Rows that are recorded, and shown if the task's client requested them.
local function check_record(base, task, flags)
  check_stream(base, 'record')
  check_shown(base, task, flags)
end

-- An instance that is entered or released, and the runs that hold it. `stream` is where its events go. Returns the
-- number of runs in its mailbox.
local function check_instance(base, inst, stream)
  local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  redis.call('LLEN', base .. 'nest:' .. inst)
  local waiting = redis.call('LLEN', base .. 'mail:' .. inst)
  if waiting >= 50 then redis.call('ZCARD', base .. 'timers') end
  if stream then check_stream(base, stream) end
  if busy then redis.call('HLEN', base .. 'interleaved') end
  if busy and string.find(busy, '\n', 1, true) then
    for _, ref in ipairs(lines(busy)) do
      local task, run = split_ref(ref)
      if task then redis.call('HLEN', run_key(base, task, run)) end
    end
  end
  return waiting
end

-- A run that may be resumed.
local function check_target(base, stream, agent, key)
  check_stream(base, stream)
  if key ~= '' then redis.call('HLEN', base .. 'inst:' .. agent .. '/' .. key) end
end

-- A run whose step gets its result. `header` is the run's, if the caller has read it.
local function check_waiting(base, task, run, header)
  header = header or redis.call('HGET', run_key(base, task, run), RUN.header)
  if header then check_target(base, target_of(header)) end
end

local function check_timers(base)
  redis.call('ZCARD', base .. 'timers')
  redis.call('HLEN', base .. 'delayed')
  redis.call('HLEN', base .. 'meta')
end

-- A message that becomes a task, which may end at once if its mailbox is full.
local function check_send(base, agent, key)
  if string.sub(agent, 1, 1) == '@' then return check_stream(base, 'asks') end
  local stream = redis.call('HGET', base .. 'agents', agent)
  if not stream then return check_stream(base, 'dead') end
  check_stream(base, stream)
  redis.call('HLEN', base .. 'meta')
  if key ~= '' then
    check_instance(base, agent .. '/' .. key)
    redis.call('ZCARD', base .. 'stopped')
    redis.call('HLEN', base .. 'end_hooks')
  end
end

-- The end of a task with this header and these flags. Returns the values that it has read, for `end_task`. `first`:
-- nothing is written before `end_task`, whose first write is to the record.
local function check_end(base, task, header, flags, status, first)
  local head = header_of(header)
  local ending = {head = head}
  ending.retention = head.retention ~= '' and head.retention or redis.call('HGET', base .. 'meta', 'retention')
    or '3600'
  if not first then check_stream(base, 'record') end
  if head.to ~= '' and not is_client(base, head.to) then check_stream(base, 'replies') end
  if status ~= 'completed' then
    redis.call('ZCARD', base .. 'stopped')
    local own = redis.call('HMGET', base .. 'task:' .. task, RUN.context, RUN.result .. '0', RUN.unrecorded)
    ending.hooks = hooks_of_end(base, head, own[1], own[2])
    ending.unwritten = own[3]
  end
  if head.key ~= '' then check_instance(base, head.agent .. '/' .. head.key, head.stream) end
  if flags == '' then return ending end
  ending.trace = trace_of(base, task, flags)
  if string.find(flags, FLAG.output, 1, true) then check_stream(base, 'out:' .. task) end
  if string.find(flags, FLAG.watched, 1, true) then check_stream(base, 'states') end
  if string.find(flags, FLAG.timers, 1, true) then check_timers(base) end
  if not string.find(flags, FLAG.children, 1, true) then return ending end
  local fields = redis.call('HGETALL', base .. 'task:' .. task)
  if first then ending.fields = fields end
  for i = 1, #fields, 2 do
    local child, inst = child_of(fields[i]), fields[i + 1]
    if child and string.sub(inst, 1, 1) == '@' then
      check_stream(base, 'asks')
      redis.call('ZCARD', base .. 'requests')
    elseif child then
      local child_header = redis.call('HGET', run_key(base, task, child), RUN.header)
      if inst ~= '' then check_instance(base, inst, child_header and target_of(child_header)) end
    end
  end
  return ending
end

-- A published message, with each task that it starts.
local function check_publish(base, topic, key, sender)
  if string.sub(topic, 1, 1) == '@' then return check_stream(base, 'asks') end
  for _, agent in ipairs((subscribers(base, topic, key, sender))) do check_send(base, agent, key) end
  check_stream(base, 'undelivered')
  redis.call('HLEN', base .. 'meta')
end
