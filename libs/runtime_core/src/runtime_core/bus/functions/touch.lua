-- Writes something, so that a following WAIT or WAITAOF on this connection covers a write.
-- KEYS 1 base
-- RETURNS 'OK'
local function touch(keys)
  redis.call('HSET', keys[1] .. 'meta', 'touched', '1')
  return 'OK'
end
