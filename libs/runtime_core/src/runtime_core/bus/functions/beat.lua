-- A consumer's heartbeat, sent by the loop that runs its handlers. It also measures the silence of other owners. Only
-- heartbeats advance the clock for silence, each by at most one heartbeat's length. While the broker is down the clock
-- stops, so a broker pause declares nobody dead. Consumers that are constantly killed and restarted still advance it
-- together.
-- KEYS 1 base
-- ARGV 1 owner · 2 lease ms · 3 longest step of the clock, ms · 4 '1' at the first beat
--      5 ms: report tasks stopped from then on
-- RETURNS {'OK', server ms, owners declared dead, task stopped, or `task|path` of a withdrawn step…}
--         · {'FENCED'}: this owner was declared dead
local function beat(keys, args)
  local base = keys[1]
  local alive, meta = base .. 'alive', base .. 'meta'
  if args[4] ~= '1' and not redis.call('ZSCORE', alive, args[1]) then return {'FENCED'} end
  redis.call('ZCARD', base .. 'stopped')
  local now = server_ms()
  local beat_at, beat_clock = unpack(redis.call('HMGET', meta, 'beat_at', 'beat_clock'))
  local clock = tonumber(beat_clock or '0')
  clock = clock + math.max(0, math.min(now - tonumber(beat_at or text(now)), tonumber(args[3])))
  redis.call('HSET', meta, 'beat_at', text(now), 'beat_clock', text(clock))
  redis.call('ZADD', alive, text(clock), args[1])
  local dead = redis.call('ZRANGEBYSCORE', alive, '-inf', '(' .. text(clock - tonumber(args[2])))
  for _, owner in ipairs(dead) do remove_owner(base, owner) end
  local reply = {'OK', text(now), #dead}
  if args[5] ~= '' then
    -- Includes those of the same millisecond: some were reported before, others came after that beat.
    for _, task in ipairs(redis.call('ZRANGEBYSCORE', base .. 'stopped', args[5], '+inf')) do
      reply[#reply + 1] = task
    end
  end
  return reply
end
