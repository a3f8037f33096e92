-- Writes something, so that a following WAIT or WAITAOF on this connection covers a write.
-- KEYS 1 base
-- RETURNS 'OK'
local function write_marker(keys)
  redis.call('HSET', keys[1] .. 'meta', 'marker', '1')
  return 'OK'
end
