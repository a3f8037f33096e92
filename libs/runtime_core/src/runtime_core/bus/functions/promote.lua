local function promote_retry(base, member, rest)
  local stream = string.match(rest, '^([^|]*)|')
  local packed = redis.call('HGET', base .. 'delayed', member)
  local fields, task, run, status
  if packed then
    fields = cmsgpack.unpack(packed)
    local head = lines(fields[2])
    task, run = head[3], head[4]
    status = redis.call('HGET', base .. 'task:' .. task, 'status')
  end
  local waits, rk = false, nil
  if status and not ENDED[status] then
    check_stream(base, stream)
    if is_agent_stream(stream) then
      rk = run_key(base, task, run)
      waits = redis.call('HGET', rk, RUN.current) == 'retry'
    else
      local parent, step = parent_of(run)
      waits = redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 1
    end
  end
  redis.call('ZREM', base .. 'timers', member)
  redis.call('HDEL', base .. 'delayed', member)
  if status then redis.call('HDEL', base .. 'task:' .. task, TASK.timer .. member) end
  if not waits then return end
  local entry = redis.call('XADD', base .. stream, '*', unpack(fields))
  if rk then redis.call('HSET', rk, RUN.current, entry) end
end

local function promote_answer(base, member, rest, now)
  local task, run, step = string.match(rest, '^(.-)|(.-)|(.*)$')
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', TASK.timer .. member)
  local status = v[1]
  -- A plain sleep stores only the time of its request.
  local value = redis.call('HGET', base .. 'delayed', member) or (RESULT.ok .. (v[2] or text(now)) .. 'null')
  local live = status and not ENDED[status]
  if live then
    check_waiting(base, task, run)
    check_record(base, task, redis.call('HGET', key, TASK.flags))
  end
  redis.call('ZREM', base .. 'timers', member)
  redis.call('HDEL', base .. 'delayed', member)
  if status then redis.call('HDEL', key, TASK.timer .. member) end
  if not live then return end
  local letter, asked, payload = string.sub(value, 1, 1), string.sub(value, 2, 14), string.sub(value, 15)
  if answer(base, task, run, step, letter, text(now), payload) then
    record_answer(base, task, run, step, asked, text(now), letter, payload)
  end
end

local function promote_deadline(base, member, task, now)
  local v = redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.header, 'steps', TASK.flags, RUN.current)
  local live = v[1] and not ENDED[v[1]]
  local ending = live and check_end(base, task, v[2], v[4] or '', 'failed')
  redis.call('ZREM', base .. 'timers', member)
  if not live then return end
  if v[5] == 'queue' then QUEUE.leave(base, task, v[2]) end
  end_task(base, task, ending, v[4] or '', 'failed', error_json('TimeLimit', 'the task was not done within its timeout_seconds'),
    v[3] or '0', text(now), '[]', false, in_flight(v[5]))
end

-- Continues with a mailbox that began with many ended tasks, or that has no holder any more.
local function promote_mailbox(base, member, inst)
  check_instance(base, inst)
  local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  redis.call('ZREM', base .. 'timers', member)
  if busy and busy ~= '|' then return end
  if not busy then redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.holders, '|') end
  release(base, inst, '', '')
end

local PROMOTE = {e = promote_retry, s = promote_answer, d = promote_deadline, i = promote_mailbox}

-- Fires due timers: appends retries again, answers sleeps and questions, ends tasks over their time limit. Also moves a
-- few tasks that wait for their tenants' turns, and returns their number, so handlers need no call for it.
-- KEYS 1 base
-- ARGV 1 maximum number · 2 stream limit (unused work waits rather than grow without bound)
-- RETURNS {number of fired timers, ms until the next timer or -1, number of tasks that wait for their tenants' turns}
local function promote(keys, args)
  local base = keys[1]
  local timers = base .. 'timers'
  local now = now_ms(base)
  local due = redis.call('ZRANGEBYSCORE', timers, '-inf', text(now), 'LIMIT', 0, tonumber(args[1]))
  for _, member in ipairs(due) do
    -- A timer that cannot fire (a key of another type) changes nothing, and does not hold up those behind it.
    if not pcall(PROMOTE[string.sub(member, 1, 1)], base, member, string.sub(member, 3), now) then
      redis.call('ZADD', timers, text(now + 60000), member)
    end
  end
  local next_due = redis.call('ZRANGE', timers, 0, 0, 'WITHSCORES')
  local wait = -1
  if next_due[2] then wait = math.max(0, tonumber(next_due[2]) - now) end
  return {#due, wait, QUEUE.refill_all(base, QUEUE.TOP_UP, now)}
end
