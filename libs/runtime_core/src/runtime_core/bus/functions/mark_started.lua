-- Marks a call that may not be repeated as started, before it runs.
-- KEYS 1 base · ARGV 1 owner · 2 task · 3 run
-- RETURNS 1 where it may run, 0 where an earlier owner has started it (its outcome is unknown), 'FENCED'
local function mark_started(keys, args)
  local base = keys[1]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  return redis.call('HSETNX', base .. 'started', args[2] .. '/' .. args[3], args[1])
end
