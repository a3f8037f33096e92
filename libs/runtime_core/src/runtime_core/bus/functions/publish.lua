-- Publishes a message to all subscribers of its topic: a task for each. Repeating the id starts nothing.
-- Refused by the server at maxmemory.
-- KEYS 1 base
-- ARGV 1 id · 2 topic · 3 instance key (the topic's source) or '' · 4 data (JSON) · 5 context (JSON) or ''
--      6 the sender's instance (`agent/key`), which does not get it, or ''
--      7 '1' to keep a message without subscribers and to start nothing (several partitions), else ''
-- RETURNS {'published', number of agents that get it} · {'heard'} if it should only be kept, and the topic has a
--         subscriber by now: nothing was written · {'overloaded', message}
local function publish(keys, args)
  local base = keys[1]
  local overload = redis.call('HGET', base .. 'meta', 'overload')
  if overload and overload ~= '' then return {'overloaded', overload} end
  if args[7] == '1' then
    local _, heard = subscribers(base, args[2], args[3], args[6])
    if heard then return {'heard'} end
  end
  check_publish(base, args[2], args[3], args[6])
  return {'published', publish_message(base, args[1], args[2], args[3], args[4], args[5], args[6], args[1], '')}
end
