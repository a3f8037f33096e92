-- Limits on runs of an agent and calls of a tool, by a key: how many may be open at a time, and how many may start within
-- a time. Work above a limit waits outside the work streams, where it counts as no attempt. A limit's name is
-- `agent:<name>|<what the key is>|<key>`, or the same with `tool`.
--   limits          <limit>: how many may be open, how many may start (0: any number), and within how many ms, as the
--                   newest process has declared them, while the limit is in use · seq: number of the last one that waited
--   slots:<limit>   open work, `task|path`, by the time it got its slot (ms)
--   starts:<limit>  when the last ones started (ms), the oldest first: no more than may start; expires
--   waits:<limit>   waiting work, `task|path`, by priority, then in the order of arrival
--   waiting         <task|path>: stream, time since when (ms), fields of its entry, its limits as it declared them, and
--                   when it may start after its debounce (ms), packed
--   limited         how many hold slots and wait, by agent or tool: `slots agent:<name>`, `waits tool:<name>`
--   held:<task>     <path>: the entry that has its slots, the limit that it waits for, an empty line or `?` if it has not
--                   begun after its debounce, and its limits
-- Work waits for one limit at a time, and holds no slot meanwhile, except a call between two attempts. Whatever ends work
-- frees its slots (`SLOT.free`) and starts the next. A timer serves the limits that work waits for.
local SLOT = {LOOKS = 100, CHECK_MS = 10000, HIGHEST = 9, DEFAULT = 5, PRIORITY = 2 ^ 44}

-- Whether work still counts: its task is open, and its step, if it has one, has no result.
function SLOT.lives(base, ref)
  local task, path = split_ref(ref)
  -- pcall: a key of another type must not keep others waiting.
  local status = redis.pcall('HGET', base .. 'task:' .. task, 'status')
  if type(status) ~= 'string' or ENDED[status] then return false end
  local parent, step = parent_of(path)
  return not parent or redis.pcall('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 1
end

-- Whether a delivery that waits still counts.
function SLOT.waits(base, ref, stream)
  if not SLOT.lives(base, ref) then return false end
  local task, path = split_ref(ref)
  return not is_agent_stream(stream) or redis.pcall('HGET', run_key(base, task, path), RUN.current) == 'slot'
end

-- Whether work has a slot of the limit: its own, or that of a run that waits for it, which would wait forever.
function SLOT.has(base, limit, ref)
  local task, path = split_ref(ref)
  while path do
    if redis.call('ZSCORE', base .. 'slots:' .. limit, task .. '|' .. path) then return true end
    path = parent_of(path)
  end
  return false
end

-- Whether a run of the agent would wait behind this one, which has slots of its limits: its own, or those of a run that
-- waits for it.
function SLOT.goes_first(base, agent, task, run)
  local key, of_agent = base .. 'held:' .. task, '\nagent:' .. agent .. '|'
  if redis.pcall('HLEN', key) == 0 then return false end
  while run do
    local held = redis.pcall('HGET', key, run)
    if type(held) == 'string' and lines(held)[2] == '' and string.find(held, of_agent, 1, true) then return true end
    run = parent_of(run)
  end
  return false
end

-- Adds work to the `slots` or `waits` of a limit, with this score, or (without one) removes it. Returns whether that
-- has changed them.
function SLOT.put(base, what, limit, ref, score)
  local key, changed = what == 'slots' and base .. 'slots:' .. limit or base .. 'waits:' .. limit, nil
  if score then changed = redis.call('ZADD', key, score, ref) else changed = redis.call('ZREM', key, ref) end
  if changed == 0 then return false end
  local field = what .. ' ' .. string.match(limit, '^[^|]*')
  local count = redis.call('HINCRBY', base .. 'limited', field, score and 1 or -1)
  if count <= 0 then redis.call('HDEL', base .. 'limited', field) end
  return true
end

function SLOT.settings(base, limit)
  local running, starts, ms = string.match(redis.call('HGET', base .. 'limits', limit) or '', '^(%d+) (%d+) (%d+)')
  return tonumber(running or '0'), tonumber(starts or '0'), tonumber(ms or '0')
end

-- Whether the limit does not let this work start now, and when it may, if time alone decides.
function SLOT.is_full(base, limit, ref, now)
  local running, starts, ms = SLOT.settings(base, limit)
  if running > 0 and redis.call('ZCARD', base .. 'slots:' .. limit) >= running and not SLOT.has(base, limit, ref) then
    return true
  end
  local list = base .. 'starts:' .. limit
  local oldest = starts > 0 and tonumber(redis.call('LINDEX', list, -starts) or nil)
  if oldest and oldest > now then
    oldest = now
    SLOT.start_again(list, now)
  end
  return oldest and oldest + ms > now, oldest and oldest + ms
end

-- The clock has gone back: what started later than now counts as started now.
function SLOT.start_again(list, now)
  for i, started in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if tonumber(started) > now then redis.call('LSET', list, i - 1, text(now)) end
  end
end

-- The first limit that does not let this work start, and when it may. `arrives`: it waits behind those that wait.
function SLOT.first_full(base, limits, ref, now, arrives)
  for _, limit in ipairs(limits) do
    local full, due = SLOT.is_full(base, limit, ref, now)
    local behind = arrives and redis.call('ZCARD', base .. 'waits:' .. limit) > 0
    if full or (behind and not SLOT.has(base, limit, ref)) then return limit, due end
  end
  return nil
end

-- Gives work its slots. `entry` is its place on its work stream.
function SLOT.give(base, limits, ref, entry, now)
  for _, limit in ipairs(limits) do
    local running, starts, ms = SLOT.settings(base, limit)
    if running > 0 and not SLOT.has(base, limit, ref) then SLOT.put(base, 'slots', limit, ref, text(now)) end
    if starts > 0 then
      local list = base .. 'starts:' .. limit
      redis.call('RPUSH', list, text(now))
      redis.call('LTRIM', list, -starts, -1)
      redis.call('PEXPIRE', list, ms)
    end
  end
  local task, path = split_ref(ref)
  redis.call('HSET', base .. 'held:' .. task, path, entry .. '\n\n' .. table.concat(limits, '\n'))
end

-- Sets the limit's timer: for when work may start, and to free slots that an older release has not freed.
function SLOT.watch(base, limit, due, now)
  redis.call('ZADD', base .. 'timers', 'LT', text(math.min(due or now + SLOT.CHECK_MS, now + SLOT.CHECK_MS)), 'l|' .. limit)
end

-- Moves waiting work to another limit's, at the place of its arrival.
function SLOT.queue(base, limit, ref, order, due, limits, entry, now)
  local task, path = split_ref(ref)
  SLOT.put(base, 'waits', limit, ref, order)
  redis.call('HSET', base .. 'held:' .. task, path, entry .. '\n' .. limit .. '\n' .. table.concat(limits, '\n'))
  SLOT.watch(base, limit, due, now)
end

-- Removes what work holds, and its place where it waits. Lists the limits concerned in `freed`.
function SLOT.drop(base, task, path, freed)
  local key = base .. 'held:' .. task
  local held = redis.pcall('HGET', key, path)
  if type(held) ~= 'string' then return end
  local ref, parts = task .. '|' .. path, lines(held)
  redis.pcall('HDEL', key, path)
  if parts[2] ~= '' then
    pcall(SLOT.put, base, 'waits', parts[2], ref)
    redis.pcall('HDEL', base .. 'waiting', ref)
  end
  for i = 3, #parts do
    pcall(SLOT.put, base, 'slots', parts[i], ref)
    freed[#freed + 1] = parts[i]
  end
end

-- Starts one piece of waiting work, or lets it wait for another limit. `w` is its value in `waiting`, `held` are the
-- lines of its place. Returns true and when it may start if this limit does not let it.
function SLOT.start(base, limit, ref, order, w, held, now)
  local task, path = split_ref(ref)
  local stream, _, fields, declared, quiet_until = unpack(w)
  local limits = {unpack(held, 3)}
  -- Nothing else may have used a limit meanwhile.
  for i = 1, #declared, 2 do redis.call('HSETNX', base .. 'limits', declared[i], declared[i + 1]) end
  local full, due = SLOT.first_full(base, limits, ref, now)
  local quiet = tonumber(quiet_until or '0')
  if quiet > now then return true, math.max(quiet, due or 0) end
  if full == limit then return true, due end
  redis.call('XLEN', base .. stream) -- raises before the first write
  SLOT.put(base, 'waits', limit, ref)
  if full then return SLOT.queue(base, full, ref, order, due, limits, held[1], now) end
  local entry = redis.call('XADD', base .. stream, '*', unpack(fields))
  redis.call('HDEL', base .. 'waiting', ref)
  SLOT.give(base, limits, ref, entry, now)
  if quiet_until then redis.call('HSET', base .. 'held:' .. task, path, entry .. '\n?\n' .. table.concat(limits, '\n')) end
  if is_agent_stream(stream) then redis.call('HSET', run_key(base, task, path), RUN.current, entry) end
end

-- Starts the waiting work of a limit, in order, while the limit lets it. Lists other limits that this has freed in
-- `freed`.
function SLOT.start_next(base, limit, freed)
  local waits, now = base .. 'waits:' .. limit, now_ms(base)
  for _ = 1, SLOT.LOOKS do
    local ref, order = unpack(redis.call('ZRANGE', waits, 0, 0, 'WITHSCORES'))
    if not ref then
      redis.call('ZREM', base .. 'timers', 'l|' .. limit)
      if redis.call('ZCARD', base .. 'slots:' .. limit) == 0 then redis.call('HDEL', base .. 'limits', limit) end
      return
    end
    local task, path = split_ref(ref)
    local packed = redis.call('HGET', base .. 'waiting', ref)
    local held = lines(redis.call('HGET', base .. 'held:' .. task, path) or '')
    local w = packed and cmsgpack.unpack(packed)
    if not w or held[2] ~= limit or not SLOT.waits(base, ref, w[1]) then
      SLOT.put(base, 'waits', limit, ref)
      if held[2] == limit then SLOT.drop(base, task, path, freed) end
    else
      local full, due = SLOT.start(base, limit, ref, order, w, held, now)
      if full then return SLOT.watch(base, limit, due, now) end
    end
  end
  SLOT.watch(base, limit, now, now)
end

-- Starts the waiting work of these limits, after other writes.
function SLOT.pass_on(base, limits)
  local seen, at = {}, 1
  while limits[at] do
    local limit = limits[at]
    -- pcall: a timer retries after a failure on a key of another type.
    if not seen[limit] and not pcall(SLOT.start_next, base, limit, limits) then
      redis.pcall('ZADD', base .. 'timers', text(server_ms() + 60000), 'l|' .. limit)
    end
    seen[limit], at = true, at + 1
  end
end

-- Work is over: frees what it holds, and ends its waits. `below`: with everything that it has started.
function SLOT.free(base, task, path, below)
  local freed = {}
  for _, at in ipairs(below and redis.pcall('HKEYS', base .. 'held:' .. task) or {path}) do
    if at == path or string.sub(at, 1, #path + 1) == path .. '/' then SLOT.drop(base, task, at, freed) end
  end
  SLOT.pass_on(base, freed)
end

-- The same for work of a task with these flags. Costs nothing without limits.
function SLOT.free_flagged(base, flags, task, path, below)
  if flags and string.find(flags, FLAG.slots, 1, true) then SLOT.free(base, task, path, below) end
end

-- Frees slots of work that has ended without freeing them, since an older release knows no slots. Then starts the next.
function SLOT.look_after(base, limit)
  local slots, freed = base .. 'slots:' .. limit, {limit}
  for _, ref in ipairs(redis.call('ZRANGE', slots, 0, SLOT.LOOKS)) do
    if not SLOT.lives(base, ref) then
      local task, path = split_ref(ref)
      SLOT.put(base, 'slots', limit, ref)
      SLOT.drop(base, task, path, freed)
    end
  end
  SLOT.pass_on(base, freed)
end
