-- Requests to instances in other partitions. The state-manager's relay carries them.

-- Calls an instance in another partition: the leader of this one starts a task there, in order, whose id makes a repeat
-- start nothing; its end comes back as the step's result. `place` is `@<partition>:<task>`.
local function ask_elsewhere(base, place, agent, key, data, context, back)
  return redis.call('XADD', base .. 'asks', '*', 'place', place, 'agent', agent, 'key', key, ENTRY.data, data,
    ENTRY.context, context, 'back', back)
end

-- Open requests to other partitions, which that partition, or this one, may forget when it loses its tail:
--   requests   by their next check (ms): `task|run|step`, or `@<partition>:<task>|<asker>` for a task to cancel
--   r:<step>   in the calling run's hash, so that it ends with the run: the packed request (see `open_request`)
local REQUEST = {look_ms = 10000, look_max_ms = 60000, timeout_ms = '3600000'}

-- Stores a request until its step has a result. `limit`: its own time limit in ms, or '' for the namespace's.
local function open_request(base, task, run, step, place, agent, key, data, context, limit)
  local back, now = task .. '|' .. run .. '|' .. step, now_ms(base)
  if limit == '' then limit = redis.call('HGET', base .. 'meta', 'request_timeout_ms') or REQUEST.timeout_ms end
  local entry = ask_elsewhere(base, place, agent, key, data, context, back)
  redis.call('HSET', run_key(base, task, run), RUN.request .. step,
    cmsgpack.pack({place, agent, key, data, context, text(now), limit, entry}))
  redis.call('ZADD', base .. 'requests', text(now + math.min(REQUEST.look_ms, tonumber(limit))), back)
end

-- The request that a run still waits for, or nil.
local function waiting_request(base, task, run, step)
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if not status or ENDED[status] then return nil end
  local v = redis.call('HMGET', run_key(base, task, run), RUN.missing .. step, RUN.request .. step)
  return v[1] and v[2] and cmsgpack.unpack(v[2]) or nil
end

local function close_request(base, task, run, step)
  redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)
  redis.call('HDEL', run_key(base, task, run), RUN.request .. step)
end

-- Cancels a task in another partition, and checks later whether it has ended.
local function cancel_elsewhere(base, place, task)
  redis.call('XADD', base .. 'asks', '*', 'place', place, 'cancel', task)
  redis.call('ZADD', base .. 'requests', text(now_ms(base) + REQUEST.look_ms), place .. '|' .. task)
end
