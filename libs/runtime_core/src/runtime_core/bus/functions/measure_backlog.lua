-- Metrics of tasks and mailboxes, in one call whose cost does not depend on the number of tasks. Each call also
-- corrects some counts, in rotation: processes of an older release end tasks and empty mailboxes without counting.
-- KEYS 1 base
-- ARGV 1 number of tasks and mailboxes to recount · 2 the first task to recount, by rank · 3 the first mailbox
-- RETURNS {tasks started so far, tasks that have not ended, events in mailboxes, those in the deepest,
--          ARGV 2 of the next call, ARGV 3 of the next call}
local SHALLOW, DEEPEST = 50, 1000

local function measure_backlog(keys, args)
  local base = keys[1]
  local many, from_task, from_mailbox = tonumber(args[1]), tonumber(args[2]), tonumber(args[3])
  local tasks = redis.call('ZRANGE', base .. 'open', from_task, from_task + many - 1)
  local next_task = #tasks < many and 0 or from_task + many
  for _, task in ipairs(tasks) do
    local status = redis.pcall('HGET', base .. 'task:' .. task, 'status')
    if type(status) ~= 'string' or ENDED[status] then
      redis.call('ZREM', base .. 'open', task)
      next_task = math.max(0, next_task - 1)
    end
  end
  local mailboxes = redis.call('ZRANGE', base .. 'mailboxes', from_mailbox, from_mailbox + many - 1)
  local next_mailbox = #mailboxes < many and 0 or from_mailbox + many
  for _, inst in ipairs(mailboxes) do
    local depth = redis.pcall('LLEN', base .. 'mail:' .. inst)
    count_mail(base, inst, type(depth) == 'number' and depth or 0)
  end
  -- Sum by depth, not by mailbox: how many hold at least one event, two, and so on. Events beyond that depth count for
  -- the deepest mailboxes only, so that the call stays short.
  local waiting, deepest = 0, redis.call('ZRANGE', base .. 'mailboxes', -DEEPEST, -1, 'WITHSCORES')
  for depth = 1, math.min(SHALLOW, tonumber(deepest[#deepest] or '0')) do
    waiting = waiting + redis.call('ZCOUNT', base .. 'mailboxes', depth, '+inf')
  end
  for at = 2, #deepest, 2 do waiting = waiting + math.max(0, tonumber(deepest[at]) - SHALLOW) end
  -- The index has every task that started here and has not been swept from it.
  local started = tonumber(redis.call('HGET', base .. 'meta', 'swept') or '0') + redis.call('ZCARD', base .. 'index')
  return {started, redis.call('ZCARD', base .. 'open'), waiting, tonumber(deepest[#deepest] or '0'),
    next_task, next_mailbox}
end
