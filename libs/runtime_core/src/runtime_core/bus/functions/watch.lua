-- Requests a task's output stream for a reader, with its final event. With `n`, requests the ends of its runs on the
-- stream of state changes.
-- KEYS 1 base · ARGV 1 task · 2 '1' if its steps are wanted too, from now on; or 'n'
-- RETURNS 1, or 0 if the task has ended or is not known
local function watch(keys, args)
  local key = keys[1] .. 'task:' .. args[1]
  local status, known_flags = unpack(redis.call('HMGET', key, 'status', TASK.flags))
  if not status or ENDED[status] then return 0 end
  local flags = flag(known_flags or '', args[2] == 'n' and FLAG.watched or FLAG.output)
  if args[2] == '1' then flags = flag(flags, FLAG.steps_shown) end
  redis.call('HSET', key, TASK.flags, flags)
  return 1
end
