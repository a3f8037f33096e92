-- Takes the slots of an agent's run or a tool's call before it starts: all of its limits, or none. Without them the
-- delivery is settled, and waits until what frees a slot, or a timer, moves it back to its work stream. That counts as
-- no attempt. Repeating it for the same entry takes nothing twice.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run
--      6 '1' if each attempt counts as a start, else ''
--      then of each limit: name · how many may be open · how many may start (0: any number) · within how many ms
-- RETURNS 'OK' · 'WAIT' if it waits now · 'DONE' if it is no longer wanted: nothing was written · 'FENCED'

-- Stores the limits as declared here. Returns their names, those that have changed, and names and settings in turn.
local function declare(base, args)
  local names, changed, declared = {}, {}, {}
  for i = 7, #args, 4 do
    local settings = args[i + 1] .. ' ' .. args[i + 2] .. ' ' .. args[i + 3]
    names[#names + 1] = args[i]
    declared[#declared + 1], declared[#declared + 2] = args[i], settings
    if redis.call('HGET', base .. 'limits', args[i]) ~= settings then
      redis.call('HSET', base .. 'limits', args[i], settings)
      changed[#changed + 1] = args[i]
    end
  end
  return names, changed, declared
end

local function check_slots(base, args)
  check_timers(base)
  redis.call('HLEN', base .. 'limits')
  redis.call('HLEN', base .. 'waiting')
  redis.call('HLEN', base .. 'limited')
  redis.call('HLEN', base .. 'held:' .. args[4])
  for i = 7, #args, 4 do
    redis.call('ZCARD', base .. 'slots:' .. args[i])
    redis.call('ZCARD', base .. 'waits:' .. args[i])
    redis.call('LLEN', base .. 'starts:' .. args[i])
  end
end

-- A call begins its next attempt, and new code has declared other limits: it no longer needs the slots of the old ones.
local function give_up_others(base, ref, had, limits, changed)
  for i = 3, #had do
    local kept = false
    for _, limit in ipairs(limits) do kept = kept or limit == had[i] end
    if not kept and SLOT.put(base, 'slots', had[i], ref) then changed[#changed + 1] = had[i] end
  end
end

local function order_of(base, header)
  local priority = tonumber(lines(header)[13] or '') or SLOT.DEFAULT
  return text((SLOT.HIGHEST - priority) * SLOT.PRIORITY + redis.call('HINCRBY', base .. 'limits', 'seq', 1))
end

local function take_slots(keys, args)
  local base, stream, entry, task, run = keys[1], args[2], args[3], args[4], args[5]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local found = redis.call('XRANGE', base .. stream, entry, entry)[1]
  local is_turn, key = is_agent_stream(stream), base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', TASK.flags, RUN.header)
  local ref, held = task .. '|' .. run, redis.call('HGET', base .. 'held:' .. task, run)
  local had = held and lines(held)
  -- A repeat, since the reply was lost: the entry waits already.
  if had and had[2] ~= '' and had[1] == entry then return 'WAIT' end
  if not found or not is_wanted(base, entry, is_turn, task, run, v[1]) then return 'DONE' end
  if had and had[2] == '' and (had[1] == entry or args[6] == '') then return 'OK' end
  check_slots(base, args)
  local limits, changed, declared = declare(base, args)
  local now = now_ms(base)
  local full, due = SLOT.first_full(base, limits, ref, now, true)
  redis.call('HSET', key, TASK.flags, flag(v[2] or '', FLAG.slots))
  if had then give_up_others(base, ref, had, limits, changed) end
  if not full then
    SLOT.give(base, limits, ref, entry, now)
    SLOT.pass_on(base, changed)
    return 'OK'
  end
  settle(base, stream, entry)
  redis.call('HSET', base .. 'waiting', ref, cmsgpack.pack({stream, text(now), found[2], declared}))
  SLOT.queue(base, full, ref, order_of(base, v[3]), due, limits, entry, now)
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, 'slot') end
  changed[#changed + 1] = full
  SLOT.pass_on(base, changed)
  return 'WAIT'
end
