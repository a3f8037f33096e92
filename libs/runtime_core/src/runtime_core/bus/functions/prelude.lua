-- What the functions share. `base` is `<namespace>:{<partition>}:`, the first and only declared key of every
-- function: all keys of a partition share its slot.
--
-- A run's fields live in one hash (the task's own hash for its first run `r`):
--   cur        entry id in flight · `held` (waits for steps) · `mail` (in a mailbox) · `retry` · `nest` · `pend` · `park`
--   h          stream, agent, key, reply, created ms, max steps, event id, source, digest, session: one line each
--   d          the input        u   number of turns committed        fl  flags: o out stream, c child runs, z timers, l dead letters
--   m:<step>   a step without a result: digest (8), kind (1), wait      j:<step>  its result: digest (8), status (1), ms (13), payload
--   lt         number of its dead letters, which pin the ended task
--   w          journaled steps whose rows no commit has written to the record yet
--   q:<step>   a question: when it was asked (ms) and its event's data
--   s0         the instance's state as it was when this (nested) run began
--   ov, o:<step>  the instance's state after a nested run: not yet tied to a step, and from this step on
--   g<n>       how many steps of a group still lack a result          k:<run>   a child run; the value is its instance, if it has one
-- A key's instance lives in `inst:<agent>/<key>`: busy (stack of task|run, newest last), state, ws (state in mid-run).

local GROUPS = {agent = 'agent-handler', tool = 'tool-handler', ray = 'ray-gateway', spark = 'spark-gateway'}
local REPLY_MAX = '100000'
local ENDED = {completed = true, failed = true, cancelled = true}


local function group_of(stream)
  return GROUPS[stream] or GROUPS[string.match(stream, '^[a-z]+')]
end

local function now_ms(base)
  local t = redis.call('TIME')
  local ms = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  local offset = redis.call('HGET', base .. 'meta', 'offset')
  if offset then ms = ms + tonumber(offset) end
  return ms
end

local function text(n) return string.format('%.0f', n) end

local function ms_of(entry) return string.match(entry, '^(%d+)') end

local function run_key(base, task, run)
  if run == 'r' then return base .. 'task:' .. task end
  return base .. 'run:' .. task .. '/' .. run
end

local function parent_of(run) return string.match(run, '^(.*)/([^/]*)$') end

local function lines(s)
  local out = {}
  for line in string.gmatch(s .. '\n', '(.-)\n') do out[#out + 1] = line end
  return out
end

-- Stream, agent and key: the first three lines of a run's header, without splitting the rest.
local function target_of(h) return string.match(h, '^([^\n]*)\n([^\n]*)\n([^\n]*)') end

local function quote(s)
  return cjson.encode(tostring(s))
end

local function error_json(kind, message)
  return '{"type":' .. quote(kind) .. ',"message":' .. quote(message) .. '}'
end

local function mailbox_full(agent, key)
  return error_json('MailboxFull', 'the mailbox of ' .. agent .. '/' .. key .. ' is full')
end

-- Acknowledges and deletes: a work stream holds only work that is not done.
local function settle(base, stream, entry)
  local key = base .. stream
  local acked = redis.call('XACK', key, group_of(stream), entry)
  redis.call('XDEL', key, entry)
  return acked
end

local function append_start(base, task, run, stream, agent, key, data, context)
  local header = '1\nstart\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. key .. '\n1\n0'
  if context and context ~= '' then
    return redis.call('XADD', base .. stream, '*', 'h', header, 'd', data, 'x', context)
  end
  return redis.call('XADD', base .. stream, '*', 'h', header, 'd', data)
end

local function append_resume(base, task, run, stream, agent, key, turn, step, value)
  local header = '1\nresume\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. key .. '\n1\n' .. turn
  return redis.call('XADD', base .. stream, '*', 'h', header, 's', step, 'd', value)
end

-- Does `holder` (task|run) wait for `run`? Run ids are paths, so the call chain can be read from them.
local function waits_for(holder, task, run)
  local held_task, held_run = string.match(holder, '^(.*)|([^|]*)$')
  return held_task == task and string.sub(run, 1, #held_run + 1) == held_run .. '/'
end

local function top_of(busy) return string.match(busy, '([^\n]*)$') end

-- Appends the start event of a run whose fields are already stored, and makes it the holder of its instance.
local function start_stored(base, inst, task, run, busy)
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', rk, 'h', 'd', 'x')
  local stream, agent, instance_key = target_of(v[1])
  local entry = append_start(base, task, run, stream, agent, instance_key, v[2], v[3])
  redis.call('HSET', rk, 'cur', entry)
  local ref = task .. '|' .. run
  if busy and busy ~= '' then ref = busy .. '\n' .. ref end
  redis.call('HSET', base .. 'inst:' .. inst, 'busy', ref)
  return entry
end

-- A nested run begins with the state that the run below it has made so far, and is replayed from there.
local function keep_snapshot(base, inst, task, run)
  local s = redis.call('HMGET', base .. 'inst:' .. inst, 'ws', 'state')
  redis.call('HSET', run_key(base, task, run), 's0', s[1] or s[2] or '')
end

local function startable(base, ref)
  local task, run = string.match(ref, '^(.*)|([^|]*)$')
  -- pcall: where another program has put something else in the task's place, only that task is lost.
  local status = redis.pcall('HGET', base .. 'task:' .. task, 'status')
  if type(status) ~= 'string' or ENDED[status] then return nil end
  local cur = redis.pcall('HGET', run_key(base, task, run), 'cur')
  if cur ~= 'mail' and cur ~= 'nest' then return nil end
  return task, run
end

-- The instance's newest run waits: a nested call that came in meanwhile may start on top of it.
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

-- The run that holds the instance is over: the run below it goes on, or the next event of the mailbox starts.
local function release(base, inst, task, run)
  local key = base .. 'inst:' .. inst
  local busy = redis.call('HGET', key, 'busy')
  if not busy then return end
  local ref = task .. '|' .. run
  if top_of(busy) ~= ref then
    -- An ended run in the middle of the stack: only its own place goes.
    local kept = {}
    for _, line in ipairs(lines(busy)) do
      if line ~= ref then kept[#kept + 1] = line end
    end
    redis.call('HSET', key, 'busy', table.concat(kept, '\n'))
    return
  end
  local rest = string.match(busy, '^(.*)\n[^\n]*$')
  if rest then
    redis.call('HSET', key, 'busy', rest)
    if start_nested(base, inst, rest) then return end
    local below_task, below_run = string.match(top_of(rest), '^(.*)|([^|]*)$')
    local rk = run_key(base, below_task, below_run)
    local v = redis.call('HMGET', rk, 'cur', 'h', 'u')
    if v[1] == 'pend' then
      local stream, agent, instance_key = target_of(v[2])
      local entry = append_resume(base, below_task, below_run, stream, agent, instance_key, v[3] or '0', '', '')
      redis.call('HSET', rk, 'cur', entry)
    end
    return
  end
  local ws = redis.call('HGET', key, 'ws')
  if ws then redis.call('HDEL', key, 'ws') end
  for _, list in ipairs({'nest:', 'mail:'}) do
    for _ = 1, 50 do
      local next_ref = redis.call('LPOP', base .. list .. inst)
      if not next_ref then break end
      local next_task, next_run = startable(base, next_ref)
      if next_task then
        start_stored(base, inst, next_task, next_run, '')
        return
      end
    end
  end
  if redis.call('LLEN', base .. 'mail:' .. inst) > 0 then
    -- More than 50 ended tasks stood in the line: the next look goes on from here. Until then the instance is held by
    -- nobody's run, so that no new event overtakes what is left of the line.
    redis.call('HSET', key, 'busy', '|')
    redis.call('ZADD', base .. 'timers', 0, 'i|' .. inst)
    return
  end
  redis.call('HDEL', key, 'busy')
end

-- Delivers a run to its agent: at once, as a nested call, or through the instance's mailbox. The caller stores
-- `cur` (the value returned) with the run's other fields. `bounded`: nil, and nothing written, where the mailbox is full.
local function deliver(base, task, run, stream, agent, key, data, context, bounded)
  if key == '' then return append_start(base, task, run, stream, agent, key, data, context) end
  local inst = agent .. '/' .. key
  local ik = base .. 'inst:' .. inst
  local busy = redis.call('HGET', ik, 'busy')
  local ref = task .. '|' .. run
  if not busy then
    redis.call('HSET', ik, 'busy', ref)
    return append_start(base, task, run, stream, agent, key, data, context)
  end
  for _, holder in ipairs(lines(busy)) do
    if waits_for(holder, task, run) then
      local top = top_of(busy)
      local top_task, top_run = string.match(top, '^(.*)|([^|]*)$')
      if redis.call('HGET', run_key(base, top_task, top_run), 'cur') == 'held' then
        redis.call('HSET', ik, 'busy', busy .. '\n' .. ref)
        keep_snapshot(base, inst, task, run)
        return append_start(base, task, run, stream, agent, key, data, context)
      end
      redis.call('RPUSH', base .. 'nest:' .. inst, ref)
      return 'nest'
    end
  end
  if bounded then
    local waiting = redis.call('LLEN', base .. 'mail:' .. inst)
    if waiting > 0 and waiting >= tonumber(redis.call('HGET', base .. 'meta', 'mailbox_max') or '10000') then return nil end
  end
  redis.call('RPUSH', base .. 'mail:' .. inst, ref)
  return 'mail'
end

-- The run goes on: unless a nested run is in flight on its instance, which then wakes it at its end.
local function resume(base, task, run, stream, agent, key, turn, step, value)
  if key ~= '' then
    local busy = redis.call('HGET', base .. 'inst:' .. agent .. '/' .. key, 'busy')
    if busy and top_of(busy) ~= task .. '|' .. run then return 'pend' end
  end
  return append_resume(base, task, run, stream, agent, key, turn, step, value)
end

-- A nested run has changed the instance's state: the run below sees the change from the step on whose result came
-- after it, live and replayed. Returns the turn for the resume: one that no warm run has, so that it is replayed.
local function keep_override(rk, key, turn, step)
  if key == '' then return turn end
  local override = redis.call('HGET', rk, 'ov')
  if not override then return turn end
  redis.call('HSET', rk, 'o:' .. step, override)
  redis.call('HDEL', rk, 'ov')
  return '-1'
end

-- Writes a step's result and, where that lets a branch of the run go on, appends one resume.
-- Returns false where the step is not missing (any more): nothing was written.
local function answer(base, task, run, step, status, ms, payload)
  local rk = run_key(base, task, run)
  local field = 'm:' .. step
  local v = redis.call('HMGET', rk, field, 'cur', 'h', 'u')
  if not v[1] then return false end
  local wait = string.sub(v[1], 10)
  local value = string.sub(v[1], 1, 8) .. status .. ms .. payload
  redis.call('HDEL', rk, field)
  local stream, agent, key = target_of(v[3])
  local turn = keep_override(rk, key, v[4] or '0', step)
  if v[2] == 'held' then
    local ready = wait == '!'
    if not ready and wait ~= '0' then ready = redis.call('HINCRBY', rk, wait, -1) <= 0 end
    if ready then
      redis.call('HSET', rk, 'j:' .. step, value, 'cur',
        resume(base, task, run, stream, agent, key, turn, step, value))
      return true
    end
  end
  redis.call('HSET', rk, 'j:' .. step, value)
  return true
end

-- The record's row of a step that the broker itself answered: a sleep, or a question.
local function record_answer(base, task, run, step, asked, ended, status, payload)
  local question = redis.call('HGET', run_key(base, task, run), 'q:' .. step)
  local row = '[{"run":' .. quote(run) .. ',"kind":"' .. (question and 'human' or 'timer') .. '","name":"' ..
    (question and 'human' or 'sleep') .. '","status":"' .. (status == 'K' and 'completed' or 'failed') ..
    '","started":' .. asked .. ',"ended":' .. ended .. ',"step":' .. quote(step) ..
    (question and (',"input":' .. string.sub(question, 14)) or '') ..
    (status == 'K' and ',"output":' or ',"error":') .. payload .. '}]'
  redis.call('HINCRBY', base .. 'task:' .. task, 'steps', 1)
  redis.call('XADD', base .. 'record', '*', 't', task, 'd', row)
end

local function stop_running(base, task, ms)
  local key = base .. 'stopped'
  redis.call('ZADD', key, ms, task)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. text(tonumber(ms) - 600000))
end

-- Asks an instance that lives in another partition: the leader of this one starts a task there, in order, whose id
-- makes a repeat start nothing; its end comes back as the step's result. `place` is `@<partition>:<task>`.
local function ask_elsewhere(base, place, agent, key, data, context, back)
  redis.call('XADD', base .. 'asks', '*', 'place', place, 'agent', agent, 'key', key, 'd', data, 'x', context, 'back', back)
end

-- Frees what an ended task holds: child runs, their instances, timers. Work in flight is freed by its own
-- late commit or by its adopter, since two turns must never be at once on one instance.
local function free_children(base, task, fields)
  for i = 1, #fields, 2 do
    local child = string.match(fields[i], '^k:(.*)$')
    if child and string.sub(fields[i + 1], 1, 1) == '@' then
      redis.call('XADD', base .. 'asks', '*', 'place', fields[i + 1], 'cancel', task)
    elseif child then
      local rk = run_key(base, task, child)
      local cur = redis.call('HGET', rk, 'cur')
      redis.call('DEL', rk)
      if fields[i + 1] ~= '' and (cur == 'held' or cur == 'retry' or cur == 'park' or cur == 'pend') then
        release(base, fields[i + 1], task, child)
      end
    end
    if string.sub(fields[i], 1, 2) == 'z:' then
      redis.call('ZREM', base .. 'timers', string.sub(fields[i], 3))
      redis.call('HDEL', base .. 'delayed', string.sub(fields[i], 3))
    end
  end
end

local KINDS = {completed = 'weft.task.completed', failed = 'weft.task.failed', cancelled = 'weft.task.cancelled'}

local function publish_out(base, task, kind, data, retention)
  local key = base .. 'out:' .. task
  redis.call('XADD', key, '*', 'type', kind, 'source', 'weft', 'taskid', task, 'data', data)
  if retention then redis.call('EXPIRE', key, retention) end
end

local function publish_delta(base, task, run, attempt, seq, value)
  local name = string.sub(value, 1, 1) == '"' and 'text' or 'value'
  publish_out(base, task, 'weft.output.delta', '{"task_id":' .. quote(task) .. ',"run_id":' .. quote(run) ..
    ',"attempt":' .. attempt .. ',"seq":' .. seq .. ',"' .. name .. '":' .. value .. '}')
end

local HEADER = '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)'

-- A task's header in parts, by name.
local function header_of(h)
  local head = {}
  head.stream, head.agent, head.key, head.to, head.created, head.max_steps, head.id, head.source, head.digest, head.session =
    string.match(h, HEADER)
  return head
end

-- A question is on the task's stream, where any client finds it, and on the stream that the user named.
local function tell_question(base, task, h, data)
  publish_out(base, task, 'weft.human.requested', data)
  local to = string.match(h, '^[^\n]*\n[^\n]*\n[^\n]*\n([^\n]*)')
  if to ~= '' and string.sub(to, 1, 1) ~= '@' and string.sub(to, 1, #base + 6) ~= base .. 'reply:' then
    redis.call('XADD', base .. 'replies', '*', 'to', to, 'type', 'weft.human.requested', 't', task, 'd', data)
  end
end

-- Ends a task: final event, reply, record, expiry. `ending` is what `check_end` has read; `result` is JSON: the
-- output, or the error object. `keep` leaves the journal with the task, for a dead letter that may be driven again.
local function end_task(base, task, ending, flags, status, result, steps, ms, record, keep, run_in_flight)
  local key = base .. 'task:' .. task
  local head = ending.head
  local body = status == 'completed' and ',"output":' or ',"error":'
  local final = '{"task_id":"' .. task .. '","status":"' .. status .. '"' .. body .. result ..
    ',"usage":{},"steps":' .. steps .. ',"trajectory":"' .. task .. '"}'
  if flags ~= '' then free_children(base, task, redis.call('HGETALL', key)) end
  if keep or string.find(flags, 'l', 1, true) then
    redis.call('HSET', key, 'status', status, 'out', final, 'ended', ms, 'steps', steps)
    redis.call('PERSIST', key)
  else
    redis.call('DEL', key)
    -- What a finished task costs until it expires counts: where its reply went is no longer of use.
    local h = head.stream .. '\n' .. head.agent .. '\n' .. head.key .. '\n\n' .. head.created .. '\n' .. head.max_steps ..
      '\n' .. head.id .. '\n' .. head.source .. '\n' .. head.digest .. '\n' .. head.session
    redis.call('HSET', key, 'status', status, 'h', h, 'out', final, 'ended', ms)
    redis.call('EXPIRE', key, ending.retention)
  end
  local to = head.to
  if to ~= '' then
    if string.sub(to, 1, #base + 6) == base .. 'reply:' then
      redis.call('XADD', to, 'NOMKSTREAM', 'MAXLEN', '~', REPLY_MAX, '*', 't', task, 'd', final)
    else
      redis.call('XADD', base .. 'replies', '*', 'to', to, 'type', KINDS[status], 't', task, 'd', final, 'id', head.id)
    end
  end
  if string.find(flags, 'o', 1, true) then publish_out(base, task, KINDS[status], final, ending.retention) end
  if ending.seen then
    redis.call('HSET', base .. 'seen', head.source .. '\n' .. head.id, task .. '\n' .. head.digest .. '\n' .. status)
  end
  redis.call('XADD', base .. 'record', '*', 't', task, 'd', record, 'e',
    status .. '\n' .. head.agent .. '\n' .. steps .. '\n' .. head.created .. '\n' .. ms .. '\n' .. head.session,
    'f', status == 'completed' and '' or result)
  if status ~= 'completed' then stop_running(base, task, ms) end
  if head.key ~= '' and not run_in_flight then release(base, head.agent .. '/' .. head.key, task, 'r') end
end

-- Ends a run that is not the task's first: its parent's step gets the result.
local function end_child(base, task, run, inst, status, ms, payload)
  local parent, step = parent_of(run)
  redis.call('DEL', run_key(base, task, run))
  redis.call('HDEL', base .. 'task:' .. task, 'k:' .. run)
  answer(base, task, parent, step, status, ms, payload)
  if inst ~= '' then release(base, inst, task, run) end
end

-- What a commit of work whose task or run is over leaves behind: the delivery settled, the instance free.
local function settle_late(base, stream, entry, inst, task, run)
  settle(base, stream, entry)
  if inst ~= '' then
    local busy = redis.call('HGET', base .. 'inst:' .. inst, 'busy')
    if busy then
      local status = redis.call('HGET', base .. 'task:' .. task, 'status')
      local cur = redis.call('HGET', run_key(base, task, run), 'cur')
      if not status or ENDED[status] or not cur or cur == entry then release(base, inst, task, run) end
    end
  end
end

local function flag(flags, letter)
  if string.find(flags, letter, 1, true) then return flags end
  return flags .. letter
end

-- A dead letter of a task is gone. Returns whether another one pins the task still.
local function unpin(key, flags)
  if redis.call('HINCRBY', key, 'lt', -1) > 0 then return true end
  redis.call('HDEL', key, 'lt')
  if string.find(flags, 'l', 1, true) then redis.call('HSET', key, 'fl', (string.gsub(flags, 'l', ''))) end
  return false
end

-- A timer is listed with its task, so that the task's end removes it.
local function add_timer(base, task, member, due, asked)
  local key = base .. 'task:' .. task
  redis.call('ZADD', base .. 'timers', text(due), member)
  redis.call('HSET', key, 'z:' .. member, asked or '', 'fl', flag(redis.call('HGET', key, 'fl') or '', 'z'))
end

-- Stream keys that a function is about to write must be streams: XLEN raises before anything is written.
local function check_streams(base, names)
  for _, name in ipairs(names) do redis.call('XLEN', base .. name) end
end

-- A message that nobody waits for becomes a task of its own; its id derives from the step that sent it, so that
-- a repeated commit starts nothing twice.
local function send_detached(base, task, agent, key, data, from_task, from_run)
  if string.sub(agent, 1, 1) == '@' then
    local place, name = string.match(agent, '^(@%d+):(.*)$')
    ask_elsewhere(base, place .. ':' .. task, name, key, data, '', '')
    return
  end
  local stream = redis.call('HGET', base .. 'agents', agent)
  if not stream then
    redis.call('XADD', base .. 'dead', '*', 'reason', 'unknown_name', 'stream', 'agent', 'group', GROUPS.agent,
      'time', text(now_ms(base)), 'taskid', from_task, 'runid', from_run, 'name', agent,
      'error', error_json('UnknownName', 'no agent is named ' .. agent), 'errors', '[]', 'd', data)
    return
  end
  local tk = base .. 'task:' .. task
  if redis.call('EXISTS', tk) == 1 then return end
  local entry = deliver(base, task, 'r', stream, agent, key, data, '', true)
  local created = entry and string.find(entry, '-', 1, true) and ms_of(entry) or text(now_ms(base))
  local h = stream .. '\n' .. agent .. '\n' .. key .. '\n\n' .. created .. '\n0\n' .. task .. '\n' ..
    from_task .. '/' .. from_run .. '\n\n'
  redis.call('ZADD', base .. 'index', created, task)
  if entry then
    redis.call('HSET', tk, 'status', 'accepted', 'cur', entry, 'd', data, 'h', h)
  else
    local ending = {h = h, head = header_of(h), retention = redis.call('HGET', base .. 'meta', 'retention') or '3600'}
    end_task(base, task, ending, '', 'failed', mailbox_full(agent, key), '0', created, '[]', false, true)
  end
end
