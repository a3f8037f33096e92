-- Fairness among tenants. While a work stream is long, the first events of new tasks wait in a queue of their tenant,
-- and move onto the stream in turn. A task in a queue has `cur` = `queue`; its hash has all that its start event needs.
--   queues                    <stream>: how many tasks wait for it, with the deliveries that wait (turns.lua)
--                             · <stream>|now: virtual time of its turns · <stream>|at: when one moved last (ms)
--                             · <stream>|past: entries of those that moved onto a long stream
--                             · seq: number of the last one that was queued
--   turns:<stream>            tenants by the virtual time of their next turn; a tenant without waiting tasks leaves then
--   queue:<stream>|<tenant>   tasks by priority, then by the order of their submits
--   tenants                   settings by tenant: weight, limits of open tasks and of tasks a second in this partition,
--                             then both in the namespace (0: no limit); `*` for all others
--   open:<tenant>             the open tasks of a named tenant
--   rate:<tenant>             when the tenant's next task is due at its rate (ms): a token bucket as one number
-- `queued` in `meta` is the number of waiting tasks and deliveries in all queues of the partition: a cheap check that
-- none wait.

-- Whether a task was cancelled before its submit.
function QUEUE.was_cancelled(base, task)
  return redis.call('ZSCORE', base .. 'tombs:' .. QUEUE.tenant_of(task), task)
end

-- Whether a new task must wait. `length` is that of its stream, `most` the number of unread entries that the stream may
-- have.
function QUEUE.is_needed(base, stream, length, most, queued)
  if queued > 0 and redis.call('HEXISTS', base .. 'queues', stream) == 1 then return true end
  return length >= most and QUEUE.unread(base, stream) >= most
end

function QUEUE.check(base, stream, tenant)
  redis.call('HLEN', base .. 'queues')
  redis.call('ZCARD', base .. 'turns:' .. stream)
  redis.call('ZCARD', QUEUE.key(base, stream, tenant))
end

function QUEUE.put(base, stream, tenant, priority, task)
  local queues = base .. 'queues'
  local order = (QUEUE.HIGHEST - priority) * QUEUE.PRIORITY + redis.call('HINCRBY', queues, 'seq', 1)
  redis.call('ZADD', QUEUE.key(base, stream, tenant), text(order), task)
  -- A tenant that comes back starts at the current turn, without catching up on missed ones.
  redis.call('ZADD', base .. 'turns:' .. stream, 'NX', redis.call('HGET', queues, stream .. '|now') or '0', tenant)
  redis.call('HINCRBY', queues, stream, 1)
  redis.call('HINCRBY', base .. 'meta', 'queued', 1)
end

-- `deliveries` of those that are gone are not tasks, but work that running tasks started.
function QUEUE.count_down(base, stream, gone, deliveries)
  if gone == 0 then return end
  local queues, running = base .. 'queues', stream .. '|~'
  if deliveries and deliveries > 0 and redis.call('HINCRBY', queues, running, -deliveries) <= 0 then
    redis.call('HDEL', queues, running)
  end
  if redis.call('HINCRBY', queues, stream, -gone) <= 0 then
    redis.call('HDEL', queues, stream, stream .. '|now', running)
    redis.call('DEL', base .. 'turns:' .. stream)
  end
  if redis.call('HINCRBY', base .. 'meta', 'queued', -gone) <= 0 then redis.call('HDEL', base .. 'meta', 'queued') end
end

-- Removes a task that ends before its turn.
function QUEUE.leave(base, task, header)
  local head = header_of(header)
  QUEUE.check(base, head.stream, head.tenant)
  QUEUE.count_down(base, head.stream, redis.call('ZREM', QUEUE.key(base, head.stream, head.tenant), task))
end

-- Whether a refill will find this waiting task.
function QUEUE.holds(base, task, header)
  local head = header_of(header)
  return redis.call('HEXISTS', base .. 'queues', head.stream) == 1
    and redis.call('ZSCORE', base .. 'turns:' .. head.stream, head.tenant)
    and redis.call('ZSCORE', QUEUE.key(base, head.stream, head.tenant), task)
end

-- Starts a waiting task. Returns its `cur`, or nil if it does not wait any more. Raises before it writes.
function QUEUE.start(base, task)
  local v = redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.current, RUN.header, RUN.input, RUN.context,
    'from')
  if not v[1] or ENDED[v[1]] or v[2] ~= 'queue' then return nil end
  local stream, agent, key = target_of(v[3])
  check_stream(base, stream)
  if key ~= '' then check_instance(base, agent .. '/' .. key) end
  local entry
  if key == '' and v[6] then
    -- A fork begins with a journal: no turn that a warm run has, so that its reader loads it.
    entry = append_start(base, task, FIRST_RUN, stream, agent, key, v[4], v[5], '-1')
  else
    entry = deliver(base, task, FIRST_RUN, stream, agent, key, v[4], v[5])
  end
  redis.call('HSET', base .. 'task:' .. task, RUN.current, entry)
  return entry
end

-- Sets the timer of a delivery that waits for its turn again, since a refill will move it. Returns false if none will;
-- the delivery then leaves its queue.
function QUEUE.postpone(base, member, now)
  local stream, line = string.match(member, '^e|([^|]*)|~%d+(\n.*)$')
  if not stream then return false end
  local key = QUEUE.key(base, stream, line)
  -- pcall: if another program stores something else there, the timer moves the delivery.
  if type(redis.pcall('ZSCORE', key, member)) ~= 'string' then return false end
  if redis.call('HEXISTS', base .. 'queues', stream) == 1 and redis.call('ZSCORE', base .. 'turns:' .. stream, line) then
    redis.call('ZADD', base .. 'timers', text(now + QUEUE.TIMER_MS), member)
    return true
  end
  QUEUE.count_down(base, stream, redis.call('ZREM', key, member), 1)
  return false
end

-- Weight, limit of open tasks and limit of tasks a second of a tenant; the last two are 0 if there is no limit.
function QUEUE.settings(base, tenant)
  local found = redis.call('HMGET', base .. 'tenants', tenant, '*')
  local weight, open, rate = string.match(found[1] or found[2] or '', '^(%d+) (%d+) ([%d.]+)')
  return math.max(1, tonumber(weight or '1')), tonumber(open or '0'), tonumber(rate or '0')
end

-- The unread ones of these entries. pcall: without its group nothing of a stream was read.
function QUEUE.still_unread(base, stream, entries)
  local ms, seq = 0, 0
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', base .. stream)) do
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then ms, seq = string.match(group[i + 1], '^(%d+)-(%d+)$') end
    end
  end
  local left = {}
  for entry_ms, entry_seq in string.gmatch(entries, '(%d+)-(%d+)') do
    local later = tonumber(entry_ms) - tonumber(ms)
    if later > 0 or (later == 0 and tonumber(entry_seq) > tonumber(seq)) then
      left[#left + 1] = entry_ms .. '-' .. entry_seq
    end
  end
  return left
end

-- Starts the next task in a tenant's queue. Returns how many have left the queue, the entries of those that moved, and
-- whether the tenant has spent a turn. pcall: from here on nothing may raise, since those that have moved are counted
-- at the end.
function QUEUE.start_next(base, stream, key)
  local found = redis.pcall('ZRANGE', key, 0, 0)
  local task = found[1]
  if not task then return 0, {}, found.err end
  local done, moved = pcall(QUEUE.start, base, task)
  redis.call('ZREM', key, task)
  if done then return 1, {moved}, moved end
  QUEUE.put_last(base, key, task)
  return 0, {}, true
end

-- One that cannot start (a key of another type) goes behind all others and blocks none of them.
function QUEUE.put_last(base, key, member)
  local order = redis.call('HINCRBY', base .. 'queues', 'seq', 1) + 10 * QUEUE.PRIORITY
  redis.call('ZADD', key, text(order), member)
end

-- Appends one delivery that waits for its turn, if it still counts. Raises before it writes. `tasks` caches the status
-- of its task for the others.
function QUEUE.move(base, stream, member, packed, tasks)
  if not packed then return nil end
  local fields = cmsgpack.unpack(packed)
  local task, run = string.match(fields[2], '^[^\n]*\n[^\n]*\n([^\n]*)\n([^\n]*)')
  local known = tasks[task]
  if not known then
    known = {status = redis.call('HGET', base .. 'task:' .. task, 'status'), listed = {}}
    tasks[task] = known
  end
  local is_turn = is_agent_stream(stream)
  local wanted = QUEUE.is_wanted(base, 'retry', is_turn, task, run, known.status)
  known.listed[#known.listed + 1] = TASK.timer .. member
  if not wanted then return nil end
  local entry = redis.call('XADD', base .. stream, '*', unpack(fields))
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, entry) end
  return entry
end

-- Does the same for up to `most` deliveries that a tenant's running tasks have started.
function QUEUE.move_next(base, stream, key, most)
  local found = redis.pcall('ZRANGE', key, 0, most - 1)
  local packed = found[1] and redis.pcall('HMGET', base .. 'delayed', unpack(found)) or {}
  if found.err or packed.err then return 0, {}, true end
  local entries, taken, tasks = {}, {}, {}
  for i, member in ipairs(found) do
    local done, entry = pcall(QUEUE.move, base, stream, member, packed[i], tasks)
    if done then taken[#taken + 1] = member else QUEUE.put_last(base, key, member) end
    if done and entry then entries[#entries + 1] = entry end
  end
  if taken[1] then
    redis.call('ZREM', key, unpack(taken))
    redis.pcall('ZREM', base .. 'timers', unpack(taken))
    redis.call('HDEL', base .. 'delayed', unpack(taken))
  end
  for task, known in pairs(tasks) do
    if known.status and known.listed[1] then redis.call('HDEL', base .. 'task:' .. task, unpack(known.listed)) end
  end
  return #taken, entries, found[1] ~= nil
end

-- Moves waiting tasks and deliveries onto a stream, in turn among tenants, until `want` of its entries are unread, or
-- `most` if no new task waits. Onto a longer stream one moves each 100 ms, while few such are unread: resumed runs, which
-- never wait, may keep it long forever, and must not keep others out.
function QUEUE.refill(base, stream, want, most, now)
  local queues, turns, past = base .. 'queues', base .. 'turns:' .. stream, nil
  local v = redis.call('HMGET', queues, stream, stream .. '|at', stream .. '|past', stream .. '|~')
  if not v[1] then return end
  redis.call('HLEN', base .. 'tenants')
  local room = (v[1] == v[4] and most or want) - QUEUE.unread(base, stream)
  room = math.min(room, QUEUE.MOST_MOVES)
  if room < 1 and math.abs(now - tonumber(v[2] or '0')) >= QUEUE.STEP_MS then
    past = QUEUE.still_unread(base, stream, v[3] or '')
    if #past < QUEUE.PAST then room = 1 end
  end
  local weights, gone, deliveries, last = {}, 0, 0, nil
  for _ = 1, room > 0 and room + QUEUE.LOOKS or 0 do
    local tenant, at = unpack(redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES'))
    if room < 1 then break end
    if not tenant then
      -- Nothing is left, not even of what another program has deleted.
      gone, deliveries = tonumber(v[1]), tonumber(v[4] or '0')
      break
    end
    local key = QUEUE.key(base, stream, tenant)
    local is_running = string.sub(tenant, 1, 1) == QUEUE.RUNNING
    local left, entries, spent
    if is_running then
      left, entries, spent = QUEUE.move_next(base, stream, key, math.min(room, QUEUE.AT_ONCE))
      deliveries = deliveries + left
    else
      left, entries, spent = QUEUE.start_next(base, stream, key)
    end
    gone = gone + left
    if spent then
      weights[tenant] = weights[tenant] or QUEUE.settings(base, is_running and string.sub(tenant, 2) or tenant)
      local moved = #entries
      -- One that cannot start takes a place, those of ended tasks do not: there may be thousands.
      last, room = at, room - (left > 0 and moved or 1)
      if past then for _, entry in ipairs(entries) do past[#past + 1] = entry end end
      local cost = math.floor(math.max(1, moved) * QUEUE.STRIDE / weights[tenant])
      redis.call('ZADD', turns, text(tonumber(at) + cost), tenant)
    elseif left == 0 then
      redis.call('ZREM', turns, tenant)
    end
  end
  if last then redis.call('HSET', queues, stream .. '|now', text(tonumber(last)), stream .. '|at', text(now)) end
  if past then redis.call('HSET', queues, stream .. '|past', table.concat(past, ' ')) end
  QUEUE.count_down(base, stream, gone, deliveries)
end

-- Refills these streams, or all if none is named. Returns how many tasks still wait. pcall: an error in one stream's
-- queues must not keep the others waiting.
function QUEUE.refill_all(base, want, now, streams)
  local meta = redis.call('HMGET', base .. 'meta', 'queued', 'ready_max')
  if not meta[1] then return 0 end
  local most = tonumber(meta[2] or want)
  want = math.min(want, most)
  for _, stream in ipairs(streams or redis.call('HKEYS', base .. 'queues')) do
    if group_of(stream) and not string.find(stream, '|', 1, true) then
      pcall(QUEUE.refill, base, stream, want, most, now)
    end
  end
  return tonumber(redis.call('HGET', base .. 'meta', 'queued') or '0')
end

-- Checks whether a named tenant may start one more task. Returns nil and when its next task is due (ms) or '', else a
-- message and the seconds until a retry makes sense. It writes nothing.
function QUEUE.refuse(base, tenant, now)
  local _, most, rate = QUEUE.settings(base, tenant)
  local count = redis.call('ZCARD', base .. 'open:' .. tenant)
  if most > 0 and count >= most then
    return 'the tenant ' .. tenant .. ' has ' .. count .. ' open tasks in this partition, as many as it may', '1'
  end
  if rate == 0 then return nil, '' end
  local each, burst = 1000 / rate, math.max(1, rate)
  local due = tonumber(redis.call('GET', base .. 'rate:' .. tenant) or '0')
  -- Never further ahead than a whole burst: the clock may have gone back.
  due = math.max(now, math.min(due, now + burst * each))
  local early = due - (burst - 1) * each - now
  if early > 0.001 then
    return 'the tenant ' .. tenant .. ' submits more than ' .. rate .. ' tasks a second in this partition',
      string.format('%.3f', early / 1000)
  end
  return nil, due + each
end

function QUEUE.spend(base, tenant, due, now)
  if due == '' then return end
  redis.call('SET', base .. 'rate:' .. tenant, string.format('%.3f', due), 'PX', text(math.ceil(due - now) + 1000))
end
