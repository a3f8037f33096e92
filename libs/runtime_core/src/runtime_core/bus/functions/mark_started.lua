-- Marks a call that may not be repeated as started, before it runs.
-- KEYS 1 base · ARGV 1 owner · 2 task · 3 run
-- RETURNS 1 where it may run, 0 where an earlier owner has started it (its outcome is unknown), 'FENCED'
local function mark_started(keys, args)
  local base = keys[1]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  local field = args[2] .. '/' .. args[3]
  if redis.call('HSETNX', base .. 'started', field, args[1]) == 1 then return 1 end
  -- The same owner again: the reply of its first call was lost.
  return redis.call('HGET', base .. 'started', field) == args[1] and 1 or 0
end
