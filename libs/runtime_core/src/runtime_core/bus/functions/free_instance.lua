-- Frees an instance of the runs that hold it for ended tasks, whose deliveries are gone: its next event starts.
-- KEYS 1 base · ARGV 1 instance (`agent/key`)
-- RETURNS 'OK'
local function free_instance(keys, args)
  local base, inst = keys[1], args[1]
  local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  if not busy then return 'OK' end
  check_instance(base, inst, redis.call('HGET', base .. 'agents', string.match(inst, '^[^/]*')) or nil)
  for _, ref in ipairs(lines(busy)) do
    local task, run = split_ref(ref)
    local status = redis.call('HGET', base .. 'task:' .. (task or ''), 'status')
    if not status or ENDED[status] then release(base, inst, task, run) end
  end
  return 'OK'
end
