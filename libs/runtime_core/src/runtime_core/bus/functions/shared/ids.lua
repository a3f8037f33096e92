-- Ids of runs, and values that are packed into one string: headers, holders, marks of missing steps, results.

-- A task's first run. Its fields are in the task's own hash.
local FIRST_RUN = 'r'

local function run_key(base, task, run)
  if run == FIRST_RUN then return base .. 'task:' .. task end
  return base .. 'run:' .. task .. '/' .. run
end

-- Reads fields of a task and of one of its runs: `count` names of task fields, then names of run fields. The first run
-- has one hash with its task, so one command reads them all.
local function read_run(base, task, run, count, ...)
  local key = base .. 'task:' .. task
  if run == FIRST_RUN then return unpack(redis.call('HMGET', key, ...)) end
  local names, last = {...}, select('#', ...)
  local values = redis.call('HMGET', key, unpack(names, 1, count))
  for i, value in ipairs(redis.call('HMGET', run_key(base, task, run), unpack(names, count + 1, last))) do
    values[count + i] = value
  end
  return unpack(values, 1, last)
end

-- The child run that a task's field names, or nil.
local CHILD = '^' .. TASK.child .. '(.*)$'
local function child_of(field) return string.match(field, CHILD) end

-- The parent run, and the step of it that started this run.
local function parent_of(run) return string.match(run, '^(.*)/([^/]*)$') end

-- Stream, agent and key: the first three lines of a run's header, without splitting the rest.
local function target_of(header) return string.match(header, '^([^\n]*)\n([^\n]*)\n([^\n]*)') end

local HEADER = '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n' ..
  '([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n?([^\n]*)\n?([^\n]*)'

-- A task's header in parts, by name.
local function header_of(header)
  local head = {}
  head.stream, head.agent, head.key, head.to, head.created, head.max_steps, head.id, head.source, head.digest,
    head.session, head.tenant, head.retention = string.match(header, HEADER)
  return head
end

-- A line of the dedupe window, such as a source and an id. Long ones are hashed, since only the number of lines is bounded.
-- Others contain a newline, so they never equal a hash.
local function seen_line(...)
  local line = table.concat({...}, '\n')
  return #line > 256 and redis.sha1hex(line) or line
end

-- Whether a task's reply goes to a client's own stream, and not to the relay.
local function is_client(base, to) return string.sub(to, 1, #base + 6) == base .. 'reply:' end

-- The limit on the task's steps, or 0: the sixth line.
local function max_steps_of(header)
  return tonumber(string.match(header, '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n(%d*)') or '0') or 0
end

-- Task and run of a holder, `task|run`.
local function split_ref(ref) return string.match(ref, '^(.*)|([^|]*)$') end

-- The newest holder of an instance.
local function top_of(busy) return string.match(busy, '([^\n]*)$') end

-- Who has the key of an instance. Runs also give it up while they wait: see `KEY.release` in `mailbox.lua`.
local KEY = {}

-- The holder that is nested on this one, or nil.
function KEY.above(holders, ref)
  return string.match('\n' .. holders .. '\n', '\n' .. string.gsub(ref, '%W', '%%%0') .. '\n([^\n]+)\n')
end

-- Whether a run is among the holders of an instance.
function KEY.has(holders, ref)
  return holders and string.find('\n' .. holders .. '\n', '\n' .. ref .. '\n', 1, true) ~= nil
end

-- Whether a run's `current` is an entry id, and not a word: its delivery is on a work stream.
local function in_flight(current) return current and string.find(current, '-', 1, true) end

-- Of a missing step: digest, kind and wait. Of a result: digest, status, time in ms and JSON.
local function digest_of(value) return string.sub(value, 1, 8) end
local function kind_of(missing) return string.sub(missing, 9, 9) end
local function wait_of(missing) return string.sub(missing, 10) end
local function status_of(result) return string.sub(result, 9, 9) end
local function ms_of_result(result) return string.sub(result, 10, 22) end
local function payload_of(result) return string.sub(result, 23) end

-- Of a question: when it was asked (ms), and its event's data.
local function asked_at(question) return string.sub(question, 1, 13) end
local function data_of(question) return string.sub(question, 14) end
