-- Sets the state of an agent's instance from outside any run, unless a run holds it.
-- KEYS 1 base · ARGV 1 instance (`agent/key`) · 2 state (JSON)
-- RETURNS 'OK' · 'BUSY' if a run holds the instance: its commit would overwrite the state
local function put_state(keys, args)
  local key = keys[1] .. 'inst:' .. args[1]
  if redis.call('HGET', key, INSTANCE.holders) then return 'BUSY' end
  redis.call('HSET', key, 'state', args[2])
  return 'OK'
end
