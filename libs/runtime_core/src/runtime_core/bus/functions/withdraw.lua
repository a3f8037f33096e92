-- Says that nobody wants a task's answer any more. Nothing ends by it: its handler is told, one that runs by its
-- heartbeat, one that begins later by this mark, and decides by itself what to do.
-- KEYS 1 base · ARGV 1 task
-- RETURNS 'OK' · 'DONE' where the task has ended or is not known
local function withdraw(keys, args)
  local base, key = keys[1], keys[1] .. 'task:' .. args[1]
  local status = redis.call('HGET', key, 'status')
  if not status or ENDED[status] then return 'DONE' end
  stop_running(base, 'withdrawn:' .. args[1])
  redis.call('HSET', key, 'wd', '1')
  return 'OK'
end
