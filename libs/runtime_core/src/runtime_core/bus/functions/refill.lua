-- Moves tasks and calls that wait for their tenants' turns onto work streams, until the streams have enough unread entries.
-- KEYS 1 base
-- ARGV 1 target number of unread entries of each stream · 2 … streams; none: all with waiting work
-- RETURNS how many still wait
local function refill(keys, args)
  local base, streams = keys[1], nil
  if #args > 1 then streams = {unpack(args, 2)} end
  return QUEUE.refill_all(base, tonumber(args[1]), now_ms(base), streams)
end
