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

-- The run and the step that get the next message of a name, or nil; and the list, whose first entries may have ended.
local function next_receiver(base, task, name)
  local list = unpacked_list(base .. 'task:' .. task, TASK.receivers .. name)
  while list[1] do
    if redis.call('HEXISTS', run_key(base, task, list[1]), RUN.missing .. list[2]) == 1 then
      return list[1], list[2], list
    end
    table.remove(list, 1)
    table.remove(list, 1)
  end
  return nil, nil, list
end

-- A step waits for the next message of a name. Steps get messages in the order in which they began to wait.
local function add_receiver(base, task, run, step, name)
  local _, _, list = next_receiver(base, task, name)
  list[#list + 1] = run
  list[#list + 1] = step
  put_list(base .. 'task:' .. task, TASK.receivers .. name, list)
end
