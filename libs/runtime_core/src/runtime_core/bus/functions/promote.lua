local function promote_retry(base, member, rest, now)
  if QUEUE.postpone(base, member, now) then return end
  local stream = string.match(rest, '^([^|]*)|')
  local packed = redis.call('HGET', base .. 'delayed', member)
  local fields, task, run, status
  if packed then
    fields = cmsgpack.unpack(packed)
    local head = lines(fields[2])
    task, run = head[3], head[4]
    status = redis.call('HGET', base .. 'task:' .. task, 'status')
  end
  local is_turn = is_agent_stream(stream)
  local waits = QUEUE.is_wanted(base, 'retry', is_turn, task, run, status)
  if waits then check_stream(base, stream) end
  redis.call('ZREM', base .. 'timers', member)
  redis.call('HDEL', base .. 'delayed', member)
  if status then redis.call('HDEL', base .. 'task:' .. task, TASK.timer .. member) end
  if not waits then return end
  local entry = redis.call('XADD', base .. stream, '*', unpack(fields))
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, entry) end
end

local function promote_answer(base, member, rest, now)
  local task, run, step = string.match(rest, '^(.-)|(.-)|(.*)$')
  local key = base .. 'task:' .. task
  local status, asked_at_ms = unpack(redis.call('HMGET', key, 'status', TASK.timer .. member))
  -- A plain sleep stores only the time of its request.
  local value = redis.call('HGET', base .. 'delayed', member) or (RESULT.ok .. (asked_at_ms or text(now)) .. 'null')
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
  local status, header, steps, flags, current =
    unpack(redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.header, 'steps', TASK.flags, RUN.current))
  local live = status and not ENDED[status]
  local ending = live and check_end(base, task, header, flags or '', 'failed')
  redis.call('ZREM', base .. 'timers', member)
  if not live then return end
  if current == 'queue' then QUEUE.leave(base, task, header) end
  end_task(base, task, ending, flags or '', 'failed',
    error_json('TimeLimit', 'the task was not done within its timeout_seconds'),
    steps or '0', text(now), '[]', false, in_flight(current))
end

-- Continues with a mailbox whose first events belong to many ended tasks, or that has no holder any more.
local function promote_mailbox(base, member, inst)
  check_instance(base, inst)
  local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  redis.call('ZREM', base .. 'timers', member)
  if not busy then redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.holders, '|') end
  release(base, inst, '', '')
end

-- Starts waiting work of a limit that may start by now.
local function promote_limit(base, member, limit)
  redis.call('ZREM', base .. 'timers', member)
  SLOT.look_after(base, limit)
end

local PROMOTE = {e = promote_retry, s = promote_answer, d = promote_deadline, i = promote_mailbox, l = promote_limit}

-- Fires due timers: appends retries again, answers sleeps and questions, ends tasks over their time limit. Also moves a
-- few tasks and calls that wait for their tenants' turns, and returns their number, so handlers need no call for it.
-- KEYS 1 base
-- ARGV 1 maximum number · 2 stream limit (unread work waits instead of growing without bound)
-- RETURNS {number of fired timers, ms until the next timer or -1, number of tasks that wait for their tenants' turns}
local function promote(keys, args)
  local base = keys[1]
  local timers = base .. 'timers'
  local now = now_ms(base)
  local due = redis.call('ZRANGEBYSCORE', timers, '-inf', text(now), 'LIMIT', 0, tonumber(args[1]))
  for _, member in ipairs(due) do
    -- A timer that cannot fire (a key of another type) changes nothing and does not block those behind it.
    if not pcall(PROMOTE[string.sub(member, 1, 1)], base, member, string.sub(member, 3), now) then
      redis.call('ZADD', timers, text(now + 60000), member)
    end
  end
  local next_due = redis.call('ZRANGE', timers, 0, 0, 'WITHSCORES')
  local wait = -1
  if next_due[2] then wait = math.max(0, tonumber(next_due[2]) - now) end
  return {#due, wait, QUEUE.refill_all(base, QUEUE.TOP_UP, now)}
end
