-- A reader wants a task's output stream: its final event goes there too. With `n`, somebody waits for its runs: their
-- ends go to the stream of state changes.
-- KEYS 1 base · ARGV 1 task · 2 '1' if its steps are wanted too, from now on; or 'n'
-- RETURNS 1, or 0 if the task has ended or is not known
local function watch(keys, args)
  local key = keys[1] .. 'task:' .. args[1]
  local v = redis.call('HMGET', key, 'status', TASK.flags)
  if not v[1] or ENDED[v[1]] then return 0 end
  local flags = flag(v[2] or '', args[2] == 'n' and FLAG.watched or FLAG.output)
  if args[2] == '1' then flags = flag(flags, FLAG.steps_shown) end
  redis.call('HSET', key, TASK.flags, flags)
  return 1
end
