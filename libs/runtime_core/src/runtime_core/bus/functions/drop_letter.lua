-- Forgets a dead letter; the ended task that it pinned may then expire.
-- KEYS 1 base · ARGV 1 letter id · RETURNS 1 or 0
local function drop_letter(keys, args)
  local base = keys[1]
  local found = redis.call('XRANGE', base .. 'dead', args[1], args[1])[1]
  if not found then return 0 end
  local task
  for i = 1, #found[2], 2 do
    if found[2][i] == 'taskid' then task = found[2][i + 1] end
  end
  redis.call('XDEL', base .. 'dead', args[1])
  if task then
    redis.call('ZREM', base .. 'letters', task .. '|' .. args[1])
    local key = base .. 'task:' .. task
    if ENDED[redis.call('HGET', key, 'status')] then
      redis.call('EXPIRE', key, redis.call('HGET', base .. 'meta', 'retention') or '3600')
    end
  end
  return 1
end
