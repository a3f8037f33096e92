-- Cancels a task: it ends now. Running handlers learn of it from their heartbeats, and their commits only settle the
-- entry.
-- KEYS 1 base · ARGV 1 task · 2 reason
-- RETURNS {'cancelled'} · {'ended', status} · {'unknown'}: remembered for 10 minutes with the newest 10,000 of the tenant
-- that begins this id, so that a later submit of it is refused
local function cancel(keys, args)
  local base, task = keys[1], args[1]
  local key = base .. 'task:' .. task
  local status, header, steps, flags, current =
    unpack(redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags, RUN.current))
  local now = text(now_ms(base))
  if not status then
    -- Apart from `stopped`, which the heartbeats of all handlers carry.
    -- By tenant: no tenant can make Weft forget the cancels of another.
    local tombs, ms = base .. 'tombs:' .. QUEUE.tenant_of(task), server_ms()
    redis.call('ZADD', tombs, text(ms), task)
    redis.call('ZREMRANGEBYSCORE', tombs, '-inf', '(' .. text(ms - 600000))
    redis.call('ZREMRANGEBYRANK', tombs, 0, -10001)
    redis.call('EXPIRE', tombs, 600)
    redis.call('HSET', base .. 'meta', 'tombs', now)
    return {'unknown'}
  end
  if ENDED[status] then return {'ended', status} end
  local ending = check_end(base, task, header, flags or '', 'cancelled')
  if current == 'queue' then QUEUE.leave(base, task, header) end
  end_task(base, task, ending, flags or '', 'cancelled', error_json('Cancelled', args[2]), steps or '0', now, '[]',
    false, in_flight(current))
  return {'cancelled'}
end
