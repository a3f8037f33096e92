-- Reads everything that a replay needs: the run's fields without those of other runs, and its instance's state. If
-- another run is nested on this one in its instance, this one is not handled before the nested run ends, which resumes
-- it (`pend`). It had called in mid-turn or failed, and its process has died or its retry is due.
-- KEYS 1 base · ARGV 1 task · 2 run · 3 instance or '' · 4 entry · 5 stream
-- RETURNS {cur, status, the run's context, else the task's, state at the run's start, task's header,
--         field, value …, of a nested run also the holders of its instance} or nothing if the run is gone, or waits for another one
local LOADED = {
  [RUN.missing] = true, [RUN.result] = true, [RUN.override_from] = true, [RUN.input] = true, [RUN.turn] = true,
  [RUN.header] = true, [RUN.unrecorded] = true, [TASK.withdrawn] = true, [RUN.emitted] = true,
  [RUN.output_attempt] = true, [RUN.after_change] = true,
}

local function load(keys, args)
  local base, task, run = keys[1], args[1], args[2]
  local rk = run_key(base, task, run)
  local all = redis.call('HGETALL', rk)
  if #all == 0 then return {} end
  local status, task_context, task_header =
    unpack(redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.context, RUN.header))
  local state = ''
  if args[3] ~= '' then
    local agent, key = string.match(args[3], '^([^/]*)/(.*)$')
    if is_below(base, agent, key, task .. '|' .. run) and redis.call('HGET', rk, RUN.current) == args[4] then
      settle(base, args[5], args[4])
      redis.call('HSET', rk, RUN.current, 'pend')
      return {}
    end
    state = redis.call('HGET', rk, RUN.state_at_start) or redis.call('HGET', base .. 'inst:' .. args[3], 'state') or ''
  end
  local reply = {'', status or '', task_context or '', state, task_header or ''}
  for i = 1, #all, 2 do
    local field = all[i]
    if field == RUN.current then reply[1] = all[i + 1] end
    -- The context of the run's own event takes precedence over the task's.
    if field == RUN.context then reply[3] = all[i + 1] end
    if LOADED[field] or LOADED[string.sub(field, 1, 2)] then
      reply[#reply + 1] = field
      reply[#reply + 1] = all[i + 1]
    elseif field == RUN.state_at_start and args[3] ~= '' then
      reply[#reply + 1] = INSTANCE.holders
      reply[#reply + 1] = redis.call('HGET', base .. 'inst:' .. args[3], INSTANCE.holders) or ''
    end
  end
  return reply
end
