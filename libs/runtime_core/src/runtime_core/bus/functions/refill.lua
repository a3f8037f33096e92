-- Moves tasks that wait for their tenants' turns onto work streams, as many as there are hands for.
-- KEYS 1 base
-- ARGV 1 how many entries of each stream shall be unread · 2 … streams; none: all that tasks wait for
-- RETURNS how many tasks still wait
local function refill(keys, args)
  local base, streams = keys[1], nil
  if #args > 1 then streams = {unpack(args, 2)} end
  return QUEUE.refill_all(base, tonumber(args[1]), now_ms(base), streams)
end
