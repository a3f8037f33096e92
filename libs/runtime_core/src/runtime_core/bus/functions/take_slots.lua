-- Takes the slots of an agent's run or a tool's call before it starts: all of its limits, or none. Without them the
-- delivery is settled, and waits until what frees a slot, or a timer, moves it back to its work stream. That does not
-- count as an attempt. Repeating it for the same entry takes nothing twice.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run
--      6 '1' if each attempt counts as a start, else ''
--      7 what it replaces: '' nothing · `w` older work that waits · `r` also older work that runs
--      8 how long no newer one may come before it starts (ms), or '0'
--      then of each limit: name · how many may be open · how many may start (0: any number) · within how many ms
-- RETURNS 'OK' · 'WAIT' if it waits now · 'DONE' if it is no longer wanted: nothing was written · 'FENCED'

local FIRST_LIMIT = 9
local REPLACES = {waiting = 'w', running = 'r'}

-- Stores the limits as declared here. Returns their names, those that have changed, and names and settings in turn.
local function declare(base, args)
  local names, changed, declared = {}, {}, {}
  for i = FIRST_LIMIT, #args, 4 do
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
  for i = FIRST_LIMIT, #args, 4 do
    redis.call('ZCARD', base .. 'slots:' .. args[i])
    redis.call('ZCARD', base .. 'waits:' .. args[i])
    redis.call('LLEN', base .. 'starts:' .. args[i])
  end
end

-- A call begins its next attempt, and new code has declared different limits: it no longer needs the old ones' slots.
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

-- A run's agent, and its instance, or nil if it has no key.
local function instance_of(base, task, run)
  local _, agent, instance_key = target_of(redis.call('HGET', run_key(base, task, run), RUN.header))
  return agent, instance_key ~= '' and agent .. '/' .. instance_key or nil
end

-- The time at which a run was requested (ms).
local function asked_ms(base, ref)
  local task, run = split_ref(ref)
  return tonumber(lines(redis.call('HGET', run_key(base, task, run), RUN.header) or '')[5] or '') or 0
end

-- Ends a run because a newer one replaces it. `settled`: its delivery is no longer in flight.
local function supersede(base, ref, by, settled)
  local task, run = split_ref(ref)
  local key, rk = base .. 'task:' .. task, run_key(base, task, run)
  local v = redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags)
  local r = redis.call('HMGET', rk, RUN.current, RUN.header, RUN.input)
  if not v[1] or ENDED[v[1]] or not r[1] then return end
  local flags, now, flying = v[4] or '', text(now_ms(base)), in_flight(r[1]) and not settled
  local error = error_json('Superseded', 'a newer run for the same key of its limit has come: task ' .. split_ref(by))
  if run == FIRST_RUN then
    local ending = check_end(base, task, v[2], flags, 'cancelled')
    return end_task(base, task, ending, flags, 'cancelled', error, v[3] or '0', now, '[]', false, flying)
  end
  check_record(base, task, flags)
  check_waiting(base, task, (parent_of(run)))
  local stream, agent, instance_key = target_of(r[2])
  record_unwritten(base, task, run, flags)
  record_refused(base, task, flags, run, stream, agent, instance_key, r[3] or '', now, error)
  redis.call('HINCRBY', key, 'steps', 1)
  stop_running(base, task .. '|' .. run)
  -- The late commit of a turn in flight frees its instance.
  end_child(base, task, run, instance_key ~= '' and not flying and agent .. '/' .. instance_key or '', RESULT.error, now,
    error)
end

-- A newer run that waits in the mailbox of the same instance, or nil.
local function newer_in_mailbox(base, header)
  local _, agent, instance_key = target_of(header)
  if instance_key == '' then return nil end
  local waiting = redis.call('LRANGE', base .. 'mail:' .. agent .. '/' .. instance_key, -50, -1)
  for i = #waiting, 1, -1 do
    local task, _, released = startable(base, waiting[i])
    if task and not released then return waiting[i] end
  end
  return nil
end

-- Of the runs for one key of a limit, only the newest stays. Returns whether a newer one replaces this one.
local function replace_older(base, args, ref, limit)
  local header, asked = redis.call('HGET', run_key(base, args[4], args[5]), RUN.header), asked_ms(base, ref)
  local newer, older = newer_in_mailbox(base, header), {}
  for _, set in ipairs({'waits:', args[7] == REPLACES.running and 'slots:' or nil}) do
    local key = set == 'waits:' and base .. 'waits:' .. limit or base .. 'slots:' .. limit
    for _, other in ipairs(redis.call('ZRANGE', key, 0, SLOT.LOOKS)) do
      if other ~= ref and asked_ms(base, other) > asked then newer = other end
      if other ~= ref then older[#older + 1] = other end
    end
  end
  if newer then
    settle(base, args[2], args[3])
    supersede(base, ref, newer, true)
    return true
  end
  -- pcall: a run whose keys are of another type stays.
  for _, other in ipairs(older) do pcall(supersede, base, other, ref, false) end
  return false
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
  if had and had[2] ~= '' and had[2] ~= '?' and had[1] == entry then return 'WAIT' end
  if not found or not QUEUE.is_wanted(base, entry, is_turn, task, run, v[1]) then return 'DONE' end
  if had and had[2] == '' and (had[1] == entry or args[6] == '') then return 'OK' end
  if had and had[2] == '?' then
    -- Others may have come to the mailbox of its instance meanwhile.
    local newer = newer_in_mailbox(base, redis.call('HGET', run_key(base, task, run), RUN.header))
    if not newer then
      redis.call('HSET', base .. 'held:' .. task, run, entry .. '\n\n' .. table.concat(had, '\n', 3))
      return 'OK'
    end
    settle(base, stream, entry)
    supersede(base, ref, newer, true)
    return 'DONE'
  end
  local agent, inst
  if is_turn then agent, inst = instance_of(base, task, run) end
  check_slots(base, args)
  if inst then check_instance(base, inst) end
  if args[7] ~= '' and not SLOT.has(base, args[FIRST_LIMIT], ref) then
    if replace_older(base, args, ref, args[FIRST_LIMIT]) then return 'DONE' end
    v = redis.call('HMGET', key, 'status', TASK.flags, RUN.header)
    if not QUEUE.is_wanted(base, entry, is_turn, task, run, v[1]) then return 'DONE' end
  end
  -- After the ends of others, which forget a limit that nothing uses.
  local limits, changed, declared = declare(base, args)
  local now = now_ms(base)
  local full, due = SLOT.first_full(base, limits, ref, now, true)
  local quiet_until
  if args[8] ~= '0' then
    -- Times in entry ids are the server's own.
    quiet_until = now + math.max(0, tonumber(args[8]) - math.max(0, server_ms() - asked_ms(base, ref)))
  end
  if quiet_until and quiet_until > now then full, due = limits[1], quiet_until end
  redis.call('HSET', key, TASK.flags, flag(v[2] or '', FLAG.slots))
  if had then give_up_others(base, ref, had, limits, changed) end
  if not full then
    SLOT.give(base, limits, ref, entry, now)
    SLOT.pass_on(base, changed)
    return 'OK'
  end
  settle(base, stream, entry)
  redis.call('HSET', base .. 'waiting', ref,
    cmsgpack.pack({stream, text(now), found[2], declared, quiet_until and text(quiet_until)}))
  SLOT.queue(base, full, ref, order_of(base, v[3]), due, limits, entry, now)
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, 'slot') end
  if inst then KEY.let_first(base, inst, agent, ref) end
  changed[#changed + 1] = full
  SLOT.pass_on(base, changed)
  return 'WAIT'
end
