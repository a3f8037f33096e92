-- What the functions share. `base` is `<namespace>:{<partition>}:`, the first and only declared key of every
-- function: all keys of a partition share its slot.
--
-- A run's fields live in one hash (the task's own hash for its first run `r`):
--   cur        entry id in flight · `held` (waits for steps) · `mail` (in a mailbox) · `retry` · `nest` · `pend` · `park`
--              · `queue` (waits for its tenant's turn, see queues.lua)
--   h          stream, agent, key, reply, created ms, max steps, event id, source, digest, session: one line each; then
--              the tenant, where it has a name
--   d          the input        u   number of turns committed, and of changes of its state by nested runs        fl  flags: o out stream, c child runs, z timers, l dead letters,
--                                                                     r steps on the out stream, u usage or limits, n somebody waits for its runs,
--                                                                     v model calls have reserved, t the context names a trace, e it has ended before,
--                                                                     k a letter of its first run's calls may reopen it
--   m:<step>   a step without a result: digest (8), kind (1), wait      j:<step>  its result: digest (8), status (1), ms (13), payload
--   lt         number of its dead letters, which pin the ended task     row  1 where its steps count the first run's own row
--   us, lim    what the task has used, and the most that it may use: JSON
--   b:<step>   how often a model call that has no result was begun
--   rs         what model calls under way have reserved: JSON, `<run>|<step>` to names and amounts
--   w          journaled steps whose rows no commit has written to the record yet: step, kind and name, with tabs between
--   ob         how many bytes the task has written to its output (the task's own hash)
--   by         entry and owner of the turn in which a process does steps by itself
--   q:<step>   a question: when it was asked (ms) and its event's data
--   s0         the instance's state as it was when this (nested) run began
--   l:<step>   traceparent of the span that gave the step its result
--   a          set once the run has asked in mid-turn: its turn stays in flight while it waits
--   ov, o:<step>  the instance's state after a nested run: not yet tied to a step, and from this step on
--   g<n>       how many steps of a group still lack a result          k:<run>   a child run; the value is its instance, if it has one
--   c:<run>    a child run that was open when the task ended, with the digest of the step that asked for it: its journal
--              waits for a reopened run to ask again
-- A key's instance lives in `inst:<agent>/<key>`: busy (stack of task|run, newest last), state, ws (state in mid-run).

local GROUPS = {agent = 'agent-handler', tool = 'tool-handler', ray = 'ray-gateway', spark = 'spark-gateway'}
local REPLY_MAX = '100000'
local UNHEARD_MAX = 1000
-- How many bytes of messages that nobody has heard a partition keeps; the newest message is kept whatever its size.
local UNHEARD_MAX_BYTES = 16 * 1024 * 1024
local ENDED = {completed = true, failed = true, cancelled = true}
-- Its functions are in `letters.lua`.
local dead = {}


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

-- `turn` is 0 for a run without a past. Another number makes its reader load the journal first.
local function append_start(base, task, run, stream, agent, key, data, context, turn)
  local header = '1\nstart\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. key .. '\n1\n' .. (turn or '0')
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

-- Does `holder` wait, through other partitions, for what this context belongs to? The relay notes in `~chain` who asked:
-- `<partition>:<task>|<run>`, one word each.
local function waits_through(base, holder, context)
  local chain = context and string.match(context, '"~chain":"([^"]*)"')
  if not chain then return false end
  local here = string.match(base, '{(%d+)}:$')
  for place, task, run in string.gmatch(chain, '(%d+):([^ |]*)|([^ |]*)') do
    if place == here and (holder == task .. '|' .. run or waits_for(holder, task, run)) then return true end
  end
  return false
end

-- What metrics count: tasks that have not ended, and how many runs wait in each mailbox. pcall: where another program
-- has put something else in these places, the figures are lost and nothing else.
local function count_start(base, task, created)
  redis.pcall('ZADD', base .. 'open', created, task)
  redis.pcall('HINCRBY', base .. 'meta', 'started', 1)
end

local function count_mail(base, inst, depth)
  if depth > 0 then redis.pcall('ZADD', base .. 'mailboxes', depth, inst) else redis.pcall('ZREM', base .. 'mailboxes', inst) end
end

local function top_of(busy) return string.match(busy, '([^\n]*)$') end

-- Child runs that wait in a mailbox are listed by task in `line:<task>` (run to instance), so that `circle` can
-- follow who waits for whom. pcall: where another program has put something else there, only that is lost.
local function enter_line(base, task, run, inst)
  if run ~= 'r' then redis.pcall('HSET', base .. 'line:' .. task, run, inst) end
end

local function leave_line(base, task, run)
  if run ~= 'r' then redis.pcall('HDEL', base .. 'line:' .. task, run) end
end

-- Does `run` wait for its descendant `child`, step by step, and does that one wait in a mailbox?
local function waits_in_line(base, task, run, child)
  if redis.pcall('HGET', run_key(base, task, child), 'cur') ~= 'mail' then return false end
  local at = child
  while at ~= run do
    local parent, step = parent_of(at)
    if not parent or redis.pcall('HEXISTS', run_key(base, task, parent), 'm:' .. step) ~= 1 then return false end
    at = parent
  end
  return true
end

-- Most holders that one request is followed through, and most waiting runs that are looked at for each.
local CIRCLE_LOOKS, CIRCLE_RUNS = 200, 500

-- Would a request that has to wait in the mailbox of `inst`, as the child `run`, wait for its own asker? Follows the
-- holders of the instance to the mailboxes in which their child runs wait, and so on. Returns nil, or the circle as
-- text. A circle closes with the last request to enter it, so that nobody else has to look. A call back into its own
-- instance waits for no more than the next commit or request of the holder.
local function circle(base, task, run, inst, busy)
  local asker = parent_of(run)
  local queue, seen, at, looks = {}, {}, 1, 0
  local function follow(holders, name, path)
    for _, holder in ipairs(lines(holders)) do
      if holder ~= '|' then
        queue[#queue + 1] = {holder, path .. name .. ' (task ' .. string.match(holder, '^(.*)|') .. ')'}
      end
    end
  end
  follow(busy, inst, '')
  while queue[at] and looks < CIRCLE_LOOKS do
    local holder, path = queue[at][1], queue[at][2]
    at = at + 1
    if not seen[holder] then
      seen[holder], looks = true, looks + 1
      local held_task, held_run = string.match(holder, '^(.*)|([^|]*)$')
      if held_task == task and (held_run == asker or string.sub(asker, 1, #held_run + 1) == held_run .. '/') then
        return path .. ', which waits for ' .. inst
      end
      local waiting = redis.pcall('HSCAN', base .. 'line:' .. held_task, '0', 'COUNT', CIRCLE_RUNS)
      for i = 1, type(waiting[2]) == 'table' and #waiting[2] or 0, 2 do
        local child, name = waiting[2][i], waiting[2][i + 1]
        if string.sub(child, 1, #held_run + 1) == held_run .. '/' and waits_in_line(base, held_task, held_run, child) then
          local holders = redis.pcall('HGET', base .. 'inst:' .. name, 'busy')
          if type(holders) == 'string' then follow(holders, name, path .. ', which waits for ') end
        end
      end
    end
  end
  return nil
end

local function deadlock(chain)
  return error_json('Deadlock', 'the request would wait for itself: it waits for ' .. chain ..
    '; ask in the same order everywhere, send without waiting, or catch this error and try later')
end

-- Appends the start event of a run whose fields are already stored, and makes it the holder of its instance.
local function start_stored(base, inst, task, run, busy)
  local rk = run_key(base, task, run)
  leave_line(base, task, run)
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
    local v = redis.call('HMGET', rk, 'cur', 'h')
    if v[1] == 'pend' then
      local stream, agent, instance_key = target_of(v[2])
      -- Turn -1, which no run in memory has: the nested run may have changed the state that this one sees.
      local entry = append_resume(base, below_task, below_run, stream, agent, instance_key, '-1', '', '')
      redis.call('HSET', rk, 'cur', entry)
    end
    return
  end
  local ws = redis.call('HGET', key, 'ws')
  if ws then redis.call('HDEL', key, 'ws') end
  local taken = false
  for _, list in ipairs({'nest:', 'mail:'}) do
    for _ = 1, 50 do
      local next_ref = redis.call('LPOP', base .. list .. inst)
      if not next_ref then break end
      taken = list == 'mail:'
      local next_task, next_run = startable(base, next_ref)
      if next_task then
        start_stored(base, inst, next_task, next_run, '')
        if taken then count_mail(base, inst, redis.call('LLEN', base .. 'mail:' .. inst)) end
        return
      end
    end
  end
  local left = redis.call('LLEN', base .. 'mail:' .. inst)
  if taken then count_mail(base, inst, left) end
  if left > 0 then
    -- More than 50 ended tasks stood in the line: the next look goes on from here. Until then the instance is held by
    -- nobody's run, so that no new event overtakes what is left of the line.
    redis.call('HSET', key, 'busy', '|')
    redis.call('ZADD', base .. 'timers', 0, 'i|' .. inst)
    return
  end
  redis.call('HDEL', key, 'busy')
end

-- Agents whose instances handle events beside each other.
local function interleaves(base, agent) return redis.call('HEXISTS', base .. 'interleaved', agent) == 1 end

-- Delivers a run to its agent: at once, as a nested call, or through the instance's mailbox. The caller stores
-- `cur` (the value returned) with the run's other fields. `bounded`: nil and an error (JSON), and nothing written, where
-- the mailbox is full, or where the request would wait for its own asker. `turn` is that of `append_start`; events with a
-- key need none, since their reader always loads the run.
local function deliver(base, task, run, stream, agent, key, data, context, bounded, turn)
  if key == '' then return append_start(base, task, run, stream, agent, key, data, context, turn) end
  local inst = agent .. '/' .. key
  local ik = base .. 'inst:' .. inst
  local busy = redis.call('HGET', ik, 'busy')
  local ref = task .. '|' .. run
  if not busy then
    redis.call('HSET', ik, 'busy', ref)
    return append_start(base, task, run, stream, agent, key, data, context)
  end
  if interleaves(base, agent) then
    redis.call('HSET', ik, 'busy', busy .. '\n' .. ref)
    keep_snapshot(base, inst, task, run)
    return append_start(base, task, run, stream, agent, key, data, context)
  end
  for _, holder in ipairs(lines(busy)) do
    if waits_for(holder, task, run) or waits_through(base, holder, context) then
      local top = top_of(busy)
      local top_task, top_run = string.match(top, '^(.*)|([^|]*)$')
      -- Holders that ask in mid-turn never suspend: they wait while their turn is in flight.
      local waiting = redis.call('HMGET', run_key(base, top_task, top_run), 'cur', 'a')
      if waiting[1] == 'held' or waiting[2] then
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
    if waiting > 0 and waiting >= tonumber(redis.call('HGET', base .. 'meta', 'mailbox_max') or '10000') then
      return nil, mailbox_full(agent, key)
    end
    local chain = run ~= 'r' and circle(base, task, run, inst, busy)
    if chain then return nil, deadlock(chain) end
  end
  enter_line(base, task, run, inst)
  count_mail(base, inst, redis.call('RPUSH', base .. 'mail:' .. inst, ref))
  return 'mail'
end

-- The run goes on: unless a nested run is in flight on its instance, which then wakes it at its end.
local function resume(base, task, run, stream, agent, key, turn, step, value)
  if key ~= '' then
    local busy = redis.call('HGET', base .. 'inst:' .. agent .. '/' .. key, 'busy')
    if busy and top_of(busy) ~= task .. '|' .. run and not interleaves(base, agent) then return 'pend' end
  end
  return append_resume(base, task, run, stream, agent, key, turn, step, value)
end

-- A nested run has changed the instance's state: the run below sees the change from the step on whose result came
-- after it, live and replayed. Its turn is counted on, whether it is resumed now or later, so that no run kept in memory
-- has it: it is replayed. Returns the turn, and whether the state has changed.
local function keep_override(rk, key, turn, step)
  if key == '' then return turn, false end
  local override = redis.call('HGET', rk, 'ov')
  if not override then return turn, false end
  redis.call('HSET', rk, 'o:' .. step, override)
  redis.call('HDEL', rk, 'ov')
  return text(redis.call('HINCRBY', rk, 'u', 1)), true
end

-- A run that asked in mid-turn is still in a process: its result goes to that process's reply stream. After a nested
-- run has changed the instance's state, the changed state goes with it.
local function tell_asker(base, rk, task, run, step, wait, value, changed)
  local fields = {'t', task .. '|' .. run .. '|' .. step, 'd', value}
  if changed then
    fields[5], fields[6] = 's', redis.call('HGET', rk, 'o:' .. step)
  end
  redis.call('XADD', base .. 'reply:' .. string.sub(wait, 2), 'NOMKSTREAM', 'MAXLEN', '~', REPLY_MAX, '*', unpack(fields))
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
  local turn, changed = keep_override(rk, key, v[4] or '0', step)
  if string.sub(wait, 1, 1) == '>' then
    redis.call('HSET', rk, 'j:' .. step, value)
    tell_asker(base, rk, task, run, step, wait, value, changed)
    return true
  end
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

local function flag(flags, letter)
  if string.find(flags, letter, 1, true) then return flags end
  return flags .. letter
end

-- A task whose context names a trace is flagged: that of others is looked at never again.
local function traced_flag(flags, context)
  if context and string.find(context, '"traceparent":"', 1, true) then return flag(flags, 't') end
  return flags
end

-- The traceparent in the context of a task with these flags, or nil.
local function trace_of(base, task, flags)
  if not flags or not string.find(flags, 't', 1, true) then return nil end
  local read, context = pcall(cjson.decode, redis.call('HGET', base .. 'task:' .. task, 'x') or '')
  local trace = read and type(context) == 'table' and context.traceparent
  return type(trace) == 'string' and trace ~= '' and trace or nil
end

local function publish_out(base, task, kind, data, retention, trace)
  local key = base .. 'out:' .. task
  if trace then
    redis.call('XADD', key, '*', 'type', kind, 'source', 'weft', 'taskid', task, 'traceparent', trace, 'data', data)
  else
    redis.call('XADD', key, '*', 'type', kind, 'source', 'weft', 'taskid', task, 'data', data)
  end
  if retention then redis.call('EXPIRE', key, retention) end
end

-- A task whose client asked for its steps shows the rows of each commit on its stream.
local function tell_steps(base, task, flags, rows)
  if not flags or rows == '' or rows == '[]' or not string.find(flags, 'r', 1, true) then return end
  publish_out(base, task, 'weft.step.recorded', '{"task_id":' .. quote(task) .. ',"steps":' .. rows .. '}')
end

local function record_rows(base, task, flags, rows)
  redis.call('XADD', base .. 'record', '*', 't', task, 'd', rows)
  tell_steps(base, task, flags, rows)
end

-- Rows of the steps that a run has finished in mid-turn and that no commit will write: `w` is the run's field. They
-- say what was done and when. Values stay out, since secrets are removed from rows in the process that commits them.
-- Returns the rows without brackets, and how many there are.
local function unwritten_rows(base, task, run, w)
  local rows = {}
  for line in string.gmatch(w or '', '[^\n]+') do
    local step, kind, name = string.match(line, '^([^\t]*)\t([^\t]*)\t(.*)$')
    step = step or line
    local value = redis.call('HGET', run_key(base, task, run), 'j:' .. step)
    if value then
      local ms, done = string.sub(value, 10, 22), string.sub(value, 9, 9) == 'K'
      rows[#rows + 1] = '{"run":' .. quote(run) .. ',"kind":' .. quote(kind or 'step') .. ',"name":' .. quote(name or '') ..
        ',"status":"' .. (done and 'completed' or 'failed') .. '","started":' .. ms .. ',"ended":' .. ms ..
        ',"step":' .. quote(step) .. '}'
    end
  end
  return table.concat(rows, ','), #rows
end

local function with_rows(record, rows)
  if rows == '' then return record end
  if record == '' or record == '[]' then return '[' .. rows .. ']' end
  return string.sub(record, 1, -2) .. ',' .. rows .. ']'
end

-- The same for all runs of a task that ends: its own (`w`) and its child runs, by the task's `fields`.
local function unwritten_of_task(base, task, w, fields)
  local all, count = unwritten_rows(base, task, 'r', w)
  for i = 1, fields and #fields or 0, 2 do
    local child = string.match(fields[i], '^k:(.*)$')
    if child and string.sub(fields[i + 1], 1, 1) ~= '@' then
      local rows, more = unwritten_rows(base, task, child, redis.call('HGET', run_key(base, task, child), 'w'))
      if more > 0 then all, count = all .. (count > 0 and ',' or '') .. rows, count + more end
    end
  end
  return all, count
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
  record_rows(base, task, redis.call('HGET', base .. 'task:' .. task, 'fl'), row)
end

-- By the server's own clock, as heartbeats ask: the clock of who ended it may be behind a beat that it came after.
local function stop_running(base, task)
  local key = base .. 'stopped'
  local t = redis.call('TIME')
  local ms = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  redis.call('ZADD', key, text(ms), task)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. text(ms - 600000))
end

-- Asks an instance that lives in another partition: the leader of this one starts a task there, in order, whose id
-- makes a repeat start nothing; its end comes back as the step's result. `place` is `@<partition>:<task>`.
local function ask_elsewhere(base, place, agent, key, data, context, back)
  return redis.call('XADD', base .. 'asks', '*', 'place', place, 'agent', agent, 'key', key, 'd', data, 'x', context,
    'back', back)
end

-- Open requests to other partitions, which that partition, or this one, may forget when it loses its tail:
--   requests   by when to look next (ms): `task|run|step`, or `@<partition>:<task>|<asker>` for a task to cancel
--   r:<step>   in the asking run's hash, so that it goes with the run: what was asked, packed (see `open_request`)
local REQUEST = {look_ms = 10000, look_max_ms = 60000, timeout_ms = '3600000'}

-- Stores a request until its step has a result. `limit`: its own time limit in ms, or '' for that of the namespace.
local function open_request(base, task, run, step, place, agent, key, data, context, limit)
  local back, now = task .. '|' .. run .. '|' .. step, now_ms(base)
  if limit == '' then limit = redis.call('HGET', base .. 'meta', 'request_timeout_ms') or REQUEST.timeout_ms end
  local entry = ask_elsewhere(base, place, agent, key, data, context, back)
  redis.call('HSET', run_key(base, task, run), 'r:' .. step,
    cmsgpack.pack({place, agent, key, data, context, text(now), limit, entry}))
  redis.call('ZADD', base .. 'requests', text(now + math.min(REQUEST.look_ms, tonumber(limit))), back)
end

-- The request that a run still waits for, or nil.
local function waiting_request(base, task, run, step)
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if not status or ENDED[status] then return nil end
  local v = redis.call('HMGET', run_key(base, task, run), 'm:' .. step, 'r:' .. step)
  return v[1] and v[2] and cmsgpack.unpack(v[2]) or nil
end

local function close_request(base, task, run, step)
  redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)
  redis.call('HDEL', run_key(base, task, run), 'r:' .. step)
end

-- Cancels a task in another partition, and looks again later whether it has ended.
local function cancel_elsewhere(base, place, task)
  redis.call('XADD', base .. 'asks', '*', 'place', place, 'cancel', task)
  redis.call('ZADD', base .. 'requests', text(now_ms(base) + REQUEST.look_ms), place .. '|' .. task)
end

-- Fields that go with the end of a task, besides steps without a result: a reopened run must not see them.
local OF_ONE_LIFE = {['b:'] = true, ['k:'] = true, ['o:'] = true, ['r:'] = true, ['z:'] = true}

-- Removes what a run waited for, and `gone` with it. A call that may not be repeated stays missing while its mark stands:
-- whoever holds it commits its result, or that its outcome is unknown. Returns whether the run has a journal.
local function forget_waits(base, task, run, gone)
  local rk, journal = run_key(base, task, run), false
  for _, name in ipairs(redis.call('HKEYS', rk)) do
    local prefix, step = string.sub(name, 1, 2), string.sub(name, 3)
    if prefix == 'm:' and redis.pcall('HEXISTS', base .. 'started', task .. '/' .. run .. '/' .. step) == 1 then
      redis.call('HSET', rk, name, string.sub(redis.call('HGET', rk, name), 1, 9) .. '0')
      journal = true
    elseif prefix == 'm:' or OF_ONE_LIFE[prefix] or string.find(name, '^g%d+$') then
      gone[#gone + 1] = name
    elseif prefix == 'j:' then
      journal = true
    end
  end
  -- In pieces: Lua hands over no more than 8,000 values at once.
  for i = 1, #gone, 4000 do redis.call('HDEL', rk, unpack(gone, i, math.min(i + 3999, #gone))) end
  return journal
end

-- Keeps the journal of a child run that was open when its task ended, for the run that asked for it. Without `cur` no
-- commit, resume or redrive finds the run meanwhile. Returns whether there is a journal.
local function keep_child(base, task, run, digest)
  if not forget_waits(base, task, run, {'cur', 'w', 'by', 'a', 'ov', 's0'}) then return false end
  redis.call('HSET', base .. 'task:' .. task, 'c:' .. run, digest)
  return true
end

-- Deletes the journals of child runs of an ended task that nobody can reopen any more.
local function drop_children(base, task)
  local key = base .. 'task:' .. task
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if string.sub(name, 1, 2) == 'c:' then
      redis.call('DEL', run_key(base, task, string.sub(name, 3)))
      redis.call('HDEL', key, name)
    end
  end
end

-- A reopened run asks again for a child run. Returns whether the child has a journal of the same request to go on from.
local function take_child(base, task, run, digest)
  local key, field = base .. 'task:' .. task, 'c:' .. run
  local kept = redis.call('HGET', key, field)
  if not kept then return false end
  redis.call('HDEL', key, field)
  if kept == digest then return true end
  redis.call('DEL', run_key(base, task, run))
  return false
end

-- Frees what an ended task holds: child runs, their instances, timers. Work in flight is freed by its own
-- late commit or by its adopter, since two turns must never be at once on one instance. `keep`: the task may be reopened,
-- so the journals of child runs stay.
local function free_children(base, task, fields, keep)
  local listed, digests = false, {}
  for i = 1, keep and #fields or 0, 2 do
    local child = string.match(fields[i], '^k:(.*)$')
    if child then
      local run, step = parent_of(child)
      digests[child] = string.sub(redis.call('HGET', run_key(base, task, run), 'm:' .. step) or '', 1, 8)
    end
  end
  for i = 1, #fields, 2 do
    local child = string.match(fields[i], '^k:(.*)$')
    if child and string.sub(fields[i + 1], 1, 1) == '@' then
      local run, step = parent_of(child)
      redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)
      cancel_elsewhere(base, fields[i + 1], task)
    elseif child then
      local rk = run_key(base, task, child)
      local cur = redis.call('HGET', rk, 'cur')
      -- A run that nobody waits for is never asked for again.
      local kept = keep and digests[child] ~= '' and keep_child(base, task, child, digests[child])
      if not kept then redis.call('DEL', rk) end
      if fields[i + 1] ~= '' and not listed then
        listed = true
        redis.pcall('DEL', base .. 'line:' .. task)
      end
      if fields[i + 1] ~= '' and (cur == 'held' or cur == 'retry' or cur == 'park' or cur == 'pend') then
        release(base, fields[i + 1], task, child)
      end
    end
    if not keep and string.sub(fields[i], 1, 2) == 'c:' then
      redis.call('DEL', run_key(base, task, string.sub(fields[i], 3)))
      redis.call('HDEL', base .. 'task:' .. task, fields[i])
    end
    if string.sub(fields[i], 1, 2) == 'z:' then
      redis.call('ZREM', base .. 'timers', string.sub(fields[i], 3))
      redis.call('HDEL', base .. 'delayed', string.sub(fields[i], 3))
    end
  end
end

local KINDS = {completed = 'weft.task.completed', failed = 'weft.task.failed', cancelled = 'weft.task.cancelled'}

-- `progress`: a call's report of how far it is, and not what an agent says.
local function publish_delta(base, task, run, attempt, seq, value, progress)
  local name = string.sub(value, 1, 1) == '"' and 'text' or 'value'
  publish_out(base, task, 'weft.output.delta', '{"task_id":' .. quote(task) .. ',"run_id":' .. quote(run) ..
    ',"attempt":' .. attempt .. ',"seq":' .. seq .. (progress and ',"progress":true,"' or ',"') .. name .. '":' .. value .. '}')
end

-- What the task has written to its output so far, and this value with it. Returns nil and the limit where that is over
-- it; `share` is the part of the limit that may be used. Small outputs never ask for the limit.
local OUTPUT_PIECE, OUTPUT_SMALL, OUTPUT_MAX = 128, 1048576, 16777216
local function output_with(base, written, value, share)
  local size = (tonumber(written) or 0) + #value + OUTPUT_PIECE
  if size <= OUTPUT_SMALL then return text(size) end
  local most = tonumber(redis.call('HGET', base .. 'meta', 'output_max')) or OUTPUT_MAX
  if size > most * (share or 1) then return nil, text(most) end
  return text(size)
end

local HEADER = '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n?([^\n]*)'

-- A task's header in parts, by name.
local function header_of(h)
  local head = {}
  head.stream, head.agent, head.key, head.to, head.created, head.max_steps, head.id, head.source, head.digest, head.session,
    head.tenant = string.match(h, HEADER)
  return head
end

-- A question is on the task's stream, where any client finds it, and on the stream that the user named.
local function tell_question(base, task, h, data, trace)
  publish_out(base, task, 'weft.human.requested', data, nil, trace)
  local to = string.match(h, '^[^\n]*\n[^\n]*\n[^\n]*\n([^\n]*)')
  if to ~= '' and string.sub(to, 1, 1) ~= '@' and string.sub(to, 1, #base + 6) ~= base .. 'reply:' then
    local fields = {'to', to, 'type', 'weft.human.requested', 't', task, 'd', data}
    if trace then fields[9], fields[10] = 'x', trace end
    redis.call('XADD', base .. 'replies', '*', unpack(fields))
  end
end

-- What has been used, with more of it added: both are JSON, names to numbers, with `models` for the same by model.
-- Raises where one of them is something else, so it belongs before the first write.
local function usage_with(held, more)
  local total = held and cjson.decode(held) or {}
  local function add(into, amounts)
    for name, amount in pairs(amounts) do into[name] = (into[name] or 0) + amount end
  end
  for _, one in ipairs(more) do
    local amounts = cjson.decode(one)
    local models = amounts.models
    amounts.models = nil
    local known = total.models
    total.models = nil
    add(total, amounts)
    if models then
      known = known or {}
      for model, of_model in pairs(models) do
        known[model] = known[model] or {}
        add(known[model], of_model)
      end
    end
    total.models = known
  end
  return total
end

-- Says which limit the usage is over, or nil. At the limit is within it, whatever sums of fractions make of it.
local function over_limit(used, limits)
  if not limits then return nil end
  local most = cjson.decode(limits)
  for _, name in ipairs({'tokens', 'cost'}) do
    if most[name] and (used[name] or 0) > most[name] * (1 + 1e-9) then
      return string.format('the task has used %.14g %s, over its max_%s=%.14g', used[name], name, name, most[name])
    end
  end
  return nil
end

-- Removes reservations from those `held` (JSON): of one model call, or where `place` ends with `|`, of all calls of a run.
local function give_back(key, held, place)
  local left, found = {}, false
  for name, amounts in pairs(cjson.decode(held)) do
    local of_run = string.sub(place, -1) == '|' and string.sub(name, 1, #place) == place
    if name ~= place and not of_run then left[name], found = amounts, true end
  end
  if found then redis.call('HSET', key, 'rs', cjson.encode(left)) else redis.call('HDEL', key, 'rs') end
end

-- The points of a task's hooks that are left when it has not completed.
local END_POINTS = {'post_task_call', 'task_failed', 'session_failed'}

-- The agent that runs the hooks of a task which ends without being completed, or nil where there are none: those that
-- its first run has chosen (`selection`, from the journal), and before it has begun those that its context names or
-- that always run. A task that answers a step of another one leaves them to that one.
local function agent_of_end(base, head, context, selection)
  if string.sub(head.to, 1, 1) == '@' then return nil end
  local found = redis.call('HGET', base .. 'enders', head.agent)
  if not found then return nil end
  local agent, known, chosen = string.sub(found, 2), false, nil
  if selection and string.sub(selection, 9, 9) == 'K' then
    known, chosen = pcall(cjson.decode, string.sub(selection, 23))
  elseif string.sub(found, 1, 1) == '!' then
    return agent
  elseif context then
    known, chosen = pcall(cjson.decode, context)
  end
  local hooks = known and type(chosen) == 'table' and chosen.hooks
  if type(hooks) ~= 'table' then return nil end
  for _, point in ipairs(END_POINTS) do
    if hooks[point] then return agent end
  end
  return nil
end

-- What `end_task` needs to start the hooks of the end; nothing is written here.
local function hooks_of_end(base, head, context, selection)
  local agent = agent_of_end(base, head, context, selection)
  if not agent then return nil end
  redis.call('XLEN', base .. head.stream)
  redis.call('ZCARD', base .. 'index')
  return {agent = agent, context = context or '', selection = selection and string.sub(selection, 23) or 'null'}
end

-- Stores a task that nobody has submitted; `entry` is that of its start event, or the word for where it waits.
local function store_task(base, task, stream, agent, key, data, context, from, entry)
  local created = string.find(entry, '-', 1, true) and ms_of(entry) or text(now_ms(base))
  redis.call('ZADD', base .. 'index', created, task)
  count_start(base, task, created)
  redis.call('HSET', base .. 'task:' .. task, 'status', 'accepted', 'cur', entry, 'd', data, 'h', stream .. '\n' .. agent ..
    '\n' .. key .. '\n\n' .. created .. '\n0\n' .. task .. '\n' .. from .. '\n\n')
  if context == '' then return end
  local flags = traced_flag('', context)
  if flags ~= '' then
    redis.call('HSET', base .. 'task:' .. task, 'x', context, 'fl', flags)
  else
    redis.call('HSET', base .. 'task:' .. task, 'x', context)
  end
end

-- The hooks of a task's end are a task of their own, in the stream of the task's agent. A task that was opened again
-- may end again: then they run again.
local function start_hooks_of_end(base, task, ending, status, error, ms)
  local head, hooks = ending.head, ending.hooks
  local data = '{"task_id":' .. quote(task) .. ',"agent":' .. quote(head.agent) .. ',"key":' .. quote(head.key) ..
    ',"status":"' .. status .. '","error":' .. error .. ',"attempt":' .. (ending.attempt or '1') ..
    ',"selection":' .. hooks.selection .. '}'
  local own = string.sub(redis.sha1hex(task .. '\nended\n' .. ms), 1, 32)
  local entry = append_start(base, own, 'r', head.stream, hooks.agent, '', data, hooks.context)
  store_task(base, own, head.stream, hooks.agent, '', data, hooks.context, task .. '/r', entry)
end

-- Says on the partition's stream of states that a run, a node or a group has changed, for those who wait for it. The
-- stream is short: who may have missed an entry looks at the thing itself.
local STATES_MAX = '10000'

local function tell_state(base, name, status)
  redis.call('XADD', base .. 'states', 'MAXLEN', '~', STATES_MAX, '*', 'i', name, 's', status)
end

-- Ends a task: final event, reply, record, expiry. `ending` is what `check_end` has read; `result` is JSON: the
-- output, or the error object. `keep` leaves the journal with the task, for a dead letter that may be driven again.
local function end_task(base, task, ending, flags, status, result, steps, ms, record, keep, run_in_flight)
  local key = base .. 'task:' .. task
  local head = ending.head
  local fields = flags ~= '' and redis.call('HGETALL', key)
  if fields or ending.unwritten then
    local rows, more = unwritten_of_task(base, task, ending.unwritten, fields)
    record, steps = with_rows(record, rows), text(tonumber(steps) + more)
  end
  local body = status == 'completed' and ',"output":' or ',"error":'
  local usage = string.find(flags, 'u', 1, true) and redis.call('HGET', key, 'us') or '{}'
  local final = '{"task_id":"' .. task .. '","status":"' .. status .. '"' .. body .. result ..
    ',"usage":' .. usage .. ',"steps":' .. steps .. ',"trajectory":"' .. task .. '"}'
  -- The completed run of an instance is not reopened: it has written its state.
  local reopens = (keep or string.find(flags, 'k', 1, true)) and (status ~= 'completed' or head.key == '')
  if fields then free_children(base, task, fields, reopens) end
  if keep or string.find(flags, 'l', 1, true) then
    redis.call('HSET', key, 'status', status, 'out', final, 'ended', ms, 'steps', steps, 'row', ending.row and '1' or '0')
    redis.call('HDEL', key, 'rs', 'w')
    redis.call('PERSIST', key)
  else
    redis.call('DEL', key)
    -- What a finished task costs until it expires counts: where its reply went is no longer of use.
    local h = head.stream .. '\n' .. head.agent .. '\n' .. head.key .. '\n\n' .. head.created .. '\n' .. head.max_steps ..
      '\n' .. head.id .. '\n' .. head.source .. '\n' .. head.digest .. '\n' .. head.session
    redis.call('HSET', key, 'status', status, 'h', h, 'out', final, 'ended', ms)
    redis.call('EXPIRE', key, ending.retention)
  end
  redis.pcall('ZREM', base .. 'open', task)
  if head.tenant ~= '' then redis.pcall('ZREM', base .. 'open:' .. head.tenant, task) end
  local to = head.to
  if to ~= '' then
    if string.sub(to, 1, #base + 6) == base .. 'reply:' then
      redis.call('XADD', to, 'NOMKSTREAM', 'MAXLEN', '~', REPLY_MAX, '*', 't', task, 'd', final)
    else
      local fields = {'to', to, 'type', KINDS[status], 't', task, 'd', final, 'id', head.id}
      if ending.trace then fields[11], fields[12] = 'x', ending.trace end
      if ending.by then
        fields[#fields + 1] = 'l'
        fields[#fields + 1] = ending.by
      end
      redis.call('XADD', base .. 'replies', '*', unpack(fields))
    end
  end
  if string.find(flags, 'o', 1, true) then
    tell_steps(base, task, flags, record)
    publish_out(base, task, KINDS[status], final, ending.retention, ending.trace)
  end
  if ending.seen then
    redis.call('HSET', base .. 'seen', head.source .. '\n' .. head.id, task .. '\n' .. head.digest .. '\n' .. status)
  end
  local ended = {'t', task, 'd', record, 'e',
    status .. '\n' .. head.agent .. '\n' .. steps .. '\n' .. head.created .. '\n' .. ms .. '\n' .. head.session,
    'f', status == 'completed' and '' or result}
  if ending.trace then ended[9], ended[10] = 'x', ending.trace end
  if string.find(flags, 'e', 1, true) then
    ended[#ended + 1] = 'g'
    ended[#ended + 1] = '1'
  end
  redis.call('XADD', base .. 'record', '*', unpack(ended))
  if string.find(flags, 'n', 1, true) then tell_state(base, 'run/' .. task .. '/r', status) end
  if status ~= 'completed' then stop_running(base, task) end
  if head.key ~= '' and not run_in_flight then release(base, head.agent .. '/' .. head.key, task, 'r') end
  if ending.hooks then start_hooks_of_end(base, task, ending, status, result, ms) end
end

-- Notes the span that gives a call, or a nested run, its result, where its step still lacks one.
local function note_answer(base, task, run, trace)
  local parent, step = parent_of(run)
  local rk = run_key(base, task, parent)
  if redis.call('HEXISTS', rk, 'm:' .. step) == 1 then redis.call('HSET', rk, 'l:' .. step, trace) end
end

-- Writes the rows of what a child run has finished in mid-turn, where whoever ends it does not know of them.
local function record_unwritten(base, task, run, flags)
  local rows, count = unwritten_rows(base, task, run, redis.call('HGET', run_key(base, task, run), 'w'))
  if count == 0 then return end
  redis.call('HINCRBY', base .. 'task:' .. task, 'steps', count)
  record_rows(base, task, flags, '[' .. rows .. ']')
end

-- Ends a run that is not the task's first: its parent's step gets the result.
local function end_child(base, task, run, inst, status, ms, payload)
  local parent, step = parent_of(run)
  redis.call('DEL', run_key(base, task, run))
  redis.call('HDEL', base .. 'task:' .. task, 'k:' .. run)
  answer(base, task, parent, step, status, ms, payload)
  local key = base .. 'task:' .. task
  local flags = redis.call('HGET', key, 'fl') or ''
  if string.find(flags, 'v', 1, true) then
    local held = redis.call('HGET', key, 'rs')
    if held then give_back(key, held, run .. '|') end
  end
  if string.find(flags, 'n', 1, true) then
    -- pcall: not all that end a run have looked at this stream before; a wait looks at the run itself too.
    redis.pcall('XADD', base .. 'states', 'MAXLEN', '~', STATES_MAX, '*', 'i', 'run/' .. task .. '/' .. run, 's',
      status == 'K' and 'completed' or 'failed')
  end
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
      -- A reopened run that waits for its instance cannot hold it: it is held from before the task ended.
      local waits = cur == 'mail' or cur == 'nest'
      if not status or ENDED[status] or not cur or cur == entry or waits then release(base, inst, task, run) end
    end
  end
end

-- How a call that may not be repeated came out after its task had ended. A dead letter may pin the task: the journal has
-- it, so that a reopened run does not begin the call again. The run's own key is checked by the read.
local function keep_late(base, task, run, status, ms, value)
  local parent, step = parent_of(run)
  local rk = run_key(base, task, parent)
  local missing = redis.call('HGET', rk, 'm:' .. step)
  if not missing or not ENDED[redis.call('HGET', base .. 'task:' .. task, 'status') or ''] then return end
  redis.call('HDEL', rk, 'm:' .. step)
  redis.call('HSET', rk, 'j:' .. step, string.sub(missing, 1, 8) .. status .. ms .. value)
end

-- A dead letter of a task is gone. Returns whether another one pins the task still.
local function unpin(key, flags)
  if redis.call('HINCRBY', key, 'lt', -1) > 0 then return true end
  redis.call('HDEL', key, 'lt')
  if string.find(flags, '[kl]') then redis.call('HSET', key, 'fl', (string.gsub(flags, '[kl]', ''))) end
  return false
end

-- Ends the task from one of its runs or calls because it is over a limit. `ending` is what `check_end` has read, `inst`
-- the instance that the run in hand holds, `root_cur` the `cur` of the first run.
local function end_over_limit(base, task, run, inst, ending, flags, error, steps, ms, rows, root_cur)
  local in_flight = run ~= 'r' and root_cur and string.find(root_cur, '-', 1, true)
  end_task(base, task, ending, flags, 'failed', error, steps, ms, rows, false, in_flight)
  if run ~= 'r' and inst ~= '' then release(base, inst, task, run) end
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
local function send_detached(base, task, agent, key, data, context, from_task, from_run)
  if string.sub(agent, 1, 1) == '@' then
    local place, name = string.match(agent, '^(@%d+):(.*)$')
    ask_elsewhere(base, place .. ':' .. task, name, key, data, context, '')
    return
  end
  local stream = redis.call('HGET', base .. 'agents', agent)
  if not stream then
    dead.keep(base, {'reason', 'unknown_name', 'stream', 'agent', 'group', GROUPS.agent,
      'time', text(now_ms(base)), 'taskid', from_task, 'runid', from_run, 'name', agent,
      'error', error_json('UnknownName', 'no agent is named ' .. agent), 'errors', '[]', 'd', data})
    return
  end
  local tk = base .. 'task:' .. task
  if redis.call('EXISTS', tk) == 1 then return end
  local from = from_task .. '/' .. from_run
  local entry = deliver(base, task, 'r', stream, agent, key, data, context, true)
  if entry then
    store_task(base, task, stream, agent, key, data, context, from, entry)
  else
    local now = text(now_ms(base))
    local h = stream .. '\n' .. agent .. '\n' .. key .. '\n\n' .. now .. '\n0\n' .. task .. '\n' .. from .. '\n\n'
    local head = header_of(h)
    redis.call('ZADD', base .. 'index', now, task)
    local ending = {h = h, head = head, retention = redis.call('HGET', base .. 'meta', 'retention') or '3600',
      hooks = hooks_of_end(base, head, context ~= '' and context or nil, nil)}
    end_task(base, task, ending, '', 'failed', mailbox_full(agent, key), '0', now, '[]', false, true)
  end
end

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

-- The task by which an agent gets a published message: the same for a repeat of the message.
local function task_of_message(id, agent, key) return string.sub(redis.sha1hex(id .. '\n' .. agent .. '/' .. key), 1, 32) end

-- Keeps a message that nobody has subscribed to. `n` of an entry says how many bytes were kept before it since the
-- stream began, so the oldest entry tells how many bytes there are.
local function keep_unheard(base, ...)
  local stream, before, size = base .. 'unheard', tonumber(redis.call('HGET', base .. 'meta', 'unheard') or '0') or 0, 0
  for _, field in ipairs({...}) do size = size + #field end
  local all, dropped, start = redis.call('XLEN', stream), 0, '-'
  while true do
    local oldest = redis.call('XRANGE', stream, start, '+', 'COUNT', 1)[1]
    if not oldest then break end
    local n = 0
    for i = 1, #oldest[2], 2 do
      if oldest[2][i] == 'n' then n = tonumber(oldest[2][i + 1]) or 0 end
    end
    if before >= n and before + size - n <= UNHEARD_MAX_BYTES then break end
    dropped, start = dropped + 1, '(' .. oldest[1]
  end
  redis.call('HSET', base .. 'meta', 'unheard', text(before + size))
  if dropped == 0 then
    redis.call('XADD', stream, 'MAXLEN', '~', text(UNHEARD_MAX), '*', 'n', text(before), ...)
  else
    redis.call('XADD', stream, 'MAXLEN', '=', text(math.min(all - dropped + 1, UNHEARD_MAX)), '*', 'n', text(before), ...)
  end
end

-- Publishes a message: a task for each agent that has subscribed to its topic. What nobody has subscribed to is kept
-- for agents that come later. Returns how many agents get it. A topic `@…` is carried out of the partition first.
local function publish_message(base, id, topic, key, data, context, sender, from_task, from_run)
  if string.sub(topic, 1, 1) == '@' then
    redis.call('XADD', base .. 'asks', '*', 'publish', id, 'topic', string.sub(topic, 2), 'key', key, 'd', data, 'x',
      context, 'sender', sender)
    return 0
  end
  local agents, heard = subscribers(base, topic, key, sender)
  for _, agent in ipairs(agents) do
    send_detached(base, task_of_message(id, agent, key), agent, key, data, context, from_task, from_run)
  end
  if not heard then
    keep_unheard(base, 'id', id, 'topic', topic, 'key', key, 'd', data, 'x', context, 'sender', sender)
  end
  return #agents
end

-- Where what this app lacks goes to: an agent or a tool of another app.
local function stream_by_manifest(base, target, name)
  return redis.call('HGET', base .. string.sub(target, 2) .. 's', name)
end

-- How many gateways serve an engine's stream: those that have said so, and live.
local function gateways_of(base, stream)
  local live = 0
  for _, member in ipairs(redis.call('ZRANGE', base .. 'gateways', 0, -1)) do
    local serves, owner = string.match(member, '^(%S+) (.*)$')
    if serves == stream and redis.call('ZSCORE', base .. 'alive', owner) then live = live + 1 end
  end
  return live
end

local function no_gateway(stream)
  local engine, pool = string.match(stream, '^([^:]*):?(.*)$')
  if pool ~= '' then
    return 'no ' .. engine .. '-gateway serves the pool ' .. pool .. ': start one with WEFT_POOLS=' .. pool .. ', or use the engine local'
  end
  return 'no ' .. engine .. '-gateway serves this namespace: start one (weft up --' .. engine .. '), or use the engine local'
end

-- How long a step waits for its engine, in ms: as its task's conf says, which is in the context.
local ENGINE_WAIT_SECONDS = 60
local function engine_wait(context)
  local read, found = pcall(cjson.decode, context)
  local seconds = read and type(found) == 'table' and tonumber(found.engine_wait_seconds)
  return (seconds or ENGINE_WAIT_SECONDS) * 1000
end

local function with_member(context, name, value)
  if context == '' or context == '{}' then return '{"' .. name .. '":' .. value .. '}' end
  return string.sub(context, 1, -2) .. ',"' .. name .. '":' .. value .. '}'
end

-- The record's row of a call that nobody takes: no handler sees it, so nobody else would write it.
local CALL_KINDS = {a = 'agent', t = 'tool', r = 'ray', s = 'spark'}
local function record_refused(base, task, flags, child, target, name, call_key, data, ms, error)
  local kind = CALL_KINDS[string.match(target, '^%??(.)')]
  record_rows(base, task, flags, '[{"run":' .. quote(child) .. ',"kind":"' .. kind .. '","name":' .. quote(name) ..
    ',"status":"failed","started":' .. ms .. ',"ended":' .. ms .. (call_key ~= '' and ',"key":' .. quote(call_key) or '') ..
    (data ~= '' and ',"input":' .. data or '') .. ',"error":' .. error .. '}]')
end

-- Puts a step on the stream of its engine, where it waits for a gateway as long as the task's conf says. Returns an
-- error (JSON) where none serves the stream and the step may not wait; else nil, and whether the task's output tells
-- that it waits.
local function start_engine_step(base, task, child, stream, header, data, context)
  local engine, wait, away = string.match(stream, '^[a-z]+'), engine_wait(context), gateways_of(base, stream) == 0
  if away and wait <= 0 then return error_json('EngineUnavailable', no_gateway(stream)), false end
  redis.call('HSETNX', base .. 'engines', stream, stream)
  context = with_member(context, 'engine_until', string.format('%.3f', (now_ms(base) + wait) / 1000))
  redis.call('XADD', base .. stream, '*', 'h', header, 'd', data, 'x', context)
  if away then
    publish_delta(base, task, child, '1', redis.call('HINCRBY', base .. 'task:' .. task, 'seq', 1),
      '{"waiting":' .. quote(engine) .. ',"reason":' .. quote(no_gateway(stream)) .. '}', true)
  end
  return nil, away
end

-- Starts what a step calls. Returns the call's kind, or nil and the error (JSON) that answers the step at once; whether
-- the task has a child run by it; and whether something was written to the task's output. `digest` is the step's where
-- the task was reopened, else nil: a child run of the same request goes on from its journal.
local function start_call(base, task, run, step, target, name, call_key, data, context, ms, digest)
  local kind = string.sub(target, 1, 1)
  local child = run .. '/' .. step
  if kind == '@' then
    local place, limit = string.match(target, '^(@%d+:[^:]*):?(%d*)$')
    open_request(base, task, run, step, place, name, call_key, data, context, limit)
    redis.call('HSET', base .. 'task:' .. task, 'k:' .. child, place)
    return 'a', nil, true
  end
  if kind == '?' then
    local wanted = target
    kind, target = string.sub(target, 2, 2), stream_by_manifest(base, target, name)
    if not target then
      return nil, error_json('UnknownName', 'no ' .. string.sub(wanted, 2) .. ' is named ' .. name), false
    end
  end
  if kind == 'a' then
    local kept = digest and take_child(base, task, child, digest)
    local cur, refused = deliver(base, task, child, target, name, call_key, data, context, true, kept and '-1')
    if not cur then
      if kept then redis.call('DEL', run_key(base, task, child)) end
      return nil, refused, false
    end
    redis.call('HSET', run_key(base, task, child), 'cur', cur, 'h', target .. '\n' .. name .. '\n' .. call_key .. '\n\n' ..
      (string.find(cur, '-', 1, true) and ms_of(cur) or ms) .. '\n0', 'd', data, 'x', context)
    redis.call('HSET', base .. 'task:' .. task, 'k:' .. child, call_key ~= '' and (name .. '/' .. call_key) or '')
    return kind, nil, true
  end
  local header = '1\ncall\n' .. task .. '\n' .. child .. '\n' .. name .. '\n' .. call_key .. '\n1\n0'
  if kind == 'r' or kind == 's' then
    local failed, told = start_engine_step(base, task, child, target, header, data, context)
    if failed then return nil, failed, false end
    return kind, nil, false, told
  end
  if context ~= '' then
    redis.call('XADD', base .. target, '*', 'h', header, 'd', data, 'x', context)
  else
    redis.call('XADD', base .. target, '*', 'h', header, 'd', data)
  end
  return kind, nil, false
end
