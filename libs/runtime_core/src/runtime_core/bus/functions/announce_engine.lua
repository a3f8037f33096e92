-- A gateway announces that it serves streams of its engine, or that it no longer does. The announcement holds while its
-- owner is alive. Also stores when each stream was last served, by the heartbeat clock.
-- KEYS 1 base · ARGV 1 owner · 2 '1' it serves them, '0' no longer · then the streams · RETURNS 'OK'
local function announce_engine(keys, args)
  local base, owner = keys[1], args[1]
  local gateways = base .. 'gateways'
  redis.call('HLEN', base .. 'engines')
  redis.call('ZCARD', base .. 'alive')
  local clock = redis.call('HGET', base .. 'meta', 'beat_clock') or '0'
  for _, member in ipairs(redis.call('ZRANGE', gateways, 0, -1)) do
    local gone = string.match(member, '^%S+ (.*)$')
    if gone and not redis.call('ZSCORE', base .. 'alive', gone) then redis.call('ZREM', gateways, member) end
  end
  for i = 3, #args do
    redis.call('HSET', base .. 'engines', args[i], args[i])
    redis.call('ZADD', gateways, clock, args[i])
    if args[2] == '1' then
      redis.call('ZADD', gateways, clock, args[i] .. ' ' .. owner)
    else
      redis.call('ZREM', gateways, args[i] .. ' ' .. owner)
    end
  end
  return 'OK'
end
