-- Retries a delivery later: until then it waits in the timers, and its instance stays busy.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run · 6 delay ms · 7 next attempt · 8 error (JSON) or ''
--      9 usage of the attempt (JSON) or '': all attempts of a call count
-- RETURNS 'OK' · 'DONE' · 'FENCED'

-- The fields of the next attempt's entry: the same, with its number, and the new error (JSON) among the errors.
local function fields_of_next(fields, attempt, error)
  local head, errors = lines(fields[2]), nil
  head[7] = attempt
  local kept = {ENTRY.header, table.concat(head, '\n')}
  for i = 3, #fields, 2 do
    if fields[i] == ENTRY.errors then errors = fields[i + 1] else
      kept[#kept + 1] = fields[i]
      kept[#kept + 1] = fields[i + 1]
    end
  end
  if error ~= '' then
    errors = errors and string.sub(errors, 1, -2) .. ',' .. error .. ']' or '[' .. error .. ']'
  end
  if errors then
    kept[#kept + 1] = ENTRY.errors
    kept[#kept + 1] = dead.errors(errors)
  end
  return kept
end

local function retry(keys, args)
  local base, stream, entry, task, run = keys[1], args[2], args[3], args[4], args[5]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local found = redis.call('XRANGE', base .. stream, entry, entry)[1]
  local is_turn, key = is_agent_stream(stream), base .. 'task:' .. task
  if not found then
    -- A late copy of a call that continues under another entry: the mark of that call stays.
    settle(base, stream, entry)
    return 'DONE'
  end
  local fields = found[2]
  if not QUEUE.is_wanted(base, entry, is_turn, task, run, redis.call('HGET', key, 'status')) then
    local head = lines(fields[2])
    local instance = is_turn and head[6] ~= '' and head[5] .. '/' .. head[6] or ''
    settle_unwanted(base, stream, entry, is_turn, instance, task, run, text(now_ms(base)), error_json('UnknownOutcome',
      'the task ended while this call was running: find out whether it took effect'))
    return 'DONE'
  end
  local kept, usage = fields_of_next(fields, args[7], args[8]), nil
  if args[9] and args[9] ~= '' then usage = cjson.encode(usage_with(redis.call('HGET', key, TASK.usage), {args[9]})) end
  local member = 'e|' .. stream .. '|' .. entry
  check_timers(base)
  settle(base, stream, entry)
  if usage then
    redis.call('HSET', key, TASK.usage, usage, TASK.flags, flag(redis.call('HGET', key, TASK.flags) or '', FLAG.usage))
  end
  redis.call('HSET', base .. 'delayed', member, cmsgpack.pack(kept))
  add_timer(base, task, member, now_ms(base) + tonumber(args[6]))
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, 'retry') end
  return 'OK'
end
