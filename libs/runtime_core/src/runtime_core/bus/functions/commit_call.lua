-- Commits the result of a tool call or an engine step: fences, acknowledgement, journal of the waiting run, its
-- resume where nothing is missing any more, record.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run (the call's own: parent run + '/' + step) · 6 status `K` or `E`
--      7 now (epoch ms, 13 digits) · 8 result (JSON), or the error object · 9 record (JSON steps) · 10 steps in the record
--      11 what the call has used (JSON) or '' · 12 traceparent of the span that made it or ''
--      13 '1' where it was marked as started
-- RETURNS 'OK', also where what it has used is over the task's limit, which ends the task here · 'DONE' where the step has its result or the task is over · 'FENCED'
local function commit_call(keys, args)
  local base, task = keys[1], args[4]
  local parent, step = parent_of(args[5])
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local key = base .. 'task:' .. task
  local field = 'm:' .. step
  local v = redis.call('HMGET', key, 'status', 'steps', field, 'cur', 'h', 'u', 'fl')
  local rk, missing, cur, h, turn = key, v[3], v[4], v[5], v[6]
  if parent ~= 'r' then
    rk = run_key(base, task, parent)
    local w = redis.call('HMGET', rk, field, 'cur', 'h', 'u')
    missing, cur, h, turn = w[1], w[2], w[3], w[4]
  end
  if not missing or not v[1] or ENDED[v[1]] then
    if args[13] == '1' then keep_late(base, task, args[5], args[6], args[7], args[8]) end
    -- The mark of a call that may not be repeated goes with the call, unless this is a copy of an entry that was settled.
    if settle(base, args[2], args[3]) == 1 then redis.pcall('HDEL', base .. 'started', task .. '/' .. args[5]) end
    return 'DONE'
  end
  local flags = v[7] or ''
  local steps = text(tonumber(v[2] or '0') + tonumber(args[10]))
  check_record(base, task, flags)
  local usage
  if args[11] and args[11] ~= '' then
    local held = redis.call('HMGET', key, 'us', 'lim')
    local used = usage_with(held[1], {args[11]})
    local over = over_limit(used, held[2])
    usage, flags = cjson.encode(used), flag(flags, 'u')
    if over then
      local ending = check_end(base, task, v[5], flags, 'failed')
      settle(base, args[2], args[3])
      if args[13] == '1' then redis.pcall('HDEL', base .. 'started', task .. '/' .. args[5]) end
      redis.call('HSET', key, 'us', usage)
      local in_flight = v[4] and string.find(v[4], '-', 1, true)
      end_task(base, task, ending, flags, 'failed', error_json('LimitExceeded', over), steps, args[7], args[9], false, in_flight)
      return 'OK'
    end
  end
  local stream, agent, key_of_run = target_of(h)
  if cur == 'held' then check_target(base, stream, agent, key_of_run) end
  local wait = string.sub(missing, 10)
  local value = string.sub(missing, 1, 8) .. args[6] .. args[7] .. args[8]
  settle(base, args[2], args[3])
  if args[13] == '1' then redis.pcall('HDEL', base .. 'started', task .. '/' .. args[5]) end
  if usage then redis.call('HSET', key, 'us', usage, 'fl', flags) end
  if args[12] and args[12] ~= '' then note_answer(base, task, args[5], args[12]) end
  redis.call('HDEL', rk, field)
  local changed
  turn, changed = keep_override(rk, key_of_run, turn or '0', step)
  local ready = false
  local asked = string.sub(wait, 1, 1) == '>'
  if cur == 'held' and not asked then
    ready = wait == '!'
    if not ready and wait ~= '0' then ready = redis.call('HINCRBY', rk, wait, -1) <= 0 end
  end
  if ready then
    local next_cur = resume(base, task, parent, stream, agent, key_of_run, turn, step, value)
    if rk == key then
      redis.call('HSET', key, 'j:' .. step, value, 'cur', next_cur, 'steps', steps, 'status', 'running')
    else
      redis.call('HSET', rk, 'j:' .. step, value, 'cur', next_cur)
      redis.call('HSET', key, 'steps', steps)
    end
  elseif rk == key then
    redis.call('HSET', key, 'j:' .. step, value, 'steps', steps)
  else
    redis.call('HSET', rk, 'j:' .. step, value)
    redis.call('HSET', key, 'steps', steps)
  end
  if asked then tell_asker(base, rk, task, parent, step, wait, value, changed) end
  record_rows(base, task, flags, args[9])
  return 'OK'
end
