-- Trims dead letters that are too old, and the oldest of the largest share while all of them have too many bytes.
-- KEYS 1 base
-- ARGV 1 limit on the bytes of all letters: it holds for each function that writes a letter · 2 retention (ms)
-- RETURNS {trimmed by age, trimmed by bytes, letters on the stream, letters that are counted}
local function trim_letters(keys, args)
  local base = keys[1]
  redis.call('XLEN', base .. 'dead')
  if redis.call('HGET', base .. 'meta', 'dead_max') ~= args[1] then
    redis.call('HSET', base .. 'meta', 'dead_max', args[1])
  end
  -- By the server's own clock, as entry ids are.
  local now = server_ms()
  local old = dead.trim_old(base, now - tonumber(args[2]), now)
  local large = dead.make_room(base, '', 0)
  return {old, large, redis.call('XLEN', base .. 'dead'), dead.counted(base)}
end
