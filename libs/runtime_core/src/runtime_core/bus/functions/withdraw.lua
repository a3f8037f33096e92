-- Withdraws interest in a task's answer. Nothing ends: a running handler learns of it by its heartbeat, one that starts
-- later by this mark, and each decides what to do.
-- KEYS 1 base · ARGV 1 task
-- RETURNS 'OK' · 'DONE' if the task has ended or is not known
local function withdraw(keys, args)
  local base, key = keys[1], keys[1] .. 'task:' .. args[1]
  local status = redis.call('HGET', key, 'status')
  if not status or ENDED[status] then return 'DONE' end
  stop_running(base, 'withdrawn:' .. args[1])
  redis.call('HSET', key, TASK.withdrawn, '1')
  return 'OK'
end
