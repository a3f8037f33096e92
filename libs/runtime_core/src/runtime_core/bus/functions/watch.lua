-- A reader asks for a task's stream: its final event shall be there too. Or, with `n`, somebody waits for its runs:
-- their ends shall be told on the stream of states.
-- KEYS 1 base · ARGV 1 task · 2 '1' where its steps are wanted too, from now on; or 'n'
-- RETURNS 1, or 0 where the task has ended or is not known
local function watch(keys, args)
  local key = keys[1] .. 'task:' .. args[1]
  local v = redis.call('HMGET', key, 'status', 'fl')
  if not v[1] or ENDED[v[1]] then return 0 end
  local flags = flag(v[2] or '', args[2] == 'n' and 'n' or 'o')
  if args[2] == '1' then flags = flag(flags, 'r') end
  redis.call('HSET', key, 'fl', flags)
  return 1
end
