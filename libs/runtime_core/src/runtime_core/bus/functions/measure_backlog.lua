-- Metrics of tasks and mailboxes, in one call whose cost does not depend on the number of tasks.
-- KEYS 1 base
-- RETURNS {tasks started so far, tasks that have not ended, events in mailboxes, those in the deepest}
local SHALLOW, DEEPEST = 50, 1000

local function measure_backlog(keys, args)
  local base = keys[1]
  -- Sum by depth, not by mailbox: how many hold at least one event, two, and so on. Events beyond that depth count for
  -- the deepest mailboxes only, so that the call stays short.
  local waiting, deepest = 0, redis.call('ZRANGE', base .. 'mailboxes', -DEEPEST, -1, 'WITHSCORES')
  for depth = 1, math.min(SHALLOW, tonumber(deepest[#deepest] or '0')) do
    waiting = waiting + redis.call('ZCOUNT', base .. 'mailboxes', depth, '+inf')
  end
  for at = 2, #deepest, 2 do waiting = waiting + math.max(0, tonumber(deepest[at]) - SHALLOW) end
  -- The index has every task that started here and has not been swept from it.
  local started = tonumber(redis.call('HGET', base .. 'meta', 'swept') or '0') + redis.call('ZCARD', base .. 'index')
  return {started, redis.call('ZCARD', base .. 'open'), waiting, tonumber(deepest[#deepest] or '0')}
end
