-- Stores, changes or removes a schedule with its next time, if it is still the one that the caller has read.
-- KEYS 1 base
-- ARGV 1 id · 2 its expected current value, '' for none, '*' for any · 3 its new value (JSON), '' removes it
--      4 its next check (epoch ms) or '' for never · 5 maximum number of schedules
--      6 the leader's epoch, or '' for a direct change
-- RETURNS 1 · 0 if it has a different value, or there is none to remove · -1 over the limit
--         · 'FENCED' for a leader that was replaced: in these cases nothing was written
local function schedule(keys, args)
  local kept, times = keys[1] .. 'schedules', keys[1] .. 'scheduled'
  local there = redis.call('HGET', kept, args[1])
  redis.call('ZCARD', times)
  if args[6] ~= '' then
    local newest = redis.call('HGET', keys[1] .. 'leader:admit', 'epoch')
    if tonumber(args[6]) < tonumber(newest or '0') then return 'FENCED' end
  end
  if args[2] ~= '*' and (there or '') ~= args[2] then return 0 end
  if args[3] == '' then
    if not there then return 0 end
    redis.call('HDEL', kept, args[1])
    redis.call('ZREM', times, args[1])
    return 1
  end
  if not there and redis.call('HLEN', kept) >= tonumber(args[5]) then return -1 end
  redis.call('HSET', kept, args[1], args[3])
  if args[4] ~= '' then redis.call('ZADD', times, args[4], args[1]) else redis.call('ZREM', times, args[1]) end
  return 1
end
