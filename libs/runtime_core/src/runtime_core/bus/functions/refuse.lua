-- Refuses a claim in the partition where its submit would start: from now on no submit with this token starts.
-- KEYS 1 base · ARGV 1 field (`task_id`, `id`) · 2 task · 3 source · 4 event id · 5 token
-- RETURNS {'refused'} · {'started', digest} if a task with this id has started here: nothing was written
local function refuse(keys, args)
  local base, task = keys[1], args[2]
  local line = id_field(args[1], task, args[3], args[4])
  local found = redis.call('HGET', base .. 'seen', line)
  local first = found and lines(found) or {}
  if args[1] == 'task_id' then
    local header = redis.call('HGET', base .. 'task:' .. task, RUN.header)
    if header then return {'started', lines(header)[9]} end
  elseif found and not string.match(first[3] or '', '^[@!]') then
    return {'started', first[2]}
  end
  local newest = tonumber(string.match(first[3] or '', '^!(%d+)$') or '0')
  if newest >= tonumber(args[5]) then return {'refused'} end
  redis.call('LLEN', base .. 'seen_order')
  local created = text(server_ms())
  remember(base, line, task .. '\n\n!' .. args[5], created, redis.call('HGET', base .. 'meta', 'dedupe_max'))
  return {'refused'}
end
