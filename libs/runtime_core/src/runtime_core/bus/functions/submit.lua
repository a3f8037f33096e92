-- Starts a task, or returns the state of an equal submit. Refused by the server at maxmemory.
-- KEYS 1 base
-- ARGV 1 task id · 2 source · 3 event id · 4 digest · 5 agent · 6 instance key or '' · 7 input (JSON)
--      8 reply stream or '' · 9 context (JSON) or '' · 10 session id or '' · 11 max steps or '0'
--      12 timeout ms or '0' · 13 admitter's epoch, or '' for a direct submit, or '-' for one with a random id that is
--        repeated for a few minutes at most
--      14 '1' if the output is wanted as a stream, '2' if its steps are wanted too
--      15 limits on its usage (JSON: `tokens`, `cost`) or ''
--      16 '' with one partition, else tokens of the claims of its id and its task id, as `id|task_id`; each may be ''
--      17 '' for a task that never waits for its turn, else its priority (1 to 9) and tenant, as `5|acme`
-- RETURNS {'started', task} · {'known', task, status} · {'rejected', field, message}
--         {'overloaded', message, seconds until the next try} · {'wait'} before the first manifest
--         {'fenced'} for an admitter that was replaced
--         {'elsewhere' or 'taken', field, partition, token} as `claim`, for ids that belong to this partition
--         {'again', field} if the claim of an id was refused here

-- Keeps the newest epoch that this partition has seen: admission leads in one partition and writes in all.
local function fence_admitter(base, args)
  local newest = tonumber(redis.call('HGET', base .. 'leader:admit', 'epoch') or '0')
  if tonumber(args[13]) < newest then return {'fenced'} end
  if tonumber(args[13]) > newest then redis.call('HSET', base .. 'leader:admit', 'epoch', args[13]) end
  return nil
end

-- The reply to a submit with a known source and id, or nil.
local function find_event(base, args, seen_key, id_token)
  local seen = redis.call('HGET', base .. 'seen', seen_key)
  if not seen then return nil end
  local first = lines(seen)
  local mark = string.match(first[3] or '', '^[@!].*')
  if mark then
    local elsewhere = misplaced('id', mark, first[2], args[4], id_token or '')
    return elsewhere
  end
  if first[2] ~= args[4] then
    return {'rejected', 'id', 'the id ' .. args[3] .. ' of source ' .. args[2] .. ' was used before with different content'}
  end
  local status = redis.call('HGET', base .. 'task:' .. first[1], 'status') or first[3]
  if status then return {'known', first[1], status} end
  -- Neither a task nor its end exists: the server has lost it. The submit starts it again.
  return nil
end

-- The reply to a submit whose task id is in use, here or in another partition, or nil.
local function find_task(base, args, key, task_token)
  local task = args[1]
  local known = redis.call('HMGET', key, 'status', RUN.header)
  if known[1] then
    if known[2] and lines(known[2])[9] == args[4] then return {'known', task, known[1]} end
    return {'rejected', 'task_id', 'a task ' .. task .. ' with different content exists'}
  end
  if not task_token then return nil end
  local held = redis.call('HGET', base .. 'seen', seen_line('', task))
  local place = not held and redis.call('HGET', base .. 'places', task)
  if held then
    local claimed = lines(held)
    local elsewhere = misplaced('task_id', claimed[3], claimed[2], args[4], task_token)
    if elsewhere then return elsewhere end
  elseif place and place ~= string.match(base, '{(%d+)}:$') then
    return {'taken', 'task_id', place, '0'}
  end
  return nil
end

local function unknown_agent(base, agent)
  if redis.call('EXISTS', base .. 'agents') == 0 then return {'wait'} end
  local names = {}
  for _, name in ipairs(redis.call('HKEYS', base .. 'agents')) do
    if string.sub(name, 1, 5) ~= 'weft.' then names[#names + 1] = name end
  end
  table.sort(names)
  local choice = names[1] and 'choose from ' .. table.concat(names, ', ') or 'there are none'
  return {'rejected', 'data.agent', 'no agent is named ' .. agent .. '; ' .. choice}
end

-- The record's length by partition when a submit last read it, and how many submits came after. The record is not
-- read while it cannot be full, even if each of them had added this many entries.
local record_read, ENTRIES_OF_SUBMIT = {}, 1000

local function is_record_full(base, most)
  local last = record_read[base]
  if last and last.length + last.submits * ENTRIES_OF_SUBMIT < most then
    last.submits = last.submits + 1
    return false
  end
  local length = redis.call('XLEN', base .. 'record')
  record_read[base] = {length = length, submits = 1}
  return length >= most
end

-- The reply to a submit that does not fit, or nil. `meta` has the values that `submit` has read.
local function find_overload(base, meta, stream, length, queued)
  local most = tonumber(meta[2] or '100000')
  -- `queued` counts what waits for all streams.
  if length + queued >= most and length + tonumber(redis.call('HGET', base .. 'queues', stream) or '0') >= most then
    return {'overloaded', 'the stream ' .. stream .. ' holds as much open work as it may'}
  end
  if is_record_full(base, tonumber(meta[4] or '1000000')) then
    return {'overloaded', 'the record stream is over its limit: is the trajectory-recorder running?'}
  end
  return nil
end

-- Reads every other key that the submit is about to write. Returns the reply if the instance's mailbox is full, or nil.
local function check_start(base, args, meta)
  if args[12] ~= '0' then redis.call('ZCARD', base .. 'timers') end
  if args[6] ~= '' and check_instance(base, args[5] .. '/' .. args[6]) >= tonumber(meta[5] or '10000') then
    return {'overloaded', 'the mailbox of ' .. args[5] .. '/' .. args[6] .. ' is full'}
  end
  return nil
end

-- Stores the task. `entry` is that of its start event, or the word for where it waits; `tenant` nil without a name. The
-- retention goes with the task, so that its end need not read it. No source means that the dedupe window lacks it.
local function store_submitted(base, args, key, stream, entry, created, tenant, retention, priority, by_task)
  local header = stream .. '\n' .. args[5] .. '\n' .. args[6] .. '\n' .. args[8] .. '\n' .. created .. '\n' ..
    args[11] .. '\n' .. args[3] .. '\n' .. (by_task and '' or args[2]) .. '\n' .. args[4] .. '\n' .. args[10] .. '\n' ..
    (tenant or '') .. '\n' .. (retention or '')
  if priority and priority ~= SLOT.DEFAULT then header = header .. '\n' .. text(priority) end
  if args[9] ~= '' then
    redis.call('HSET', key, 'status', 'accepted', RUN.current, entry, RUN.header, header, RUN.input, args[7],
      RUN.context, args[9])
  else
    redis.call('HSET', key, 'status', 'accepted', RUN.current, entry, RUN.header, header, RUN.input, args[7])
  end
  list_start(base, args[1], created, tenant)
  if tenant then redis.call('ZADD', base .. 'open:' .. tenant, created, args[1]) end
  local flags = args[14] == '2' and FLAG.output .. FLAG.steps_shown or args[14] == '1' and FLAG.output or ''
  if args[15] and args[15] ~= '' then
    flags = flags .. FLAG.usage
    redis.call('HSET', key, TASK.limits, args[15])
  end
  flags = traced_flag(flags, args[9])
  if flags ~= '' then redis.call('HSET', key, TASK.flags, flags) end
end

-- The reply to a submit that may not start; or nil and the data for a start: the values of `meta`, the agent's stream,
-- whether the task waits for its turn, its priority, and of a named tenant the name, when its next task is due, and
-- now.
local function check_submit(base, args, key, task_token)
  local task = args[1]
  local refused = find_task(base, args, key, task_token)
  if refused then return refused end
  local meta = redis.call('HMGET', base .. 'meta', 'overload', 'stream_max', 'dedupe_max', 'record_max', 'mailbox_max',
    'tombs', 'queued', 'ready_max', 'retention')
  if meta[1] and meta[1] ~= '' then return {'overloaded', meta[1]} end
  local stream = redis.call('HGET', base .. 'agents', args[5])
  if not stream then return unknown_agent(base, args[5]) end
  local length, queued = redis.call('XLEN', base .. stream), tonumber(meta[7] or '0')
  refused = find_overload(base, meta, stream, length, queued) or check_start(base, args, meta)
  if refused then return refused end
  if meta[6] and QUEUE.was_cancelled(base, task) then
    return {'rejected', 'task_id', 'the task ' .. task .. ' was cancelled before it was submitted'}
  end
  local priority, tenant = string.match(args[17], '^(%d)|(.*)$')
  local due, now
  if tenant and tenant ~= '' then
    now = now_ms(base)
    refused, due = QUEUE.refuse(base, tenant, now)
    if refused then return {'overloaded', refused, due} end
  end
  -- Without `ready_max`, no process of a release that moves tasks on has run here yet.
  local waits = tenant and meta[8] and QUEUE.is_needed(base, stream, length, tonumber(meta[8]), queued)
  if waits then QUEUE.check(base, stream, tenant) end
  return nil, meta, stream, waits, tonumber(priority), tenant, due, now
end

local function submit(keys, args)
  local base, task = keys[1], args[1]
  local refused = args[13] ~= '' and args[13] ~= '-' and fence_admitter(base, args)
  if refused then return refused end
  local id_token, task_token = string.match(args[16], '^(%d*)|(%d*)$')
  local key, seen_key = base .. 'task:' .. task, seen_line(args[2], args[3])
  local meta, stream, waits, priority, tenant, due, now
  refused, meta, stream, waits, priority, tenant, due, now = check_submit(base, args, key, task_token)
  -- An equal submit is answered even where a new one is refused.
  if refused then return find_event(base, args, seen_key, id_token) or refused end
  local line = task .. '\n' .. args[4]
  -- It needs no place in the dedupe window: only its own repeats have its random id, and they find the task, if ended
  -- tasks are kept for ten minutes. With several partitions the window also says where the task is.
  local by_task = args[13] == '-' and args[16] == '' and tonumber(meta[9] or '3600') >= 600
  -- The first write also shows whether the id is known.
  if not by_task and redis.call('HSETNX', base .. 'seen', seen_key, line) == 0 then
    refused = find_event(base, args, seen_key, id_token)
    if refused then return refused end
    redis.call('HSET', base .. 'seen', seen_key, line)
  end
  if due then QUEUE.spend(base, tenant, due, now) end
  local entry = 'queue'
  if waits then
    QUEUE.put(base, stream, tenant, priority, task)
  else
    entry = deliver(base, task, FIRST_RUN, stream, args[5], args[6], args[7], args[9])
  end
  local created = in_flight(entry) and ms_of(entry) or text(now_ms(base))
  if not by_task then put_in_order(base, seen_key, created, meta[3]) end
  store_submitted(base, args, key, stream, entry, created, due and tenant, meta[9], priority, by_task)
  if args[12] ~= '0' then add_timer(base, task, 'd|' .. task, now_ms(base) + tonumber(args[12])) end
  return {'started', task}
end
