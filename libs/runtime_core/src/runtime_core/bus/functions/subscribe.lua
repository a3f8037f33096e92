-- Subscribes an agent to a topic, and delivers messages that were published there without a subscriber before the agent
-- first appeared.
-- KEYS 1 base
-- ARGV 1 kind: `type` (this topic), `prefix` (all topics that begin with it), `agent` (the agent exists; no topic)
--      2 topic, prefix or '' · 3 agent · 4 '1' to deliver here, '' if the caller does it (several partitions)
-- RETURNS 1 · 0 if there is an equal subscription

-- The id of the newest kept message. Ids follow the server's clock, and several can share a millisecond.
local function newest_undelivered(base)
  local now = server_ms()
  local found = redis.call('XRANGE', base .. 'undelivered', text(now), '+')
  return #found > 0 and found[#found][1] or text(now - 1)
end

local function subscribe(keys, args)
  local base, kind, topic, agent = keys[1], args[1], args[2], args[3]
  local tk = base .. 'topics'
  redis.call('HSETNX', tk, '@' .. agent, newest_undelivered(base))
  if kind == 'agent' then return 1 end
  local field, line = '=' .. topic, agent
  if kind == 'prefix' then field, line = '^', topic .. ' ' .. agent end
  local there = redis.call('HGET', tk, field)
  if there then
    for _, other in ipairs(lines(there)) do
      if other == line then return 0 end
    end
    line = there .. '\n' .. line
  end
  redis.call('HSET', tk, field, line)
  if args[4] == '' then return 1 end
  local newest = redis.call('HGET', tk, '@' .. agent)
  local retention = tonumber(redis.call('HGET', base .. 'meta', 'retention') or '3600') * 1000
  -- Ids from before a step of the server's clock are as far behind as the stored offset.
  local stepped = math.min(0, now_ms(base) - server_ms())
  local oldest = text(math.max(0, tonumber(ms_of(newest)) + stepped - retention))
  for _, entry in ipairs(redis.call('XRANGE', base .. 'undelivered', oldest, newest)) do
    local message = {}
    for i = 1, #entry[2], 2 do message[entry[2][i]] = entry[2][i + 1] end
    local match = message.topic == topic
    if kind == 'prefix' then match = string.sub(message.topic, 1, #topic) == topic end
    if match and agent .. '/' .. message.key ~= message.sender then
      check_send(base, agent, message.key)
      send_detached(base, task_of_message(message.id, agent, message.key), agent, message.key, message.d, message.x,
        message.id, '')
    end
  end
  return 1
end
