-- Answers a step that was requested in another partition, unless it has its result, so that a relay may repeat the
-- answer.
-- KEYS 1 base · ARGV 1 task · 2 run · 3 step · 4 status `K` or `E` · 5 payload (JSON) · 6 agent · 7 the other task
--      8 usage of that task (JSON) or ''; if it exceeds the limit of this task, this task ends
--      9 traceparent of the span that ended that task or ''
-- RETURNS 'OK' · 'DONE' if the step has its result or nobody waits for it any more

-- Whether the step has an answer that is held back: to the process that waits for it, it is still missing.
local function is_held_back(rk, step)
  local all = all_held_back(rk)
  for i = 1, #all, 4 do
    if all[i] == step then return true end
  end
  return false
end

local function answer_request(keys, args)
  local base, task, run, step = keys[1], args[1], args[2], args[3]
  local key = base .. 'task:' .. task
  local status, known_flags, used, limits, header, current, steps =
    unpack(redis.call('HMGET', key, 'status', TASK.flags, TASK.usage, TASK.limits, RUN.header, RUN.current, 'steps'))
  if not status or ENDED[status] then return 'DONE' end
  local rk = run_key(base, task, run)
  if redis.call('HEXISTS', rk, RUN.missing .. step) == 0 or is_held_back(rk, step) then return 'DONE' end
  local flags = known_flags or ''
  redis.call('ZCARD', base .. 'requests')
  check_record(base, task, flags)
  check_waiting(base, task, run)
  local now = text(now_ms(base))
  local usage, over, ending
  if args[8] and args[8] ~= '' and args[8] ~= '{}' then
    local sum = usage_with(used, {args[8]})
    over = over_limit(sum, limits)
    usage, flags = cjson.encode(sum), flag(flags, FLAG.usage)
    if over then ending = check_end(base, task, header, flags, 'failed') end
    redis.call('HSET', key, TASK.usage, usage, TASK.flags, flags)
  end
  if over then
    end_task(base, task, ending, flags, 'failed', error_json('LimitExceeded', over), steps or '0', now, '[]', false,
      in_flight(current))
    return 'OK'
  end
  if args[9] and args[9] ~= '' then note_answer(base, task, run .. '/' .. step, args[9]) end
  answer(base, task, run, step, args[4], now, args[5])
  redis.call('HDEL', key, TASK.child .. run .. '/' .. step)
  close_request(base, task, run, step)
  redis.call('HINCRBY', key, 'steps', 1)
  record_rows(base, task, flags, '[{"run":' .. quote(run .. '/' .. step) ..
    ',"kind":"agent","name":' .. quote(args[6]) .. ',"status":"' ..
    (args[4] == RESULT.ok and 'completed' or 'failed') ..
    '","started":' .. now .. ',"ended":' .. now .. ',"cause":' .. quote(args[7]) ..
    (args[4] == RESULT.ok and ',"output":' or ',"error":') .. args[5] .. '}]')
  return 'OK'
end
