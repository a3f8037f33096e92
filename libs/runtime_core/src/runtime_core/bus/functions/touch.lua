-- Writes something, so that a WAIT or WAITAOF that follows on this connection has a write to cover.
-- KEYS 1 base
-- RETURNS 'OK'
local function touch(keys)
  redis.call('HSET', keys[1] .. 'meta', 'touched', '1')
  return 'OK'
end
