-- Ends of tasks and runs: the final event, the reply, the record, and the release of their instances.

-- Notes a task that ended early, so that heartbeats inform its handlers. Uses the server's own clock, like heartbeats:
-- the clock of the process that ended it may be behind.
local function stop_running(base, task)
  local key = base .. 'stopped'
  local ms = server_ms()
  redis.call('ZADD', key, text(ms), task)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. text(ms - 600000))
end

-- The digests of the steps that wait for a task's open child runs, by run; '' if none waits.
local function digests_of_children(base, task, fields)
  local digests = {}
  for i = 1, #fields, 2 do
    local child = child_of(fields[i])
    if child then
      local run, step = parent_of(child)
      digests[child] = digest_of(redis.call('HGET', run_key(base, task, run), RUN.missing .. step) or '')
    end
  end
  return digests
end

-- Frees a child run and its instance. `digest` is that of the step that waits for it, if its journal may be kept.
local function free_child(base, task, child, inst, digest)
  local rk = run_key(base, task, child)
  local cur = redis.call('HGET', rk, RUN.current)
  -- Nobody requests a run again if nobody waits for it.
  local kept = digest and digest ~= '' and keep_child(base, task, child, digest)
  if not kept then redis.call('DEL', rk) end
  if inst ~= '' and (cur == 'held' or cur == 'retry' or cur == 'park' or cur == 'pend' or cur == 'slot') then
    release(base, inst, task, child)
  end
end

-- Frees everything that an ended task holds: child runs, their instances, timers. Its late commit or its next owner frees
-- work in flight, since two turns must never run at once on one instance. `reopens`: the task may be reopened, so the
-- journals of its child runs stay.
local function free_children(base, task, fields, reopens)
  local listed, digests = false, reopens and digests_of_children(base, task, fields) or {}
  for i = 1, #fields, 2 do
    local child, inst = child_of(fields[i]), fields[i + 1]
    if child and string.sub(inst, 1, 1) == '@' then
      local run, step = parent_of(child)
      redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)
      cancel_elsewhere(base, inst, task)
    elseif child then
      if inst ~= '' and not listed then
        listed = true
        redis.pcall('DEL', base .. 'line:' .. task)
      end
      free_child(base, task, child, inst, digests[child])
    end
    if reopens then end_kept_child(base, task, fields[i]) else drop_kept_child(base, task, fields[i]) end
    if string.sub(fields[i], 1, 2) == TASK.timer then
      redis.call('ZREM', base .. 'timers', string.sub(fields[i], 3))
      redis.call('HDEL', base .. 'delayed', string.sub(fields[i], 3))
    end
  end
end

-- Keeps the fields that an ended task still needs. `pinned` by a dead letter it keeps its journal, else its hash is
-- rewritten.
local function store_end(key, ending, pinned, status, final, ms, steps)
  local head = ending.head
  if pinned then
    redis.call('HSET', key, 'status', status, TASK.final, final, 'ended', ms, 'steps', steps, TASK.own_row,
      ending.row and '1' or '0')
    redis.call('HDEL', key, TASK.reserved, RUN.unrecorded)
    redis.call('PERSIST', key)
    return
  end
  redis.call('DEL', key)
  -- An ended task costs memory until it expires, and no longer needs the address of its reply.
  local header = head.stream .. '\n' .. head.agent .. '\n' .. head.key .. '\n\n' .. head.created .. '\n' ..
    head.max_steps .. '\n' .. head.id .. '\n' .. head.source .. '\n' .. head.digest .. '\n' .. head.session
  if head.tenant ~= '' then header = header .. '\n' .. head.tenant end
  redis.call('HSET', key, 'status', status, RUN.header, header, TASK.final, final, 'ended', ms,
    'steps', steps)
  redis.call('EXPIRE', key, ending.retention)
end

-- Sends the final event to the stream that waits for the reply: a client's own stream, or the relay's.
local function reply_end(base, task, ending, status, final)
  local to = ending.head.to
  if to == '' then return end
  if is_client(base, to) then
    -- pcall: a client whose stream another program has replaced reads no answers, and the task ends all the same.
    redis.pcall('XADD', to, 'NOMKSTREAM', 'MAXLEN', '~', KEPT.replies, '*', REPLY.task, task, REPLY.data, final)
    return
  end
  local fields = {'to', to, 'type', KINDS[status], REPLY.task, task, REPLY.data, final, 'id', ending.head.id}
  if ending.trace then fields[11], fields[12] = REPLY.trace, ending.trace end
  if ending.by then
    fields[#fields + 1] = REPLY.answered_by
    fields[#fields + 1] = ending.by
  end
  redis.call('XADD', base .. 'replies', '*', unpack(fields))
end

-- The last entry of the task on the record stream.
local function record_end(base, task, ending, flags, status, result, steps, ms, record)
  local head = ending.head
  local ended = {RECORD.task, task, RECORD.rows, record, RECORD.ending,
    status .. '\n' .. head.agent .. '\n' .. steps .. '\n' .. head.created .. '\n' .. ms .. '\n' .. head.session,
    RECORD.error, status == 'completed' and '' or result}
  if ending.trace then ended[9], ended[10] = RECORD.trace, ending.trace end
  if string.find(flags, FLAG.reopened, 1, true) then
    ended[#ended + 1] = RECORD.reopened
    ended[#ended + 1] = '1'
  end
  redis.call('XADD', base .. 'record', '*', unpack(ended))
end

-- Repeats of the submit learn how its task ended. If the line is new, it had left the dedupe window, so it is removed
-- again. pcall: if another program stores something else there, only the answers to repeats are lost.
local function note_end(base, task, head, status)
  local field = seen_line(head.source, head.id)
  if redis.pcall('HSET', base .. 'seen', field, task .. '\n' .. head.digest .. '\n' .. status) == 1 then
    redis.pcall('HDEL', base .. 'seen', field)
  end
end

-- Ends a task: final event, reply, record, expiry. `ending` comes from `check_end`; `result` is JSON: the
-- output, or the error object. `keep` leaves the journal with the task, for a dead letter that may be redriven.
local function end_task(base, task, ending, flags, status, result, steps, ms, record, keep, run_in_flight)
  local key, head = base .. 'task:' .. task, ending.head
  local fields = flags ~= '' and (ending.fields or redis.call('HGETALL', key))
  if fields or ending.unwritten then
    local rows, more = unwritten_of_task(base, task, ending.unwritten, fields)
    record, steps = with_rows(record, rows), text(tonumber(steps) + more)
  end
  local body = status == 'completed' and ',"output":' or ',"error":'
  local usage = string.find(flags, FLAG.usage, 1, true) and redis.call('HGET', key, TASK.usage) or '{}'
  local final = '{"task_id":"' .. task .. '","status":"' .. status .. '"' .. body .. result ..
    ',"usage":' .. usage .. ',"steps":' .. steps .. ',"trajectory":"' .. task .. '"}'
  -- The completed run of an instance is not reopened: it has written its state.
  local reopens = (keep or string.find(flags, FLAG.letters, 1, true)) and (status ~= 'completed' or head.key == '')
  -- First, since `check_end` may not have looked at the record.
  record_end(base, task, ending, flags, status, result, steps, ms, record)
  if fields then free_children(base, task, fields, reopens) end
  store_end(key, ending, keep or string.find(flags, FLAG.letters, 1, true), status, final, ms, steps)
  redis.pcall('ZREM', base .. 'open', task)
  if head.tenant ~= '' then redis.pcall('ZREM', base .. 'open:' .. head.tenant, task) end
  reply_end(base, task, ending, status, final)
  if string.find(flags, FLAG.output, 1, true) then
    tell_steps(base, task, flags, record)
    publish_out(base, task, KINDS[status], final, ending.retention, ending.trace)
  end
  if head.digest ~= '' and head.source ~= '' then note_end(base, task, head, status) end
  if string.find(flags, FLAG.watched, 1, true) then tell_state(base, 'run/' .. task .. '/r', status) end
  if status ~= 'completed' then stop_running(base, task) end
  if head.key ~= '' and not run_in_flight then release(base, head.agent .. '/' .. head.key, task, FIRST_RUN) end
  if ending.hooks then start_hooks_of_end(base, task, ending, status, result, ms) end
  SLOT.free_flagged(base, flags, task, FIRST_RUN, true)
end

-- Ends a run that is not the task's first: its parent's step gets the result.
local function end_child(base, task, run, inst, status, ms, payload)
  local parent, step = parent_of(run)
  local key = base .. 'task:' .. task
  local flags, kept = redis.call('HGET', key, TASK.flags) or '', false
  -- A dead letter of a run below may have failed this one. If that letter reopens the task, this run continues from its
  -- journal.
  if status == RESULT.error and string.find(flags, FLAG.letters, 1, true) then
    local digest = digest_of(redis.call('HGET', run_key(base, task, parent), RUN.missing .. step) or '')
    kept = digest ~= '' and keep_child(base, task, run, digest, true)
  end
  if not kept then redis.call('DEL', run_key(base, task, run)) end
  redis.call('HDEL', key, TASK.child .. run)
  answer(base, task, parent, step, status, ms, payload)
  if string.find(flags, FLAG.reserved, 1, true) then
    local held = redis.call('HGET', key, TASK.reserved)
    if held then give_back(key, held, run .. '|') end
  end
  if string.find(flags, FLAG.watched, 1, true) then
    -- pcall: not every caller has checked this stream; a wait also reads the run itself.
    redis.pcall('XADD', base .. 'states', 'MAXLEN', '~', KEPT.states, '*', STATE.name, 'run/' .. task .. '/' .. run,
      STATE.status, status == RESULT.ok and 'completed' or 'failed')
  end
  if inst ~= '' then release(base, inst, task, run) end
  SLOT.free_flagged(base, flags, task, run, true)
end

-- Settles the delivery of a commit whose task or run is over, and frees its instance.
local function settle_late(base, stream, entry, inst, task, run)
  settle(base, stream, entry)
  if inst ~= '' then
    local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
    if busy then
      local status = redis.call('HGET', base .. 'task:' .. task, 'status')
      local cur = redis.call('HGET', run_key(base, task, run), RUN.current)
      -- A reopened run that waits for its instance cannot hold it: it is held from before the task ended.
      local waits = cur == 'mail' or cur == 'nest'
      if not status or ENDED[status] or not cur or cur == entry or waits then release(base, inst, task, run) end
    end
  end
end

-- Ends the task because it exceeds a limit, from one of its runs. `ending` comes from `check_end`, `inst` is the
-- instance that this run holds. A first run in flight releases its own instance later.
local function end_over_limit(base, task, run, inst, ending, flags, error, steps, ms, rows)
  local root_in_flight = run ~= FIRST_RUN and in_flight(redis.call('HGET', base .. 'task:' .. task, RUN.current))
  end_task(base, task, ending, flags, 'failed', error, steps, ms, rows, false, root_in_flight)
  if run ~= FIRST_RUN and inst ~= '' then release(base, inst, task, run) end
end
