-- Messages that nobody waits for: each becomes a separate task. Topics and their subscribers.

local UNDELIVERED_MAX = 1000
-- Limit on the bytes of messages without a subscriber in a partition. It keeps the newest message whatever its size.
local UNDELIVERED_MAX_BYTES = 16 * 1024 * 1024

-- Agents that a topic's subscriptions name, each once, without the sender's own instance.
local function subscribers(base, topic, key, sender)
  local v = redis.call('HMGET', base .. 'topics', '=' .. topic, '^')
  local found, known = {}, {}
  local function add(agent)
    if not known[agent] and agent .. '/' .. key ~= sender then found[#found + 1] = agent end
    known[agent] = true
  end
  if v[1] then
    for _, agent in ipairs(lines(v[1])) do add(agent) end
  end
  if v[2] then
    for _, line in ipairs(lines(v[2])) do
      local prefix, agent = string.match(line, '^(%S*) (.*)$')
      if string.sub(topic, 1, #prefix) == prefix then add(agent) end
    end
  end
  return found, next(known) ~= nil
end

-- A message that nobody waits for becomes a separate task; its id derives from the step that sent it, so that
-- a repeated commit starts nothing twice. `turn` is the `QUEUE.caller` of a commit that sends more.
local function send_detached(base, task, agent, key, data, context, from_task, from_run, turn)
  if string.sub(agent, 1, 1) == '@' then
    local place, name = string.match(agent, '^(@%d+):(.*)$')
    ask_elsewhere(base, place .. ':' .. task, name, key, data, context, '')
    return
  end
  local stream = redis.call('HGET', base .. 'agents', agent)
  if not stream then
    dead.keep(base, {'reason', 'unknown_name', 'stream', 'agent', 'group', GROUPS.agent,
      'time', text(now_ms(base)), 'taskid', from_task, 'runid', from_run, 'name', agent,
      'error', error_json('UnknownName', 'no agent is named ' .. agent), 'errors', '[]', ENTRY.data, data})
    return
  end
  local tk = base .. 'task:' .. task
  if redis.call('EXISTS', tk) == 1 then return end
  local from = from_task .. '/' .. from_run
  local caller = turn or QUEUE.caller(base, from_task)
  local entry = deliver(base, task, FIRST_RUN, stream, agent, key, data, context, caller)
  if not turn then QUEUE.flush(base, caller) end
  if entry then
    store_task(base, task, stream, agent, key, data, context, from, entry)
  else
    local now = text(now_ms(base))
    local head = header_of(stream .. '\n' .. agent .. '\n' .. key .. '\n\n' .. now .. '\n0\n' .. task .. '\n' .. from ..
      '\n\n')
    redis.pcall('ZADD', base .. 'index', now, task)
    local ending = {head = head, retention = redis.call('HGET', base .. 'meta', 'retention') or '3600',
      hooks = hooks_of_end(base, head, context ~= '' and context or nil, nil)}
    end_task(base, task, ending, '', 'failed', mailbox_full(agent, key), '0', now, '[]', false, true)
  end
end

-- The id of the task by which an agent gets a published message: the same for a repeat of the message.
local function task_of_message(id, agent, key)
  return string.sub(redis.sha1hex(id .. '\n' .. agent .. '/' .. key), 1, 32)
end

-- The number of bytes in `undelivered` before an entry with these fields.
local function bytes_before(fields)
  for i = 1, #fields, 2 do
    if fields[i] == ENTRY.bytes_before then return tonumber(fields[i + 1]) or 0 end
  end
  return 0
end

-- Keeps a message without a subscriber. Each entry has the total of bytes before it since the stream began, so the
-- oldest entry gives the number of bytes in the stream.
local function keep_undelivered(base, ...)
  local stream, size = base .. 'undelivered', 0
  local before = tonumber(redis.call('HGET', base .. 'meta', 'undelivered') or '0') or 0
  for _, field in ipairs({...}) do size = size + #field end
  local all, dropped, start = redis.call('XLEN', stream), 0, '-'
  while true do
    local oldest = redis.call('XRANGE', stream, start, '+', 'COUNT', 1)[1]
    if not oldest then break end
    local n = bytes_before(oldest[2])
    if before >= n and before + size - n <= UNDELIVERED_MAX_BYTES then break end
    dropped, start = dropped + 1, '(' .. oldest[1]
  end
  redis.call('HSET', base .. 'meta', 'undelivered', text(before + size))
  local how, most = '~', UNDELIVERED_MAX
  if dropped > 0 then how, most = '=', math.min(all - dropped + 1, UNDELIVERED_MAX) end
  redis.call('XADD', stream, 'MAXLEN', how, text(most), '*', ENTRY.bytes_before, text(before), ...)
end

-- Publishes a message: a task for each subscriber of its topic. A message without subscribers is kept for agents that
-- appear later. Returns the number of agents that get it. The relay carries a topic `@…` out of the partition first.
local function publish_message(base, id, topic, key, data, context, sender, from_task, from_run)
  if string.sub(topic, 1, 1) == '@' then
    redis.call('XADD', base .. 'asks', '*', 'publish', id, 'topic', string.sub(topic, 2), 'key', key, ENTRY.data, data,
      ENTRY.context, context, 'sender', sender)
    return 0
  end
  local agents, heard = subscribers(base, topic, key, sender)
  for _, agent in ipairs(agents) do
    send_detached(base, task_of_message(id, agent, key), agent, key, data, context, from_task, from_run)
  end
  if not heard then
    keep_undelivered(base, 'id', id, 'topic', topic, 'key', key, ENTRY.data, data, ENTRY.context, context, 'sender',
      sender)
  end
  return #agents
end
