-- Answers a step that was asked in another partition: put if absent, so that a relay may repeat it.
-- KEYS 1 base · ARGV 1 task · 2 run · 3 step · 4 status `K` or `E` · 5 payload (JSON) · 6 agent · 7 the task there
-- RETURNS 'OK' · 'DONE' where the step has its result or nobody waits for it any more
local function answered(keys, args)
  local base, task, run, step = keys[1], args[1], args[2], args[3]
  local key = base .. 'task:' .. task
  local status = redis.call('HGET', key, 'status')
  if not status or ENDED[status] then return 'DONE' end
  redis.call('XLEN', base .. 'record')
  check_waiting(base, task, run)
  local now = text(now_ms(base))
  if not answer(base, task, run, step, args[4], now, args[5]) then return 'DONE' end
  redis.call('HDEL', key, 'k:' .. run .. '/' .. step)
  redis.call('HINCRBY', key, 'steps', 1)
  redis.call('XADD', base .. 'record', '*', 't', task, 'd', '[{"run":' .. quote(run .. '/' .. step) ..
    ',"kind":"agent","name":' .. quote(args[6]) .. ',"status":"' .. (args[4] == 'K' and 'completed' or 'failed') ..
    '","started":' .. now .. ',"ended":' .. now .. ',"cause":' .. quote(args[7]) ..
    (args[4] == 'K' and ',"output":' or ',"error":') .. args[5] .. '}]')
  return 'OK'
end
