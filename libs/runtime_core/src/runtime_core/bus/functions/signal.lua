-- Answers a question: put if absent, so that of two answers (or an answer and the deadline) one counts.
-- KEYS 1 base · ARGV 1 task · 2 request id (run ':' step) · 3 value (JSON)
-- RETURNS {'ok'} · {'unknown'} task · {'ended', status} · {'answered'} · {'no_request'}
local function signal(keys, args)
  local base, task = keys[1], args[1]
  local run, step = string.match(args[2], '^(.*):([^:]*)$')
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if not status then return {'unknown'} end
  if not run then return {'no_request'} end
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', rk, 'm:' .. step, 'q:' .. step)
  if not v[2] then
    if ENDED[status] then return {'ended', status} end
    return {'no_request'}
  end
  if ENDED[status] then return {'ended', status} end
  if not v[1] then return {'answered'} end
  check_waiting(base, task, run)
  check_stream(base, 'record')
  check_timers(base)
  local member = 's|' .. task .. '|' .. run .. '|' .. step
  if redis.call('ZREM', base .. 'timers', member) == 1 then
    redis.call('HDEL', base .. 'delayed', member)
    redis.call('HDEL', base .. 'task:' .. task, 'z:' .. member)
  end
  local now = text(now_ms(base))
  if answer(base, task, run, step, 'K', now, args[3]) then
    record_answer(base, task, run, step, string.sub(v[2], 1, 13), now, 'K', args[3])
  end
  return {'ok'}
end
