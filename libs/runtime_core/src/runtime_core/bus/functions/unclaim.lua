-- Gives up a claim, so that its id is free again. The partition that it names must have refused it first.
-- KEYS 1 base · ARGV 1 field (`task_id`, `id`) · 2 task · 3 source · 4 event id · 5 token
-- RETURNS 'OK' · 'DONE' if the id has another claim by now, or none
local function unclaim(keys, args)
  local base, task, token = keys[1], args[2], args[5]
  local line = id_field(args[1], task, args[3], args[4])
  local place, _, held = holder_of(base, args[1], line, task)
  if not place or held ~= token then return 'DONE' end
  redis.call('LLEN', base .. 'seen_order')
  redis.call('HLEN', base .. 'places')
  redis.call('HDEL', base .. 'seen', line)
  -- From the newest on: a claim that is given up is mostly one of the last.
  redis.call('LREM', base .. 'seen_order', -1, string.sub(token, 1, -4) .. '\n' .. line)
  if args[1] == 'task_id' then redis.call('HDEL', base .. 'places', task) end
  return 'OK'
end
