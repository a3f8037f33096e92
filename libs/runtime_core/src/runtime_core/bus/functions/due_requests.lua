-- The journal's entry and the record's row of a request that nobody has answered in time.
local function expire_request(base, task, run, step, request, now)
  local key = base .. 'task:' .. task
  local flags = redis.call('HGET', key, TASK.flags) or ''
  check_record(base, task, flags)
  check_waiting(base, task, run)
  check_stream(base, 'asks')
  local place, agent, asked, limit = request[1], request[2], request[6], request[7]
  local partition, there = string.match(place, '^@(%d+):(.*)$')
  local error = error_json('RequestTimeout', string.format(
    'agent %s/%s in partition %s has not answered within %.14g s (task %s there). If two agents wait for each ' ..
    'other, break the circle. If the work takes longer, raise WEFT_REQUEST_TIMEOUT_SECONDS.',
    agent, request[3], partition, tonumber(limit) / 1000, there))
  answer(base, task, run, step, RESULT.error, now, error)
  redis.call('HDEL', key, TASK.child .. run .. '/' .. step)
  close_request(base, task, run, step)
  cancel_elsewhere(base, place, task)
  redis.call('HINCRBY', key, 'steps', 1)
  record_rows(base, task, flags, '[{"run":' .. quote(run .. '/' .. step) .. ',"kind":"agent","name":' .. quote(agent) ..
    ',"status":"failed","started":' .. asked .. ',"ended":' .. now .. ',"cause":' .. quote(there) ..
    ',"error":' .. error .. '}]')
end

local function look_at_request(base, member, now, due)
  local requests = base .. 'requests'
  if string.sub(member, 1, 1) == '@' then
    redis.call('ZADD', requests, text(now + REQUEST.look_ms), member)
    due[#due + 1] = member
    due[#due + 1] = string.match(member, '^(.*)|')
    return
  end
  local task, run, step = string.match(member, '^(.-)|(.-)|(.*)$')
  local request = waiting_request(base, task, run, step)
  if not request then
    redis.call('ZREM', requests, member)
    return
  end
  local asked, limit = tonumber(request[6]), tonumber(request[7])
  if now >= asked + limit then return expire_request(base, task, run, step, request, text(now)) end
  -- The longer a request is open, the less often it is checked.
  local pause = math.max(REQUEST.look_ms, math.min(REQUEST.look_max_ms, now - asked))
  redis.call('ZADD', requests, text(math.min(now + pause, asked + limit)), member)
  due[#due + 1] = member
  due[#due + 1] = request[1]
end

-- Lists open requests to other partitions that are due for a check, and sets the time of the next one. A request over
-- its time limit is answered with an error, and the task in the other partition is cancelled.
-- KEYS 1 base · ARGV 1 maximum number
-- RETURNS {how many were due, then for each that is still open: its member, `@<partition>:<task>`}
local function due_requests(keys, args)
  local base = keys[1]
  local now, due = now_ms(base), {}
  local found = redis.call('ZRANGEBYSCORE', base .. 'requests', '-inf', text(now), 'LIMIT', 0, tonumber(args[1]))
  for _, member in ipairs(found) do
    -- A request that cannot be checked (a key of another type) changes nothing and does not block those behind it.
    if not pcall(look_at_request, base, member, now, due) then
      redis.call('ZADD', base .. 'requests', text(now + REQUEST.look_max_ms), member)
    end
  end
  return {#found, unpack(due)}
end
