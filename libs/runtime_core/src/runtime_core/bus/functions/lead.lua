-- Takes or keeps the lead of a role. A new leader gets a higher epoch, and every write of the role carries it.
-- `floor` is the highest epoch seen elsewhere: a broker that lost its memory starts above it. An epoch is never below the
-- time (ms): after a broker has lost a lead with its last writes, the next epoch is above the one that was lost.
-- KEYS 1 base · ARGV 1 role · 2 owner · 3 floor · RETURNS the epoch, or 0 if another live owner leads
local function lead(keys, args)
  local base, key = keys[1], keys[1] .. 'leader:' .. args[1]
  if not redis.call('ZSCORE', base .. 'alive', args[2]) then return 0 end
  local leader, newest = unpack(redis.call('HMGET', key, 'owner', 'epoch'))
  local epoch = tonumber(newest or '0')
  local floor = tonumber(args[3])
  if leader == args[2] and epoch > floor then return epoch end
  if leader and leader ~= args[2] and redis.call('ZSCORE', base .. 'alive', leader) then return 0 end
  epoch = math.max(epoch + 1, floor + 1, now_ms(base))
  redis.call('HSET', key, 'owner', args[2], 'epoch', text(epoch))
  return epoch
end
