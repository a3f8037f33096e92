-- A reader asks for a task's stream: its final event shall be there too, and the questions that are open now.
-- KEYS 1 base · ARGV 1 task · RETURNS 1, or 0 where the task has ended or is not known
local function watch(keys, args)
  local base, task = keys[1], args[1]
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', 'fl')
  if not v[1] or ENDED[v[1]] then return 0 end
  if string.find(v[2] or '', 'o', 1, true) then return 1 end
  check_stream(base, 'out:' .. task)
  redis.call('HSET', key, 'fl', flag(v[2] or '', 'o'))
  local runs = {key}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local child = string.match(field, '^k:(.*)$')
    if child then runs[#runs + 1] = run_key(base, task, child) end
  end
  for _, run in ipairs(runs) do
    local fields = redis.call('HGETALL', run)
    for i = 1, #fields, 2 do
      local step = string.match(fields[i], '^q:(.*)$')
      if step and redis.call('HEXISTS', run, 'm:' .. step) == 1 then
        publish_out(base, task, 'weft.human.requested', string.sub(fields[i + 1], 14))
      end
    end
  end
  return 1
end
