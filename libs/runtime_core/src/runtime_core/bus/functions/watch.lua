-- A reader asks for a task's stream: its final event shall be there too.
-- KEYS 1 base · ARGV 1 task · RETURNS 1, or 0 where the task has ended or is not known
local function watch(keys, args)
  local key = keys[1] .. 'task:' .. args[1]
  local v = redis.call('HMGET', key, 'status', 'fl')
  if not v[1] or ENDED[v[1]] then return 0 end
  redis.call('HSET', key, 'fl', flag(v[2] or '', 'o'))
  return 1
end
