-- Cancels a task: it ends now. Work in flight learns of it by its heartbeat and is settled when it comes in.
-- KEYS 1 base · ARGV 1 task · 2 reason
-- RETURNS {'cancelled'} · {'ended', status} · {'unknown'}: remembered, so that a later submit of this id is refused
local function cancel(keys, args)
  local base, task = keys[1], args[1]
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags, RUN.current)
  local now = text(now_ms(base))
  if not v[1] then
    stop_running(base, 'tomb:' .. task)
    redis.call('HSET', base .. 'meta', 'tombs', now)
    return {'unknown'}
  end
  if ENDED[v[1]] then return {'ended', v[1]} end
  local ending = check_end(base, task, v[2], v[4] or '', 'cancelled')
  if v[5] == 'queue' then QUEUE.leave(base, task, v[2]) end
  end_task(base, task, ending, v[4] or '', 'cancelled', error_json('Cancelled', args[2]), v[3] or '0', now, '[]', false,
    in_flight(v[5]))
  return {'cancelled'}
end
