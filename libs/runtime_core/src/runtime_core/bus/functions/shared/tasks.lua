-- Tasks: their flags, the lists that count them, and their timers.

local ENDED = {completed = true, failed = true, cancelled = true}

local function flag(flags, letter)
  if string.find(flags, letter, 1, true) then return flags end
  return flags .. letter
end

-- A task whose context names a trace is flagged: the context of others is never read again.
local function traced_flag(flags, context)
  if context and string.find(context, '"traceparent":"', 1, true) then return flag(flags, FLAG.traced) end
  return flags
end

-- The traceparent in the context of a task with these flags, or nil.
local function trace_of(base, task, flags)
  if not flags or not string.find(flags, FLAG.traced, 1, true) then return nil end
  local read, context = pcall(cjson.decode, redis.call('HGET', base .. 'task:' .. task, RUN.context) or '')
  local trace = read and type(context) == 'table' and context.traceparent
  return type(trace) == 'string' and trace ~= '' and trace or nil
end

-- Lists a task, and counts it for metrics; `tenant` nil without a name. `indexes` has the tenants whose lists are not
-- empty, so that a sweep finds them. pcall: if another program has put something else in these places, only lists and
-- figures are lost.
local function list_start(base, task, created, tenant)
  redis.pcall('ZADD', base .. 'index', created, task)
  redis.pcall('ZADD', base .. 'open', created, task)
  if not tenant then return end
  redis.pcall('ZADD', base .. 'index:' .. tenant, created, task)
  redis.pcall('ZADD', base .. 'indexes', 'NX', created, tenant)
end

-- Stores a task that was not submitted; `entry` is that of its start event, or the word for where it waits.
local function store_task(base, task, stream, agent, key, data, context, from, entry)
  local created = in_flight(entry) and ms_of(entry) or text(now_ms(base))
  list_start(base, task, created)
  redis.call('HSET', base .. 'task:' .. task, 'status', 'accepted', RUN.current, entry, RUN.input, data, RUN.header,
    stream .. '\n' .. agent .. '\n' .. key .. '\n\n' .. created .. '\n0\n' .. task .. '\n' .. from .. '\n\n')
  local flags = traced_flag(entry == 'retry' and FLAG.timers or '', context)
  if context == '' then
    if flags ~= '' then redis.call('HSET', base .. 'task:' .. task, TASK.flags, flags) end
    return
  end
  if flags ~= '' then
    redis.call('HSET', base .. 'task:' .. task, RUN.context, context, TASK.flags, flags)
  else
    redis.call('HSET', base .. 'task:' .. task, RUN.context, context)
  end
end

-- A timer is listed with its task, so that the task's end removes it.
local function add_timer(base, task, member, due, asked)
  local key = base .. 'task:' .. task
  redis.call('ZADD', base .. 'timers', text(due), member)
  redis.call('HSET', key, TASK.timer .. member, asked or '', TASK.flags,
    flag(redis.call('HGET', key, TASK.flags) or '', FLAG.timers))
end
