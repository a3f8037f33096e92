-- Commits the result of a tool call or an engine step: fence, acknowledgement, journal of the waiting run, record, and
-- the run's resume if no other result is missing.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run (the call's own: parent run + '/' + step) · 6 status `K` or `E`
--      7 now (epoch ms, 13 digits) · 8 result (JSON), or the error object · 9 record (JSON steps)
--      10 steps in the record
--      11 usage of the call (JSON) or '' · 12 traceparent of the span that made it or ''
--      13 '1' if it was marked as started
-- RETURNS 'OK', even if its usage exceeds the task's limit, which ends the task here
--         · 'DONE' if the step has its result or the task is over · 'FENCED'

-- A call that may not be repeated has ended: remove its mark.
local function forget_mark(base, args)
  if args[13] == '1' then redis.pcall('HDEL', base .. 'started', args[4] .. '/' .. args[5]) end
end

-- The step has its result, or the task is over.
local function settle_unneeded(base, args)
  if args[13] == '1' then keep_late(base, args[4], args[5], args[6], args[7], args[8]) end
  -- Remove the mark of a call that may not be repeated, unless this is a copy of an entry that was settled.
  if settle(base, args[2], args[3]) == 1 then redis.pcall('HDEL', base .. 'started', args[4] .. '/' .. args[5]) end
end

-- Ends the task, whose usage is over a limit. `task` has its fields.
local function end_at_limit(base, args, task, flags, usage, steps, over)
  local ending = check_end(base, args[4], task.header, flags, 'failed')
  settle(base, args[2], args[3])
  forget_mark(base, args)
  redis.call('HSET', task.key, TASK.usage, usage)
  end_task(base, args[4], ending, flags, 'failed', error_json('LimitExceeded', over), steps, args[7], args[9], false,
    in_flight(task.current))
end

-- Returns whether this result wakes the run: it waits for this step alone, or this is the last one of its group.
local function wakes(rk, current, wait)
  if current ~= 'held' or wait == WAKES.never then return false end
  return wait == WAKES.alone or redis.call('HINCRBY', rk, wait, -1) <= 0
end

-- Writes the result, and the run's new place if it is resumed.
local function write_result(key, rk, field, value, steps, resumed)
  if rk ~= key then
    if resumed then
      redis.call('HSET', rk, field, value, RUN.current, resumed)
    else
      redis.call('HSET', rk, field, value)
    end
    redis.call('HSET', key, 'steps', steps)
  elseif resumed then
    redis.call('HSET', key, field, value, RUN.current, resumed, 'steps', steps, 'status', 'running')
  else
    redis.call('HSET', key, field, value, 'steps', steps)
  end
end

local function commit_call(keys, args)
  local base, task, call = keys[1], args[4], args[5]
  local parent, step = parent_of(call)
  if not may_commit(base, args[1]) then return 'FENCED' end
  local key = base .. 'task:' .. task
  local field = RUN.missing .. step
  local status, known_steps, missing, current, header, turn, known_flags =
    unpack(redis.call('HMGET', key, 'status', 'steps', field, RUN.current, RUN.header, RUN.turn, TASK.flags))
  local rk, task_header, task_current = key, header, current
  if parent ~= FIRST_RUN then
    rk = run_key(base, task, parent)
    missing, current, header, turn = unpack(redis.call('HMGET', rk, field, RUN.current, RUN.header, RUN.turn))
  end
  if not missing or not status or ENDED[status] then
    settle_unneeded(base, args)
    return 'DONE'
  end
  local flags, steps, usage = known_flags or '', text(tonumber(known_steps or '0') + tonumber(args[10])), nil
  check_shown(base, task, flags)
  if args[11] and args[11] ~= '' then
    local held = redis.call('HMGET', key, TASK.usage, TASK.limits)
    local used = usage_with(held[1], {args[11]})
    local over = over_limit(used, held[2])
    usage, flags = cjson.encode(used), flag(flags, FLAG.usage)
    if over then
      end_at_limit(base, args, {key = key, header = task_header, current = task_current}, flags, usage, steps, over)
      return 'OK'
    end
  end
  local stream, agent, instance_key = target_of(header)
  if current == 'held' then check_target(base, stream, agent, instance_key) end

  -- First: it needs no check before, since it changes nothing if it fails.
  record_rows(base, task, flags, args[9])
  settle_last(base, args[2], args[3])
  forget_mark(base, args)
  if usage then redis.call('HSET', key, TASK.usage, usage, TASK.flags, flags) end
  if args[12] and args[12] ~= '' then note_answer(base, task, call, args[12]) end
  redis.call('HDEL', rk, field)
  local wait, value = wait_of(missing), digest_of(missing) .. args[6] .. args[7] .. args[8]
  local next_turn, changed = keep_override(rk, instance_key, turn or '0', step, current)
  local to_process = string.sub(wait, 1, 1) == WAKES.by_reply
  local resumed
  if not to_process and wakes(rk, current, wait) then
    resumed = resume(base, task, parent, stream, agent, instance_key, next_turn, step, value)
  end
  write_result(key, rk, RUN.result .. step, value, steps, resumed)
  if (resumed or current) == 'pend' then KEY.note_unseen(rk, step) end
  if to_process then tell_asker(base, rk, task, parent, step, wait, value, changed) end
  SLOT.free_flagged(base, flags, task, call)
  return 'OK'
end
