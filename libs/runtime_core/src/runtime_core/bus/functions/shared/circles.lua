-- Finds who waits for whom: reentrant calls into a busy instance, and circles of requests that would never end.

-- Does `holder` (task|run) wait for `run`? Run ids are paths, so the call chain can be read from them.
local function waits_for(holder, task, run)
  local held_task, held_run = split_ref(holder)
  return held_task == task and string.sub(run, 1, #held_run + 1) == held_run .. '/'
end

-- Does `holder` wait, through other partitions, for the task of this context? The relay notes the callers in `~chain`:
-- `<partition>:<task>|<run>`, one word each.
local function waits_through(base, holder, context)
  local chain = context and string.match(context, '"~chain":"([^"]*)"')
  if not chain then return false end
  local here = string.match(base, '{(%d+)}:$')
  for place, task, run in string.gmatch(chain, '(%d+):([^ |]*)|([^ |]*)') do
    if place == here and (holder == task .. '|' .. run or waits_for(holder, task, run)) then return true end
  end
  return false
end

-- Child runs that wait in a mailbox, or for a run that is nested on them in their instance, are listed by task in
-- `line:<task>` (run to instance), so that `circle` can follow who waits for whom.
-- pcall: if another program stores something else there, only that is lost.
local function enter_line(base, task, run, inst)
  if run ~= FIRST_RUN then redis.pcall('HSET', base .. 'line:' .. task, run, inst) end
end

local function leave_line(base, task, run)
  if run ~= FIRST_RUN then redis.pcall('HDEL', base .. 'line:' .. task, run) end
end

-- Whether a run has given up its key and waits for it again.
function KEY.waits(released) return string.sub(released or '', 1, 1) == 'w' end

-- For whom `run` waits at the instance `inst`, if it waits for its descendant `child`, step by step, and that one waits
-- there: for all holders, if it is in the mailbox; for those that are nested on it, if it is a holder itself. Else nil.
local function waits_in_line(base, task, run, child, inst)
  local at = child
  while at ~= run do
    local parent, step = parent_of(at)
    if not parent or redis.pcall('HEXISTS', run_key(base, task, parent), RUN.missing .. step) ~= 1 then return nil end
    at = parent
  end
  local holders = redis.pcall('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  if type(holders) ~= 'string' then return nil end
  local waits = redis.pcall('HMGET', run_key(base, task, child), RUN.current, RUN.released)
  if waits[1] == 'mail' or KEY.waits(waits[2]) then return holders end
  return KEY.above(holders, task .. '|' .. child)
end

-- How many holders to follow for one request, and how many waiting runs to check for each.
local CIRCLE_LOOKS, CIRCLE_RUNS = 200, 500

-- Would a request that has to wait in the mailbox of `inst`, as the child `run`, wait for its own caller? Follows the
-- holders of the instance to the mailboxes in which their child runs wait, and so on. Returns nil, or the circle as
-- text. A circle closes with the last request to enter it, so no other request has to check. A reentrant call into its
-- own instance waits only for the next commit or request of the holder, and makes no requests before it starts.
local function circle(base, task, run, inst, busy)
  local asker = parent_of(run)
  local queue, seen, at, looks = {}, {}, 1, 0
  local function follow(holders, name, path)
    for _, holder in ipairs(lines(holders)) do
      if holder ~= '|' then
        queue[#queue + 1] = {holder, path .. name .. ' (task ' .. string.match(holder, '^(.*)|') .. ')'}
      end
    end
  end
  follow(busy, inst, '')
  while queue[at] and looks < CIRCLE_LOOKS do
    local holder, path = queue[at][1], queue[at][2]
    at = at + 1
    if not seen[holder] then
      seen[holder], looks = true, looks + 1
      local held_task, held_run = split_ref(holder)
      if held_task == task and (held_run == asker or string.sub(asker, 1, #held_run + 1) == held_run .. '/') then
        return path .. ', which waits for ' .. inst
      end
      local waiting = redis.pcall('HSCAN', base .. 'line:' .. held_task, '0', 'COUNT', CIRCLE_RUNS)
      for i = 1, type(waiting[2]) == 'table' and #waiting[2] or 0, 2 do
        local child, name = waiting[2][i], waiting[2][i + 1]
        local holders = string.sub(child, 1, #held_run + 1) == held_run .. '/'
          and waits_in_line(base, held_task, held_run, child, name)
        if holders then follow(holders, name, path .. ', which waits for ') end
      end
    end
  end
  return nil
end

local function deadlock(chain)
  return error_json('Deadlock', 'the request would wait for itself: it waits for ' .. chain ..
    '; ask in the same order everywhere, send without waiting, or catch this error and try later')
end
