-- Commits a turn of an agent in one step: fence, acknowledgement, journal, sends in program order, timers, record, and
-- finally the release of the instance.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run · 6 instance (`agent/key`) or ''
--      7 mode: `w` the run waits, `c` it completed, `f` it failed, `k` it failed and a task that ends with it is
--        cancelled, `x` the whole task fails (over a limit)
--      8 now (epoch ms) · 9 record (JSON steps) or '' · 10 steps in the record
--      11 output or error object; for `w` the state in mid-run ('' unchanged) · 12 new state or '' (for `c`)
--      13 number of parts, then each part, its letter first:
--        c stream step name key digest wait data context   calls a tool, an agent or an engine
--          stream `?agent`, `?tool`: the stream of the name in the manifest
--          stream `@<partition>:<task>`, or `@<partition>:<task>:<ms>` with its own time limit: an instance in another
--          partition, where a separate task calls it
--        t step digest wait after_ms                       a timer that answers the step with null
--        q step digest wait data timeout_ms ('' none) default ('' none)   a question: data of `weft.human.requested`
--        m step digest wait name timeout_ms ('' none) default ('' none)   waits for a message of this name
--        s task agent key data context step digest         a message that nobody waits for: a separate task
--        p id topic key data context sender step digest    a message to every subscriber of the topic
--        r step digest state                               gives up the run's key; the state that it leaves, '' unchanged
--        k step digest wait                                waits for the run's key
--        a step wait                                       waits again for a step of an earlier turn
--        l traceparent                                     the span of the turn that ends the run: not for `w`
--        u step digest usage                               usage (JSON: names to numbers, `models` by model)
--        j step                                            a step that was journaled in mid-turn: only for `w` and `c`
--          step `@<branch> <number>`: the branch has emitted so many pieces
--        v version                                         the app's version that begins the task: only for `w`
--        w step                                            withdraws a call of an earlier turn: only for `w` and `c`
-- RETURNS 'OK' · 'DONE' if the event was handled before or its task is over (settled, nothing else happened)
--         In the next three cases nothing was written: 'FENCED' if the owner was declared dead · 'LIMIT <why>' over a
--         limit of the task · 'LOST' if the journal lacks a step of the turn, since the server has lost its last writes,
--         or if another owner has begun the turn and this one has not, or no longer: only for `w` and `c`

local MODE = {waits = 'w', completed = 'c', failed = 'f', cancelled = 'k', over_limit = 'x'}
local STATUS_OF_MODE = {c = 'completed', f = 'failed', k = 'cancelled', x = 'failed'}
local FIRST_PART = 14

-- The data of task and run for a commit, and the task's status, the run's `current`, header and number of turns. The
-- table also lists the fields of the run that the commit writes, names and values in turn. It has no more than eight
-- named fields on the usual paths: a larger one would cost measurable time.
local function read_turn(base, args)
  local task, run = args[4], args[5]
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags, RUN.current, RUN.turn, RUN.unrecorded,
    RUN.turn_owner)
  local turn = {
    key = key, run_key = key, task_header = v[2], unrecorded = v[7], owner = v[8],
    steps = tonumber(v[3] or '0') + tonumber(args[10]),
    flags = v[4] or '', stored_flags = v[4] or '',
  }
  if run == FIRST_RUN then return turn, v[1], v[5], v[2], v[6] end
  turn.run_key = run_key(base, task, run)
  local own = redis.call('HMGET', turn.run_key, RUN.current, RUN.header, RUN.turn, RUN.unrecorded, RUN.turn_owner)
  turn.unrecorded, turn.owner = own[4], own[5]
  return turn, v[1], own[1], own[2], own[3]
end

-- Whether the server has lost a step that the turn has journaled: another owner may have restarted the turn and stored
-- a different result.
local function lacks_step(args, turn, step)
  if turn.owner and turn.owner ~= args[3] .. ' ' .. args[1] then return true end
  local branch, number = string.match(step, '^@(.*) (%d+)$')
  if not branch then return redis.call('HEXISTS', turn.run_key, RUN.result .. step) == 0 end
  local _, count = branch_output(redis.call('HGET', turn.run_key, RUN.emitted .. branch))
  return count < tonumber(number)
end

-- Whether another owner has begun this turn, and this one has not: it may lack that owner's steps and output.
local function begun_by_another(args, turn)
  local entry = args[3] .. ' '
  return turn.owner and string.sub(turn.owner, 1, #entry) == entry and turn.owner ~= entry .. args[1]
end

-- Stores the parts that describe the turn itself. Returns an error for a malformed part, and for a step that the
-- journal lacks.
local function read_parts(args, turn)
  local at = FIRST_PART
  for _ = 1, tonumber(args[13]) do
    local letter = args[at]
    local size = PART_SIZE[letter]
    if not size or not args[at + size - 1] then return malformed_part(letter) end
    if letter == PART.usage then
      turn.reports = turn.reports or {}
      turn.reports[#turn.reports + 1] = args[at + 3]
    elseif letter == PART.answered_by then
      turn.answered_by = args[at + 1]
    elseif letter == PART.message or letter == PART.publish then
      turn.sends = true
    elseif letter == PART.journaled and lacks_step(args, turn, args[at + 1]) then
      return 'LOST'
    elseif letter == PART.withdraw then
      turn.withdrawn = turn.withdrawn or {}
      turn.withdrawn[args[5] .. '/' .. args[at + 1]] = true
    end
    at = at + size
  end
  return args[at] and malformed_part(args[at])
end

-- Adds the turn's usage to the task's usage. Returns the limit that it exceeds, or nil.
local function count_usage(turn, mode)
  local held = redis.call('HMGET', turn.key, TASK.usage, TASK.limits)
  local usage = usage_with(held[1], turn.reports)
  local over = (mode == MODE.waits or mode == MODE.completed) and over_limit(usage, held[2])
  if over then return over end
  turn.flags, turn.usage = flag(turn.flags, FLAG.usage), cjson.encode(usage)
  return nil
end

-- Reads every key that the withdrawal of the turn's steps is about to write.
local function check_withdrawn(base, task, turn)
  turn.open = open_within(base, task, turn.flags, turn.withdrawn)
  check_withdrawal(base, task, turn.flags, turn.open)
end

-- Withdraws the turn's steps. Returns the rows of the turn, with those that no other commit will write.
local function withdraw_steps(base, task, turn, rows)
  local more, count = withdraw(base, task, turn.flags, turn.withdrawn, turn.open)
  turn.steps = turn.steps + count
  return with_rows(rows, more)
end

-- Reads every key that the end of the run is about to write. Returns what `end_task` needs, if the task ends too.
local function check_end_of_run(base, args, turn, mode)
  local task, run, instance, ending = args[4], args[5], args[6], nil
  if turn.withdrawn then check_withdrawn(base, task, turn) end
  local at = FIRST_PART
  while args[at] do
    check_sent(base, args, at)
    at = at + PART_SIZE[args[at]]
  end
  if run == FIRST_RUN or mode == MODE.over_limit then
    local first = not (turn.sends or turn.withdrawn or turn.unrecorded or turn.usage) and args[12] == ''
    ending = check_end(base, task, turn.task_header, turn.flags, STATUS_OF_MODE[mode], first)
  else
    check_record(base, task, turn.flags)
    local parent = parent_of(run)
    check_waiting(base, task, parent, parent == FIRST_RUN and turn.task_header)
  end
  if run == FIRST_RUN then
    -- A task that answers a step in another partition passes on the span that answered.
    if string.sub(ending.head.to, 1, 1) == '@' then ending.by = turn.answered_by end
    ending.unwritten, ending.row = nil, true
  elseif instance ~= '' then
    check_instance(base, instance, args[2])
  end
  return ending
end

-- The run on which a holder of an instance is nested, or nil. A run that ends need not be the newest holder: a handler
-- that called in mid-turn may give up waiting for a reentrant call.
local function holder_below(holders, ref)
  local below
  for _, holder in ipairs(lines(holders)) do
    if holder == ref then return below end
    below = holder
  end
  return below
end

-- A handler gave up waiting and ends below a running reentrant call, which has not seen the state that the handler
-- leaves. The reentrant call is handled again with that state. If its task ends now, it is dropped anyway.
local function repeat_above(base, holders, ref, state)
  local task, run = split_ref(KEY.above(holders, ref))
  if ref == task .. '|' .. FIRST_RUN then return end
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', rk, RUN.current, RUN.header)
  if not v[1] then return end
  redis.call('HSET', rk, RUN.state_at_start, state)
  if not in_flight(v[1]) then return end -- its next attempt begins with that state
  local stream, agent, instance_key = target_of(v[2])
  -- Turn -1, which no run in memory has. The commit of the running turn is refused, since it is no longer current.
  redis.call('HSET', rk, RUN.current, append_resume(base, task, run, stream, agent, instance_key, '-1', '', ''))
end

-- Leaves the state of a nested run to the run below it, and to those further down as far as the one that waits for it:
-- a run in between did not ask for it, and may fail, which must not undo what this one has completed.
local function leave_state(base, holders, ref, state)
  local all, task, run = lines(holders), split_ref(ref)
  local context
  local nested = false
  for i = #all, 1, -1 do
    if nested then
      local below_task, below_run = split_ref(all[i])
      redis.call('HSET', run_key(base, below_task, below_run), RUN.override, state)
      if waits_for(all[i], task, run) then return end
      context = context or redis.call('HGET', run_key(base, task, run), RUN.context) or ''
      if waits_through(base, all[i], context) then return end
    end
    nested = nested or all[i] == ref
  end
end

-- Writes the state that the run leaves. A nested run leaves it to the run below, which is still in mid-run.
local function write_state(base, instance, state, ref)
  if instance == '' or state == '' then return end
  local key = base .. 'inst:' .. instance
  local holders = redis.call('HGET', key, INSTANCE.holders)
  local nested = holders and string.find(holders, '\n', 1, true)
  local below = nested and holder_below(holders, ref)
  local interleaved = nested and interleaves(base, string.match(instance, '^[^/]*'))
  if nested and not interleaved and KEY.above(holders, ref) then repeat_above(base, holders, ref, state) end
  if not below then
    redis.call('HSET', key, 'state', state)
  elseif interleaved then
    redis.call('HSET', key, INSTANCE.working_state, state, 'state', state)
  else
    redis.call('HSET', key, INSTANCE.working_state, state)
    leave_state(base, holders, ref, state)
  end
end

local function end_run(base, args, turn, mode)
  local task, run, instance = args[4], args[5], args[6]
  local now, rows, result = args[8], args[9], args[11]
  local ending = check_end_of_run(base, args, turn, mode)
  if turn.withdrawn then rows = withdraw_steps(base, task, turn, rows) end
  local steps = text(turn.steps)
  -- The rows of this turn are in its record.
  if turn.unrecorded then redis.call('HDEL', turn.run_key, RUN.unrecorded) end
  if turn.usage then redis.call('HSET', turn.key, TASK.usage, turn.usage, TASK.flags, turn.flags) end
  local at = FIRST_PART
  while args[at] do
    send_part(base, args, at, task, run, turn)
    at = at + PART_SIZE[args[at]]
  end
  if turn.waiting then QUEUE.flush(base, turn) end
  write_state(base, instance, args[12], task .. '|' .. run)
  if mode == MODE.over_limit then
    end_over_limit(base, task, run, instance, ending, turn.flags, result, steps, now, rows)
  elseif run == FIRST_RUN then
    end_task(base, task, ending, turn.flags, STATUS_OF_MODE[mode], result, steps, now, rows, false, false)
  else
    redis.call('HSET', turn.key, 'steps', steps)
    record_rows(base, task, turn.flags, rows)
    if turn.answered_by then note_answer(base, task, run, turn.answered_by) end
    end_child(base, task, run, instance, mode == MODE.completed and RESULT.ok or RESULT.error, now, result)
  end
  settle_last(base, args[2], args[3])
end

-- Whether the turn only calls a tool: that call is its first write, which changes nothing if it fails, and no limit
-- refuses it.
local function only_calls_tool(args)
  return args[13] == '1' and args[9] == '' and args[FIRST_PART] == PART.call
    and string.sub(args[FIRST_PART + 1], 1, 1) == KIND.tool
end

-- Parts that are not new steps of the task.
local REQUESTS_NOTHING = {[PART.again] = true, [PART.usage] = true, [PART.journaled] = true, [PART.withdraw] = true,
  [PART.version] = true}

-- Reads every key that the parts of a waiting turn are about to write. Returns the limit that they exceed, or nil.
local function check_parts(base, args, turn)
  local task, run, instance, asked = args[4], args[5], args[6], 0
  local unchecked = only_calls_tool(args)
  if not unchecked then check_record(base, task, turn.flags) end
  if turn.withdrawn then check_withdrawn(base, task, turn) end
  local at = FIRST_PART
  while args[at] do
    local letter = args[at]
    if not REQUESTS_NOTHING[letter] then asked = asked + 1 end
    if letter == PART.call then
      if not unchecked then check_call(base, args, at, task, run) end
    elseif letter == PART.timer or letter == PART.question or letter == PART.receive then
      check_timers(base)
      if letter == PART.question then
        check_stream(base, 'out:' .. task)
        check_stream(base, 'replies')
      end
    elseif letter == PART.acquire then
      redis.call('HLEN', base .. 'meta')
    else
      check_sent(base, args, at)
    end
    at = at + PART_SIZE[letter]
  end
  local limit = max_steps_of(turn.task_header)
  if limit > 0 and turn.steps + asked > limit then
    return 'the task would take more than max_steps=' .. text(limit) .. ' steps'
  end
  if instance ~= '' then check_instance(base, instance, args[2]) end
  return nil
end

-- Collects a field of the run's hash, so that one command writes all of them.
local function put(turn, field, value)
  local n = #turn
  turn[n + 1], turn[n + 2] = field, value
end

-- The run waits for a step. In a group, the step is counted.
local function put_missing(turn, step, digest, kind, wait)
  put(turn, RUN.missing .. step, digest .. kind .. wait)
  if wait ~= WAKES.alone and wait ~= WAKES.never then
    turn.groups = turn.groups or {}
    turn.groups[wait] = (turn.groups[wait] or 0) + 1
  end
end

-- A step that the run wants to wait for already has its result. A group with only such steps is complete.
local function note_present(turn, step, wait, value)
  if wait == WAKES.alone then
    turn.ready, turn.woken_by, turn.woken_with = true, step, value
  elseif wait ~= WAKES.never then
    turn.groups = turn.groups or {}
    turn.groups[wait] = turn.groups[wait] or 0
  end
end

local function put_call(base, args, turn, at)
  local task, run = args[4], args[5]
  local target, step, name, call_key = args[at + 1], args[at + 2], args[at + 3], args[at + 4]
  local digest, wait, data, now = args[at + 5], args[at + 6], args[at + 7], args[8]
  local kept = keeps_children(turn.flags)
  local kind, failed, has_child, has_output, waits = start_call(base, task, run, step, target, name, call_key, data,
    args[at + 8], now, turn, kept and digest)
  if has_child then turn.flags = flag(turn.flags, FLAG.children) end
  if has_output then turn.flags = flag(turn.flags, FLAG.output) end
  if waits then turn.flags = flag(turn.flags, FLAG.timers) end
  if kind then return put_missing(turn, step, digest, kind, wait) end
  record_refused(base, task, turn.flags, run .. '/' .. step, target, name, call_key, data, now, failed)
  turn.steps = turn.steps + 1
  local value = digest .. RESULT.error .. now .. failed
  put(turn, RUN.result .. step, value)
  note_present(turn, step, wait, value)
end

local function timer_of_step(args, step) return 's|' .. args[4] .. '|' .. args[5] .. '|' .. step end

local function put_timer(base, args, turn, at)
  local step, digest, wait, after = unpack(args, at + 1, at + 4)
  add_timer(base, args[4], timer_of_step(args, step), now_ms(base) + tonumber(after), args[8])
  turn.flags = flag(turn.flags, FLAG.timers)
  put_missing(turn, step, digest, KIND.timer, wait)
end

local function put_question(base, args, turn, at)
  local task, now = args[4], args[8]
  local step, digest, wait, data, timeout, default = unpack(args, at + 1, at + 6)
  tell_question(base, task, turn.task_header, data, trace_of(base, task, turn.stored_flags))
  turn.flags = flag(turn.flags, FLAG.output)
  if timeout ~= '' then
    local member = timer_of_step(args, step)
    add_timer(base, task, member, now_ms(base) + tonumber(timeout), now)
    local late = RESULT.error .. now .. error_json('HumanTimeout', 'nobody answered in time')
    if default ~= '' then late = RESULT.ok .. now .. default end
    redis.call('HSET', base .. 'delayed', member, late)
    turn.flags = flag(turn.flags, FLAG.timers)
  end
  put(turn, RUN.question .. step, now .. data)
  put_missing(turn, step, digest, KIND.human, wait)
end

local function put_receive(base, args, turn, at)
  local task, run, now = args[4], args[5], args[8]
  local step, digest, wait, name, timeout, default = unpack(args, at + 1, at + 6)
  local kept = take_message(base, task, name)
  if kept then
    local value = digest .. RESULT.ok .. now .. kept
    put(turn, RUN.result .. step, value)
    note_present(turn, step, wait, value)
    record_rows(base, task, turn.flags, answer_row(run, step, 'receive', name, nil, now, now, RESULT.ok, kept))
    turn.steps = turn.steps + 1
    return
  end
  if timeout ~= '' then
    local member = timer_of_step(args, step)
    add_timer(base, task, member, now_ms(base) + tonumber(timeout), now)
    local late = RESULT.error .. now .. error_json('ReceiveTimeout', 'no message ' .. name .. ' came in time')
    if default ~= '' then late = RESULT.ok .. now .. default end
    redis.call('HSET', base .. 'delayed', member, late)
    turn.flags = flag(turn.flags, FLAG.timers)
  end
  put(turn, RUN.receives .. step, now .. name)
  put_missing(turn, step, digest, KIND.receive, wait)
  turn.receivers = turn.receivers or {}
  local steps = turn.receivers[name] or {}
  steps[#steps + 1] = step
  turn.receivers[name] = steps
end

local function put_null(turn, step, digest, now) put(turn, RUN.result .. step, digest .. RESULT.ok .. now .. 'null') end

local function put_sent(base, args, turn, at)
  send_part(base, args, at, args[4], args[5], turn)
  local last = at + PART_SIZE[args[at]] - 1
  put_null(turn, args[last - 1], args[last], args[8])
end

local function put_usage(_, args, turn, at) put_null(turn, args[at + 1], args[at + 2], args[8]) end

local function put_again(_, args, turn, at)
  local step, wait = args[at + 1], args[at + 2]
  local known = redis.call('HMGET', turn.run_key, RUN.missing .. step, RUN.result .. step, RUN.last_change)
  if known[3] then put(turn, RUN.after_change .. step, known[3]) end
  if known[1] then
    put_missing(turn, step, digest_of(known[1]), kind_of(known[1]), wait)
  else
    note_present(turn, step, wait, known[2] or '')
  end
end

local function put_nothing() end

local PUT_PART = {
  [PART.call] = put_call, [PART.timer] = put_timer, [PART.question] = put_question, [PART.message] = put_sent,
  [PART.publish] = put_sent, [PART.usage] = put_usage, [PART.again] = put_again, [PART.answered_by] = put_nothing,
  [PART.journaled] = put_nothing, [PART.receive] = put_receive, [PART.withdraw] = put_nothing,
}

-- A key is given up, and waited for, once the run's fields are written.
PUT_PART[PART.release] = function(_, args, turn, at)
  turn.released = args[at + 3]
  put_null(turn, args[at + 1], args[at + 2], args[8])
end
PUT_PART[PART.acquire] = function(_, args, turn, at)
  turn.acquired = args[at + 1]
  put_missing(turn, args[at + 1], args[at + 2], KIND.key, args[at + 3])
end
PUT_PART[PART.version] = function(_, args, turn, at) put(turn, TASK.version, args[at + 1]) end

-- Writes the run's fields: it is held for its steps, or resumed immediately if nothing is missing. Returns where it
-- waits.
local function write_run(base, args, turn, header, number)
  local task, run = args[4], args[5]
  if turn.groups then
    for group, count in pairs(turn.groups) do
      if count == 0 then turn.ready = true else put(turn, group, text(count)) end
    end
  end
  local next_turn, current = text(tonumber(number or '0') + 1), 'held'
  if turn.ready then
    local stream, agent, key = target_of(header)
    current = resume(base, task, run, stream, agent, key, next_turn, turn.woken_by or '', turn.woken_with or '')
  end
  put(turn, RUN.current, current)
  put(turn, RUN.turn, next_turn)
  if run == FIRST_RUN then
    put(turn, 'status', turn.ready and 'running' or 'waiting')
    put(turn, 'steps', text(turn.steps))
    if turn.flags ~= turn.stored_flags then put(turn, TASK.flags, turn.flags) end
  else
    redis.call('HSET', turn.key, 'steps', text(turn.steps), TASK.flags, turn.flags)
  end
  set_fields(turn.run_key, turn)
  if turn.unrecorded then redis.call('HDEL', turn.run_key, RUN.unrecorded, RUN.turn_owner) end
  return current
end

-- The turn waits: the calls that it makes start, and the run continues with their results.
local function suspend(base, args, turn, header, number)
  local instance, rows, at = args[6], args[9], FIRST_PART
  if turn.withdrawn then rows = withdraw_steps(base, args[4], turn, rows) end
  while args[at] do
    PUT_PART[args[at]](base, args, turn, at)
    at = at + PART_SIZE[args[at]]
  end
  if turn.waiting then QUEUE.flush(base, turn) end
  local current = write_run(base, args, turn, header, number)
  -- Only now: a receiver that is not stored as missing counts as gone.
  for name, steps in pairs(turn.receivers or {}) do add_receivers(base, args[4], args[5], name, steps) end
  if turn.usage then redis.call('HSET', turn.key, TASK.usage, turn.usage) end
  if rows ~= '' then record_rows(base, args[4], turn.flags, rows) end
  settle_last(base, args[2], args[3])
  if instance == '' then return end
  if args[11] ~= '' then redis.call('HSET', base .. 'inst:' .. instance, INSTANCE.working_state, args[11]) end
  if turn.released then KEY.release(base, instance, args[4], args[5], turn.released) end
  if turn.acquired then return KEY.acquire(base, instance, args[4], args[5], turn.acquired) end
  if current == 'held' and redis.call('LLEN', base .. 'nest:' .. instance) > 0 then
    local holders = redis.call('HGET', base .. 'inst:' .. instance, INSTANCE.holders)
    if KEY.has(holders, args[4] .. '|' .. args[5]) then start_nested(base, instance, holders) end
  end
end

local function commit_turn(keys, args)
  local base, stream, entry, task, run, instance, mode = keys[1], args[2], args[3], args[4], args[5], args[6], args[7]
  if not may_commit(base, args[1]) then return 'FENCED' end
  local turn, status, current, header, number = read_turn(base, args)
  if current ~= entry or ENDED[status] then
    if instance ~= '' then check_instance(base, instance, stream) end
    settle_late(base, stream, entry, instance, task, run)
    return 'DONE'
  end
  local goes_on = mode == MODE.waits or mode == MODE.completed
  if goes_on and begun_by_another(args, turn) then return 'LOST' end
  local malformed = read_parts(args, turn)
  if malformed then return malformed end
  local over = turn.reports and count_usage(turn, mode)
  if not over and mode == MODE.waits then over = check_parts(base, args, turn) end
  if over then return 'LIMIT ' .. over end
  if mode == MODE.waits then suspend(base, args, turn, header, number) else end_run(base, args, turn, mode) end
  return 'OK'
end
