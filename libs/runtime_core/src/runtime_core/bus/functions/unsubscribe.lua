-- Ends a subscription.
-- KEYS 1 base · ARGV 1 kind: `type` or `prefix` · 2 topic or prefix · 3 agent
-- RETURNS 1 · 0 if there is none
local function unsubscribe(keys, args)
  local tk = keys[1] .. 'topics'
  local field, line = '=' .. args[2], args[3]
  if args[1] == 'prefix' then field, line = '^', args[2] .. ' ' .. args[3] end
  local there = redis.call('HGET', tk, field)
  if not there then return 0 end
  local kept, found = {}, 0
  for _, other in ipairs(lines(there)) do
    if other == line then found = 1 else kept[#kept + 1] = other end
  end
  if #kept == 0 then redis.call('HDEL', tk, field) else redis.call('HSET', tk, field, table.concat(kept, '\n')) end
  return found
end
