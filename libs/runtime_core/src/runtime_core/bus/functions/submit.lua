-- Starts a task, or answers with what is known of an equal submit. Refused by the server at maxmemory.
-- KEYS 1 base
-- ARGV 1 task id · 2 source · 3 event id · 4 digest · 5 agent · 6 instance key or '' · 7 input (JSON)
--      8 reply stream or '' · 9 context (JSON) or '' · 10 session id or '' · 11 max steps or '0'
--      12 timeout ms or '0' · 13 admitter's epoch or '' (a direct submit) · 14 '1' where the output is wanted as a stream, '2' with its steps
--      15 the most that it may use (JSON: `tokens`, `cost`) or ''
--      16 '' with one partition, else tokens of the claims of its id and its task id, as `id|task_id`; each may be ''
--      17 '' for a task that never waits for its turn, else its priority (1 to 9) and tenant, as `5|acme`
-- RETURNS {'started', task} · {'known', task, status} · {'rejected', field, message} · {'overloaded', message, seconds until the next try}
--         {'wait'} before the first manifest · {'fenced'} for an admitter that was replaced
--         {'elsewhere' or 'taken', field, partition, token} as `claim`, for ids that belong to this partition
--         {'again', field} where the claim of an id was refused here
local function submit(keys, args)
  local base, task = keys[1], args[1]
  local id_token, task_token = string.match(args[16], '^(%d*)|(%d*)$')
  local key = base .. 'task:' .. task
  if args[13] ~= '' then
    -- The newest epoch that this partition has seen: admission leads in one partition and writes in all.
    local newest = tonumber(redis.call('HGET', base .. 'leader:admit', 'epoch') or '0')
    if tonumber(args[13]) < newest then return {'fenced'} end
    if tonumber(args[13]) > newest then redis.call('HSET', base .. 'leader:admit', 'epoch', args[13]) end
  end
  local seen_key = args[2] .. '\n' .. args[3]
  local seen = redis.call('HGET', base .. 'seen', seen_key)
  local first = seen and lines(seen)
  local mark = first and string.match(first[3] or '', '^[@!].*')
  if mark then
    local elsewhere = misplaced('id', mark, first[2], args[4], id_token or '')
    if elsewhere then return elsewhere end
  elseif seen then
    if first[2] ~= args[4] then
      return {'rejected', 'id', 'the id ' .. args[3] .. ' of source ' .. args[2] .. ' was used before with other content'}
    end
    local status = redis.call('HGET', base .. 'task:' .. first[1], 'status') or first[3]
    -- Neither a task nor its end: the server has lost it. The submit starts it again.
    if status then return {'known', first[1], status} end
  end
  local known = redis.call('HMGET', key, 'status', 'h')
  if known[1] then
    if known[2] and lines(known[2])[9] == args[4] then return {'known', task, known[1]} end
    return {'rejected', 'task_id', 'a task ' .. task .. ' with other content exists'}
  end
  if task_token then
    local held = redis.call('HGET', base .. 'seen', '\n' .. task)
    local place = not held and redis.call('HGET', base .. 'places', task)
    if held then
      local claimed = lines(held)
      local elsewhere = misplaced('task_id', claimed[3], claimed[2], args[4], task_token)
      if elsewhere then return elsewhere end
    elseif place and place ~= string.match(base, '{(%d+)}:$') then
      return {'taken', 'task_id', place, '0'}
    end
  end
  local meta = redis.call('HMGET', base .. 'meta', 'overload', 'stream_max', 'dedupe_max', 'record_max', 'mailbox_max',
    'tombs', 'queued', 'ready_max')
  if meta[1] and meta[1] ~= '' then return {'overloaded', meta[1]} end
  local stream = redis.call('HGET', base .. 'agents', args[5])
  if not stream then
    if redis.call('EXISTS', base .. 'agents') == 0 then return {'wait'} end
    local names = redis.call('HKEYS', base .. 'agents')
    table.sort(names)
    return {'rejected', 'data.agent', 'no agent is named ' .. args[5] .. '; known are ' .. table.concat(names, ', ')}
  end
  local length, queued = redis.call('XLEN', base .. stream), tonumber(meta[7] or '0')
  if length + queued >= tonumber(meta[2] or '100000') then
    return {'overloaded', 'the stream ' .. stream .. ' holds as much open work as it may'}
  end
  if redis.call('XLEN', base .. 'record') >= tonumber(meta[4] or '1000000') then
    return {'overloaded', 'the record stream is over its limit: is the trajectory-recorder running?'}
  end
  if args[6] ~= '' and redis.call('LLEN', base .. 'mail:' .. args[5] .. '/' .. args[6]) >= tonumber(meta[5] or '10000') then
    return {'overloaded', 'the mailbox of ' .. args[5] .. '/' .. args[6] .. ' is full'}
  end
  redis.call('LLEN', base .. 'seenq')
  redis.call('ZCARD', base .. 'index')
  if args[12] ~= '0' then redis.call('ZCARD', base .. 'timers') end
  if args[6] ~= '' then check_instance(base, args[5] .. '/' .. args[6]) end
  if meta[6] and redis.call('ZSCORE', base .. 'stopped', 'tomb:' .. task) then
    return {'rejected', 'task_id', 'the task ' .. task .. ' was cancelled before it was submitted'}
  end
  local priority, tenant = string.match(args[17], '^(%d)|(.*)$')
  local due, now
  if tenant and tenant ~= '' then
    local refused
    now = now_ms(base)
    refused, due = QUEUE.refuse(base, tenant, now)
    if refused then return {'overloaded', refused, due} end
  end
  -- Without `ready_max` no release that moves tasks on has been here yet.
  local waits = tenant and meta[8] and QUEUE.is_needed(base, stream, length, tonumber(meta[8]), queued)
  if waits then QUEUE.check(base, stream, tenant) end

  if due then QUEUE.spend(base, tenant, due, now) end
  local entry = 'queue'
  if waits then
    QUEUE.put(base, stream, tenant, tonumber(priority), task)
  else
    entry = deliver(base, task, 'r', stream, args[5], args[6], args[7], args[9])
  end
  local created = string.find(entry, '-', 1, true) and ms_of(entry) or text(now_ms(base))
  remember(base, seen_key, task .. '\n' .. args[4], created, meta[3])
  local h = stream .. '\n' .. args[5] .. '\n' .. args[6] .. '\n' .. args[8] .. '\n' .. created .. '\n' .. args[11] ..
    '\n' .. args[3] .. '\n' .. args[2] .. '\n' .. args[4] .. '\n' .. args[10]
  if due then h = h .. '\n' .. tenant end
  if args[9] ~= '' then
    redis.call('HSET', key, 'status', 'accepted', 'cur', entry, 'h', h, 'd', args[7], 'x', args[9])
  else
    redis.call('HSET', key, 'status', 'accepted', 'cur', entry, 'h', h, 'd', args[7])
  end
  redis.call('ZADD', base .. 'index', created, task)
  count_start(base, task, created)
  if due then redis.call('ZADD', base .. 'open:' .. tenant, created, task) end
  local flags = args[14] == '2' and 'or' or args[14] == '1' and 'o' or ''
  if args[15] and args[15] ~= '' then
    flags = flags .. 'u'
    redis.call('HSET', key, 'lim', args[15])
  end
  flags = traced_flag(flags, args[9])
  if flags ~= '' then redis.call('HSET', key, 'fl', flags) end
  if args[12] ~= '0' then add_timer(base, task, 'd|' .. task, now_ms(base) + tonumber(args[12])) end
  return {'started', task}
end
