-- Messages to a running task, which its runs take by name with `ctx.receive`. They are fields of the task's hash, so they
-- end with the task.

local INBOX_MAX, INBOX_BYTES = 100, 262144

local function unpacked_list(key, field)
  local packed = redis.call('HGET', key, field)
  return packed and cmsgpack.unpack(packed) or {}
end

local function put_list(key, field, list)
  if #list == 0 then redis.call('HDEL', key, field) else redis.call('HSET', key, field, cmsgpack.pack(list)) end
end

-- The number of messages that the task has not received, and their bytes.
local function size_of_inbox(key)
  local count, bytes = string.match(redis.call('HGET', key, TASK.inbox_size) or '', '^(%d+) (%d+)$')
  return tonumber(count or '0'), tonumber(bytes or '0')
end

-- Takes the oldest message of a name out of the task's inbox; nil if there is none.
local function take_message(base, task, name)
  local key = base .. 'task:' .. task
  local list = unpacked_list(key, TASK.inbox .. name)
  local value = table.remove(list, 1)
  if not value then return nil end
  local count, bytes = size_of_inbox(key)
  put_list(key, TASK.inbox .. name, list)
  redis.call('HSET', key, TASK.inbox_size, text(count - 1) .. ' ' .. text(bytes - #value))
  return value
end

-- Keeps a message until a run receives it. Returns why it cannot, or nil.
local function keep_message(base, task, name, value)
  local key = base .. 'task:' .. task
  local count, bytes = size_of_inbox(key)
  if count >= INBOX_MAX then return 'already keeps ' .. text(count) .. ' messages that it has not received' end
  if bytes + #value > INBOX_BYTES then
    return 'would keep more than ' .. text(INBOX_BYTES) .. ' bytes of messages that it has not received'
  end
  local list = unpacked_list(key, TASK.inbox .. name)
  list[#list + 1] = value
  put_list(key, TASK.inbox .. name, list)
  redis.call('HSET', key, TASK.inbox_size, text(count + 1) .. ' ' .. text(bytes + #value))
  return nil
end

-- The run and the step that get the next message of a name, or nil; and the list without those before them, which have
-- ended. One copy, not one `table.remove` each: a turn may leave thousands of them.
local function next_receiver(base, task, name)
  local list, first = unpacked_list(base .. 'task:' .. task, TASK.receivers .. name), 1
  while list[first] do
    if redis.call('HEXISTS', run_key(base, task, list[first]), RUN.missing .. list[first + 1]) == 1 then break end
    first = first + 2
  end
  if first == 1 then return list[1], list[2], list end
  local left = {}
  for i = first, #list do left[#left + 1] = list[i] end
  return left[1], left[2], left
end

-- Steps wait for the next messages of a name. They get messages in the order in which they began to wait. All steps of
-- a turn at once: the list is unpacked and packed as a whole.
local function add_receivers(base, task, run, name, steps)
  local _, _, list = next_receiver(base, task, name)
  for _, step in ipairs(steps) do
    list[#list + 1] = run
    list[#list + 1] = step
  end
  put_list(base .. 'task:' .. task, TASK.receivers .. name, list)
end
