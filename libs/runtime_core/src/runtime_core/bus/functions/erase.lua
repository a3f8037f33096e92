-- Erases an ended task from the broker: its hash, output, dead letters and index entries.
-- KEYS 1 base · ARGV 1 task · RETURNS 'OK' · 'unknown' · its status if it has not ended
local function erase(keys, args)
  local base, task = keys[1], args[1]
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', RUN.header)
  if v[1] and not ENDED[v[1]] then return v[1] end
  local letters = redis.call('ZRANGE', base .. 'letters', 0, -1)
  redis.call('ZCARD', base .. 'index')
  redis.call('HLEN', base .. 'meta')
  redis.call('XLEN', base .. 'dead')
  local found = v[1] and 'OK' or 'unknown'
  if redis.call('DEL', base .. 'out:' .. task) == 1 then found = 'OK' end
  if v[1] then drop_children(base, task) end
  redis.call('DEL', key)
  if redis.call('ZREM', base .. 'index', task) == 1 then redis.call('HINCRBY', base .. 'meta', 'swept', 1) end
  local tenant = v[2] and header_of(v[2]).tenant or ''
  if tenant ~= '' then redis.pcall('ZREM', base .. 'index:' .. tenant, task) end
  for _, member in ipairs(letters) do
    local owner, letter = split_ref(member)
    if owner == task then
      local kept = redis.call('XRANGE', base .. 'dead', letter, letter)[1]
      if kept then dead.forget(base, letter, kept[2]) end
      redis.call('ZREM', base .. 'letters', member)
      found = 'OK'
    end
  end
  return found
end
