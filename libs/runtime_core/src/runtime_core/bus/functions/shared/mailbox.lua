-- Instances: an instance with a key handles one event at a time. Others wait in its mailbox, in order.

local function mailbox_full(agent, key)
  return error_json('MailboxFull', 'the mailbox of ' .. agent .. '/' .. key .. ' is full')
end

local function count_mail(base, inst, depth)
  if depth > 0 then
    redis.pcall('ZADD', base .. 'mailboxes', depth, inst)
  else
    redis.pcall('ZREM', base .. 'mailboxes', inst)
  end
end

-- A nested run takes the instance over from its holders. The newest holder is listed among the waiting runs, for
-- `circle`.
local function put_on_top(base, inst, busy, ref)
  local task, run = split_ref(top_of(busy))
  if task then enter_line(base, task, run, inst) end
  redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.holders, busy .. '\n' .. ref)
end

-- Appends the start event of a run whose fields are already stored, and makes it the holder of its instance.
local function start_stored(base, inst, task, run, busy)
  local rk = run_key(base, task, run)
  leave_line(base, task, run)
  local v = redis.call('HMGET', rk, RUN.header, RUN.input, RUN.context)
  local stream, agent, instance_key = target_of(v[1])
  local entry = append_start(base, task, run, stream, agent, instance_key, v[2], v[3])
  redis.call('HSET', rk, RUN.current, entry)
  local ref = task .. '|' .. run
  if busy and busy ~= '' then
    put_on_top(base, inst, busy, ref)
  else
    redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.holders, ref)
  end
  return entry
end

-- A nested run begins with the state that the run below it has written so far, and is replayed from there.
local function keep_snapshot(base, inst, task, run)
  local s = redis.call('HMGET', base .. 'inst:' .. inst, INSTANCE.working_state, 'state')
  redis.call('HSET', run_key(base, task, run), RUN.state_at_start, s[1] or s[2] or '')
end

-- A run that may leave a mailbox, or nil: it starts, or (with its `released`) gets its key back.
local function startable(base, ref)
  local task, run = split_ref(ref)
  -- pcall: if another program stores something else under the task's key, only that task is lost.
  local status = redis.pcall('HGET', base .. 'task:' .. task, 'status')
  if type(status) ~= 'string' or ENDED[status] then return nil end
  local cur = redis.pcall('HGET', run_key(base, task, run), RUN.current)
  if cur == 'mail' or cur == 'nest' then return task, run end
  local released = redis.pcall('HGET', run_key(base, task, run), RUN.released)
  if type(released) ~= 'string' or not KEY.waits(released) then return nil end
  return task, run, released
end

-- The instance's newest run waits, so a nested call that came in meanwhile may start on top of it.
local function start_nested(base, inst, busy)
  local list = base .. 'nest:' .. inst
  for _ = 1, 50 do
    local ref = redis.call('LPOP', list)
    if not ref then return false end
    local task, run = startable(base, ref)
    if task then
      keep_snapshot(base, inst, task, run)
      start_stored(base, inst, task, run, busy)
      return true
    end
  end
  return false
end

-- The run below the ended one continues: with a nested call that came in meanwhile, or itself if it waited for the end.
local function wake_below(base, inst, rest)
  redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.holders, rest)
  local below_task, below_run = split_ref(top_of(rest))
  leave_line(base, below_task, below_run)
  if start_nested(base, inst, rest) then return end
  hand_out(base, below_task, below_run)
  local rk = run_key(base, below_task, below_run)
  local v = redis.call('HMGET', rk, RUN.current, RUN.header, RUN.override, RUN.unseen)
  if v[1] ~= 'pend' then return end
  local stream, agent, instance_key = target_of(v[2])
  if v[4] then
    -- Its results came before the change, and its code sees them after it.
    if v[3] then keep_override(rk, instance_key, '', lines(v[4])[1], 'pend') end
    redis.call('HDEL', rk, RUN.unseen)
  end
  -- Turn -1, which no run in memory has: the nested run may have changed the state that this one sees.
  local entry = append_resume(base, below_task, below_run, stream, agent, instance_key, '-1', '', '')
  redis.call('HSET', rk, RUN.current, entry)
end

function KEY.answer(base, task, run, step, asked, status, value)
  -- pcall: the run that gives up the key belongs to another task, whose commit has not checked these keys.
  local read, ms = pcall(now_ms, base)
  local now = read and text(ms) or asked
  if answer(base, task, run, step, status, now, value) then
    pcall(record_answer, base, task, run, step, asked, now, status, value, 'acquire')
  end
end

-- A run that has given up its key has a field that begins with a letter:
--   r             given up
--   w<ms><step>   waits for it since then, in the mailbox, for this step (13 digits, ms)
--   a<step>       has it again, by this step
--   k             kept, since other runs hold the instance too
-- Gives the key to a run that waits for it, with the instance's state as the result of the step. It is numbered like
-- the state of a nested run, so that a replay knows which of them is later.
function KEY.give(base, inst, task, run, released, holders)
  local asked, step, ik = string.sub(released, 2, 14), string.sub(released, 15), base .. 'inst:' .. inst
  local rk, state = run_key(base, task, run), redis.call('HGET', ik, 'state') or 'null'
  leave_line(base, task, run)
  redis.call('HSET', ik, INSTANCE.holders, holders)
  redis.call('HSET', rk, RUN.released, 'a' .. step)
  if redis.call('HEXISTS', rk, RUN.missing .. step) == 1 then redis.call('HSET', rk, RUN.override, state) end
  KEY.answer(base, task, run, step, asked, RESULT.ok, state)
end

-- Starts the first of up to 50 runs in a list of the instance whose task has not ended. Returns whether one started,
-- and whether the list had any.
local function start_first(base, inst, list)
  local taken = false
  for _ = 1, 50 do
    local ref = redis.call('LPOP', base .. list .. inst)
    if not ref then return false, taken end
    taken = true
    local task, run, released = startable(base, ref)
    if released then
      KEY.give(base, inst, task, run, released, ref)
      return true, true
    elseif task then
      start_stored(base, inst, task, run, '')
      return true, true
    end
  end
  return false, taken
end

-- The instance has no holder any more: the next nested call, or else the next event of the mailbox, starts.
local function start_next(base, inst)
  local key = base .. 'inst:' .. inst
  local started, taken, left = start_first(base, inst, 'nest:'), false, 0
  if not started then started, taken = start_first(base, inst, 'mail:') end
  if taken then
    left = redis.call('LLEN', base .. 'mail:' .. inst)
    count_mail(base, inst, left)
  end
  if not started and left == 0 then
    redis.call('HDEL', key, INSTANCE.holders, INSTANCE.working_state)
    return
  end
  redis.call('HDEL', key, INSTANCE.working_state)
  if not started then
    -- More than 50 ended tasks were in the mailbox: a timer continues from here. Until then `|` holds the instance, so
    -- that no new event overtakes the rest of the mailbox.
    redis.call('HSET', key, INSTANCE.holders, '|')
    redis.call('ZADD', base .. 'timers', 0, 'i|' .. inst)
  end
end

-- A run that holds the instance is over: the run below it continues, or the next event of the mailbox starts.
local function release(base, inst, task, run)
  local key = base .. 'inst:' .. inst
  local busy = redis.call('HGET', key, INSTANCE.holders)
  if not busy then return end
  local ref = task .. '|' .. run
  if top_of(busy) ~= ref then
    -- For an ended run in the middle of the stack, only its own place is removed. A run that does not hold the instance
    -- stays where it is: a late copy of its delivery is settled while it waits in the mailbox, where `circle` must find
    -- it.
    local kept, held = {}, false
    for _, line in ipairs(lines(busy)) do
      if line == ref then held = true else kept[#kept + 1] = line end
    end
    if not held then return end
    leave_line(base, task, run)
    redis.call('HSET', key, INSTANCE.holders, table.concat(kept, '\n'))
    return
  end
  local rest = string.match(busy, '^(.*)\n[^\n]*$')
  if rest then return wake_below(base, inst, rest) end
  start_next(base, inst)
end

-- A run gives up its key while it waits: the next event of the mailbox starts with the state that the run leaves. A
-- replay of the run begins with the state that it began with, which is kept. If other runs hold the instance too, the
-- run keeps its place, since those below a nested run wait for it, and its own nested runs begin with that state.
function KEY.release(base, inst, task, run, state)
  local ik, ref, rk = base .. 'inst:' .. inst, task .. '|' .. run, run_key(base, task, run)
  local v = redis.call('HMGET', ik, INSTANCE.holders, 'state')
  if v[1] ~= ref then
    if state ~= '' then redis.call('HSET', ik, INSTANCE.working_state, state) end
    return redis.call('HSET', rk, RUN.released, 'k')
  end
  redis.call('HSETNX', rk, RUN.state_at_start, v[2] or '')
  redis.call('HSET', rk, RUN.released, 'r')
  if state ~= '' then redis.call('HSET', ik, 'state', state) end
  start_next(base, inst)
end

-- A run that holds the instance, but has not begun since it waits for a slot of a limit, goes back to the front of the
-- mailbox. Returns the limits that it no longer waits for, or nil if the holder is not such a run.
function KEY.put_back(base, inst, holder)
  local task, run = split_ref(holder)
  local rk = task and run_key(base, task, run)
  if not rk or redis.pcall('HGET', rk, RUN.current) ~= 'slot' then return nil end
  local freed = {}
  SLOT.drop(base, task, run, freed)
  redis.call('HSET', rk, RUN.current, 'mail')
  enter_line(base, task, run, inst)
  count_mail(base, inst, redis.call('LPUSH', base .. 'mail:' .. inst, holder))
  return freed
end

-- A run that holds the instance begins to wait for a slot. One in the mailbox that may have it goes first.
function KEY.let_first(base, inst, agent, holder)
  if redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders) ~= holder then return end
  for _ = 1, 1000 do
    local ref = redis.call('LINDEX', base .. 'mail:' .. inst, 0)
    if not ref then return end
    local task, run, released = startable(base, ref)
    if task and not SLOT.goes_first(base, agent, task, run) then return end
    redis.call('LPOP', base .. 'mail:' .. inst)
    count_mail(base, inst, redis.call('LLEN', base .. 'mail:' .. inst))
    if task then
      local freed = KEY.put_back(base, inst, holder)
      if released then
        KEY.give(base, inst, task, run, released, ref)
      else
        start_stored(base, inst, task, run, '')
      end
      return SLOT.pass_on(base, freed)
    end
  end
end

-- Puts a run into the mailbox: behind the others, or before them if they would wait for its slots.
local function enter_mailbox(base, inst, agent, task, run)
  local push = SLOT.goes_first(base, agent, task, run) and 'LPUSH' or 'RPUSH'
  enter_line(base, task, run, inst)
  count_mail(base, inst, redis.call(push, base .. 'mail:' .. inst, task .. '|' .. run))
end

-- A run wants its key back for a step that it waits for: at once if the instance has no holder, or one that has not begun,
-- else in the mailbox. The step's result is the instance's state, or `false` if the run has kept the key and its own state.
function KEY.acquire(base, inst, task, run, step)
  local ik, ref, rk = base .. 'inst:' .. inst, task .. '|' .. run, run_key(base, task, run)
  local now, busy = text(now_ms(base)), redis.call('HGET', ik, INSTANCE.holders)
  local released = 'w' .. now .. step
  if redis.call('HGET', rk, RUN.released) == 'k' then
    return KEY.answer(base, task, run, step, now, RESULT.ok, 'false')
  end
  if not busy then return KEY.give(base, inst, task, run, released, ref) end
  if KEY.has(busy, ref) then return KEY.give(base, inst, task, run, released, busy) end
  local agent = string.match(inst, '^[^/]*')
  if interleaves(base, agent) then
    return KEY.give(base, inst, task, run, released, busy .. '\n' .. ref)
  end
  local freed = KEY.put_back(base, inst, busy)
  if freed then
    KEY.give(base, inst, task, run, released, ref)
    return SLOT.pass_on(base, freed)
  end
  local closed = run ~= FIRST_RUN and circle(base, task, run, inst, busy)
  if closed then return KEY.answer(base, task, run, step, now, RESULT.error, deadlock(closed)) end
  redis.call('HSET', rk, RUN.released, released)
  enter_mailbox(base, inst, agent, task, run)
end

-- Whether a run that continues from its journal has given up its key: it does not wait in the mailbox.
function KEY.is_released(base, task, run)
  return redis.call('HGET', run_key(base, task, run), RUN.released) == 'r'
end

-- Delivers a run to its agent: immediately, as a nested call, or through the instance's mailbox. The caller stores
-- `cur` (the returned value) with the run's other fields. `caller` is that of `QUEUE.append`, if a task starts the run.
-- Then it also returns nil and an error (JSON), without writing, if the mailbox is full, or if the request would wait for
-- its own caller. `turn` is that of `append_start`, for a run that has a journal; events with a key need none, since their
-- reader always loads the run.
local function deliver(base, task, run, stream, agent, key, data, context, caller, turn)
  if key == '' or (turn and KEY.is_released(base, task, run)) then
    return append_start(base, task, run, stream, agent, key, data, context, turn, caller)
  end
  local inst = agent .. '/' .. key
  local ik = base .. 'inst:' .. inst
  local busy = redis.call('HGET', ik, INSTANCE.holders)
  local ref = task .. '|' .. run
  if not busy then
    redis.call('HSET', ik, INSTANCE.holders, ref)
    return append_start(base, task, run, stream, agent, key, data, context, nil, caller)
  end
  if interleaves(base, agent) then
    redis.call('HSET', ik, INSTANCE.holders, busy .. '\n' .. ref)
    keep_snapshot(base, inst, task, run)
    return append_start(base, task, run, stream, agent, key, data, context)
  end
  for _, holder in ipairs(lines(busy)) do
    if waits_for(holder, task, run) or waits_through(base, holder, context) then
      local top = top_of(busy)
      local top_task, top_run = split_ref(top)
      -- Holders that call in mid-turn never suspend: they wait for the answers while their turn is in flight.
      local waiting = redis.call('HMGET', run_key(base, top_task, top_run), RUN.current, RUN.asks_in_turn,
        RUN.open_asks)
      if waiting[1] == 'held' or (waiting[2] and tonumber(waiting[3] or '1') > 0) then
        put_on_top(base, inst, busy, ref)
        keep_snapshot(base, inst, task, run)
        return append_start(base, task, run, stream, agent, key, data, context)
      end
      redis.call('RPUSH', base .. 'nest:' .. inst, ref)
      return 'nest'
    end
  end
  if SLOT.goes_first(base, agent, task, run) then
    local freed = KEY.put_back(base, inst, busy)
    if freed then
      redis.call('HSET', ik, INSTANCE.holders, ref)
      local entry = append_start(base, task, run, stream, agent, key, data, context)
      SLOT.pass_on(base, freed)
      return entry
    end
  end
  if caller then
    local waiting = redis.call('LLEN', base .. 'mail:' .. inst)
    if waiting > 0 and waiting >= tonumber(redis.call('HGET', base .. 'meta', 'mailbox_max') or '10000') then
      return nil, mailbox_full(agent, key)
    end
    local chain = run ~= FIRST_RUN and circle(base, task, run, inst, busy)
    if chain then return nil, deadlock(chain) end
  end
  enter_mailbox(base, inst, agent, task, run)
  return 'mail'
end
