-- Withdraws a request: nobody wants the task's answer any more. Nothing ends: a running handler learns of it from its
-- heartbeat, a later one from this mark, and each decides whether to continue.
-- KEYS 1 base · ARGV 1 task
-- RETURNS 'OK' · 'DONE' if the task has ended or is not known
local function withdraw_request(keys, args)
  local base, key = keys[1], keys[1] .. 'task:' .. args[1]
  local status = redis.call('HGET', key, 'status')
  if not status or ENDED[status] then return 'DONE' end
  stop_running(base, 'withdrawn:' .. args[1])
  redis.call('HSET', key, TASK.withdrawn, '1')
  return 'OK'
end
