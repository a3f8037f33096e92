-- Does what is due: appends retries again, answers sleeps and questions, ends tasks over their time.
-- KEYS 1 base
-- ARGV 1 how many at most · 2 stream limit (unused work waits rather than grow without bound)
-- RETURNS {how many were done, ms until the next timer or -1}
local function promote(keys, args)
  local base = keys[1]
  local timers, delayed = base .. 'timers', base .. 'delayed'
  local now = now_ms(base)
  local due = redis.call('ZRANGEBYSCORE', timers, '-inf', text(now), 'LIMIT', 0, tonumber(args[1]))
  for _, member in ipairs(due) do
    redis.call('ZREM', timers, member)
    local kind, rest = string.sub(member, 1, 1), string.sub(member, 3)
    if kind == 'e' then
      local packed = redis.call('HGET', delayed, member)
      redis.call('HDEL', delayed, member)
      if packed then
        local stream = string.match(rest, '^([^|]*)|')
        local fields = cmsgpack.unpack(packed)
        local head = lines(fields[2])
        local task, run = head[3], head[4]
        local key = base .. 'task:' .. task
        local status = redis.call('HGET', key, 'status')
        redis.call('HDEL', key, 'z:' .. member)
        if status and not ENDED[status] then
          if string.sub(stream, 1, 5) == 'agent' then
            local rk = run_key(base, task, run)
            if redis.call('HGET', rk, 'cur') == 'retry' then
              redis.call('HSET', rk, 'cur', redis.call('XADD', base .. stream, '*', unpack(fields)))
            end
          else
            local parent, step = parent_of(run)
            if redis.call('HEXISTS', run_key(base, task, parent), 'm:' .. step) == 1 then
              redis.call('XADD', base .. stream, '*', unpack(fields))
            end
          end
        end
      end
    elseif kind == 's' then
      local value = redis.call('HGET', delayed, member)
      redis.call('HDEL', delayed, member)
      local task, run, step = string.match(rest, '^(.-)|(.-)|(.*)$')
      local key = base .. 'task:' .. task
      local status = redis.call('HGET', key, 'status')
      if status then redis.call('HDEL', key, 'z:' .. member) end
      if value and status and not ENDED[status] then
        local status_letter, asked, payload = string.sub(value, 1, 1), string.sub(value, 2, 14), string.sub(value, 15)
        if answer(base, task, run, step, status_letter, text(now), payload) then
          record_answer(base, task, run, step, asked, text(now), status_letter, payload)
        end
      end
    elseif kind == 'd' then
      local key = base .. 'task:' .. rest
      local v = redis.call('HMGET', key, 'status', 'h', 'steps', 'fl', 'cur')
      if v[1] and not ENDED[v[1]] then
        local in_flight = v[5] and string.find(v[5], '-', 1, true)
        end_task(base, rest, v[2], v[4] or '', 'failed', error_json('TimeLimit', 'the task was not done within its timeout_seconds'),
          v[3] or '0', text(now), '[]', false, in_flight)
      end
    elseif kind == 'i' then
      -- Goes on with a mailbox whose head was all ended tasks.
      if redis.call('HGET', base .. 'inst:' .. rest, 'busy') == '|' then release(base, rest, '', '') end
    end
  end
  local next_due = redis.call('ZRANGE', timers, 0, 0, 'WITHSCORES')
  local wait = -1
  if next_due[2] then wait = math.max(0, tonumber(next_due[2]) - now) end
  return {#due, wait}
end
