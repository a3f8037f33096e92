-- A consumer leaves: its unstarted deliveries are handed back without counting, and others may reclaim them immediately.
-- KEYS 1 base · ARGV 1 owner · then pairs: stream, entry · RETURNS how many were handed back
local function leave(keys, args)
  local base, owner = keys[1], args[1]
  redis.call('ZCARD', base .. 'alive')
  redis.call('HLEN', base .. 'quarantine')
  for i = 2, #args, 2 do check_stream(base, args[i]) end
  local count = 0
  for i = 2, #args, 2 do
    local key, group = base .. args[i], group_of(args[i])
    local item = redis.call('XPENDING', key, group, args[i + 1], args[i + 1], 1, owner)[1]
    if item then
      redis.call('XCLAIM', key, group, owner, 0, args[i + 1], 'RETRYCOUNT', math.max(0, item[4] - 1), 'JUSTID')
      -- An entry that ran alone did not kill its process, but `adopt` counted its delivery as a death.
      local alone = args[i] .. '|' .. args[i + 1]
      local deaths = tonumber(redis.call('HGET', base .. 'quarantine', alone) or 0)
      if deaths > 0 then redis.call('HSET', base .. 'quarantine', alone, deaths - 1) end
      count = count + 1
    end
  end
  remove_owner(base, owner)
  return count
end
