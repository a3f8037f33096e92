-- Calls and runs that running tasks start wait for their tenants' turns while their work stream is long, as new tasks do:
-- then wide turns keep no other tenant's work waiting. Those of tasks without a tenant never wait. A delivery that waits is
-- stored like one between two attempts, which every release knows: `cur` = `retry`, its fields in `delayed`, and a timer.
-- A refill (queues.lua) moves it onto the stream long before the timer is due, which is there in case none does.
--   queue:<stream>|<line>   members of `delayed` that wait for a stream, `e|<stream>|~<number><line>`, by number. A line is
--                           a newline, which no name of a tenant has, and the tenant
--   turns:<stream>          has such lines, too: a tenant's running tasks and its new ones take separate turns
--   queues                  <stream>|~: how many deliveries wait for the stream; <stream> counts them with the tasks
local QUEUE = {
  STRIDE = 1000000, LOOKS = 50, STEP_MS = 100, PAST = 8, TOP_UP = 32, HIGHEST = 9, PRIORITY = 2 ^ 44, RUNNING = '\n',
  TIMER_MS = 30000, AT_ONCE = 32, MOST_MOVES = 256,
}

-- How many deliveries may go straight onto a stream before its length is looked at again, by key.
local unlooked = {}

-- The tenant at the beginning of an id, or an empty text. Publishers cannot name ids of another tenant.
function QUEUE.tenant_of(task) return string.match(task, '^([^.]*)%.') or '' end

function QUEUE.key(base, stream, tenant) return base .. 'queue:' .. stream .. '|' .. tenant end

-- Entries of a stream that nobody has read. pcall: a lost group is recreated at 0, so nothing counts as read.
function QUEUE.unread(base, stream)
  local length = redis.call('XLEN', base .. stream)
  if length == 0 then return 0 end
  local pending = redis.pcall('XPENDING', base .. stream, group_of(stream))
  return math.max(0, length - tonumber(pending[1] or 0))
end

-- Returns whether a delivery still counts: a turn while its run is at `current`, a call while its step is missing.
function QUEUE.is_wanted(base, current, is_turn, task, run, status)
  if not status or ENDED[status] then return false end
  if is_turn then return redis.call('HGET', run_key(base, task, run), RUN.current) == current end
  local parent, step = parent_of(run)
  return redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 1
end

-- A task that starts deliveries, as `QUEUE.append` needs it: a table with the task's key, and its header if it is known.
-- What it keeps in `waiting` must be written by `QUEUE.flush` before the function ends.
function QUEUE.caller(base, task) return {key = base .. 'task:' .. task} end

-- Whether a delivery must wait: others wait for this stream, or it is long. pcall: the caller has written already.
function QUEUE.is_long(base, stream)
  local key = base .. stream
  local left = unlooked[key] or 0
  if left > 0 then
    unlooked[key] = left - 1
    return false
  end
  local waiting = redis.pcall('HMGET', base .. 'queues', stream, stream .. '|~')
  if waiting[1] and tonumber(waiting[2] or '0') > 0 then return true end
  local most = redis.pcall('HGET', base .. 'meta', 'ready_max')
  local room = 100
  -- Without `ready_max`, no process of a release that refills streams has run here yet.
  if type(most) == 'string' then room = tonumber(most) - QUEUE.unread(base, stream) end
  if room < 1 then return true end
  unlooked[key] = room - 1
  return false
end

-- Where the deliveries of a caller wait for a stream, or nil if it has no tenant, or if another program stores something
-- else there.
function QUEUE.line(base, stream, caller)
  local all = caller.waiting and caller.waiting[stream]
  if all then return all end
  local header = caller.task_header or redis.pcall('HGET', caller.key, RUN.header)
  local tenant = type(header) == 'string' and header_of(header).tenant or ''
  if tenant == '' then tenant = QUEUE.tenant_of(string.sub(caller.key, #base + 6)) end
  if tenant == '' then
    caller.goes_straight = true
    return nil
  end
  local name = QUEUE.RUNNING .. tenant
  local key, state = QUEUE.key(base, stream, name), redis.pcall('HMGET', base .. 'queues', 'seq', stream .. '|now')
  local clock, now = pcall(now_ms, base)
  for _, reply in ipairs({state, redis.pcall('ZCARD', key), redis.pcall('ZCARD', base .. 'turns:' .. stream),
    redis.pcall('ZCARD', base .. 'timers'), redis.pcall('HLEN', base .. 'delayed')}) do
    if not clock or type(reply) == 'table' and reply.err then return nil end
  end
  all = {name = name, key = key, order = tonumber(state[1] or '0'), now = state[2] or '0', count = 0,
    due = text(now + QUEUE.TIMER_MS), orders = {}, timers = {}, packed = {}, listed = {}}
  caller.waiting = caller.waiting or {}
  caller.waiting[stream] = all
  return all
end

-- Lets a delivery with these fields wait. Returns false if that is impossible.
function QUEUE.wait(base, stream, caller, fields)
  local all = QUEUE.line(base, stream, caller)
  if not all then return false end
  local n, key = 2 * all.count, base .. 'task:' .. string.match(fields[2], '^[^\n]*\n[^\n]*\n([^\n]*)')
  all.count, all.order = all.count + 1, all.order + 1
  local member = 'e|' .. stream .. '|~' .. text(all.order) .. all.name
  all.orders[n + 1], all.orders[n + 2] = text(all.order), member
  all.timers[n + 1], all.timers[n + 2] = all.due, member
  all.packed[n + 1], all.packed[n + 2] = member, cmsgpack.pack(fields)
  if key == caller.key then
    all.listed[#all.listed + 1] = TASK.timer .. member
    all.listed[#all.listed + 1] = ''
  else
    redis.call('HSET', key, TASK.timer .. member, '')
  end
  return true
end

-- Appends a delivery that a running task starts, or lets it wait. Returns its entry, or `retry`.
function QUEUE.append(base, stream, caller, fields)
  local waits = not caller.goes_straight and (caller.waiting and caller.waiting[stream] or QUEUE.is_long(base, stream))
  if waits and QUEUE.wait(base, stream, caller, fields) then return 'retry' end
  return redis.call('XADD', base .. stream, '*', unpack(fields))
end

-- `scores`: scores and members of a sorted set in turn. Lua passes no more than 8,000 values in one call.
function QUEUE.add(key, scores)
  for i = 1, #scores, 4000 do redis.call('ZADD', key, unpack(scores, i, math.min(i + 3999, #scores))) end
end

-- Writes what a caller lets wait: few commands for thousands of deliveries.
function QUEUE.flush(base, caller)
  for stream, all in pairs(caller.waiting or {}) do
    local queues = base .. 'queues'
    QUEUE.add(all.key, all.orders)
    QUEUE.add(base .. 'timers', all.timers)
    set_fields(base .. 'delayed', all.packed)
    if all.listed[1] then set_fields(caller.key, all.listed) end
    -- A tenant that comes back starts at the current turn, without catching up on missed ones.
    redis.call('ZADD', base .. 'turns:' .. stream, 'NX', all.now, all.name)
    redis.call('HINCRBY', queues, 'seq', all.count)
    redis.call('HINCRBY', queues, stream, all.count)
    redis.call('HINCRBY', queues, stream .. '|~', all.count)
    redis.call('HINCRBY', base .. 'meta', 'queued', all.count)
  end
  caller.waiting = nil
end

-- Appends the start event of a run. `turn` is 0 for a run without a past. Another number makes its reader load the
-- journal first. `caller` is that of `QUEUE.append`, if a task starts the run.
local function append_start(base, task, run, stream, agent, key, data, context, turn, caller)
  local header = '1\nstart\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. key .. '\n1\n' .. (turn or '0')
  local fields = {ENTRY.header, header, ENTRY.data, data}
  if context and context ~= '' then fields[5], fields[6] = ENTRY.context, context end
  if caller then return QUEUE.append(base, stream, caller, fields) end
  return redis.call('XADD', base .. stream, '*', unpack(fields))
end
