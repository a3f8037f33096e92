-- Drops a dead letter. The ended task may expire if no other letter pins it.
-- KEYS 1 base · ARGV 1 letter id · RETURNS 1 or 0
local function drop_letter(keys, args)
  local base = keys[1]
  local found = redis.call('XRANGE', base .. 'dead', args[1], args[1])[1]
  if not found then return 0 end
  local task
  for i = 1, #found[2], 2 do
    if found[2][i] == 'taskid' then task = found[2][i + 1] end
  end
  local key = task and base .. 'task:' .. task
  local v = task and redis.call('HMGET', key, 'status', TASK.flags) or {}
  local retention = redis.call('HGET', base .. 'meta', 'retention') or '3600'
  redis.call('ZCARD', base .. 'letters')
  dead.forget(base, args[1], found[2])
  -- A refused command only names a task: its letter does not pin it.
  local pins = task and redis.call('ZREM', base .. 'letters', task .. '|' .. args[1]) == 1
  if v[1] and pins and not unpin(key, v[2] or '') and ENDED[v[1]] then
    drop_children(base, task)
    redis.call('EXPIRE', key, retention)
  end
  return 1
end
