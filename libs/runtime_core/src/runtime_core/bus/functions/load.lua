-- What a replay needs of a run, in one reading: its fields without those of other runs, and its instance's state.
-- KEYS 1 base · ARGV 1 task · 2 run · 3 instance or '' · 4 entry
-- RETURNS {cur, status, the run's context, else the task's, state as it was when the run began, task's header, field, value …} or nothing where the run is no more
local function load(keys, args)
  local base, task, run = keys[1], args[1], args[2]
  local rk = run_key(base, task, run)
  local all = redis.call('HGETALL', rk)
  if #all == 0 then return {} end
  local v = redis.call('HMGET', base .. 'task:' .. task, 'status', 'x', 'h')
  local state = ''
  if args[3] ~= '' then
    state = redis.call('HGET', rk, 's0') or redis.call('HGET', base .. 'inst:' .. args[3], 'state') or ''
  end
  local reply = {'', v[1] or '', v[2] or '', state, v[3] or ''}
  for i = 1, #all, 2 do
    local field = all[i]
    if field == 'cur' then reply[1] = all[i + 1] end
    -- What came with the run's own event goes before the task's.
    if field == 'x' then reply[3] = all[i + 1] end
    local prefix = string.sub(field, 1, 2)
    if prefix == 'm:' or prefix == 'j:' or prefix == 'o:' or field == 'd' or field == 'u' or field == 'h' or field == 'w' or field == 'wd' then
      reply[#reply + 1] = field
      reply[#reply + 1] = all[i + 1]
    end
  end
  return reply
end
