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
  local base, task, run, inst = keys[1], args[1], args[2], args[3]
  local rk = run_key(base, task, run)
  local all = redis.call('HGETALL', rk)
  if #all == 0 then return {} end
  local reply, current, context, state_at_start, of_task = {'', '', '', '', ''}, '', nil, nil, {}
  for i = 1, #all, 2 do
    local field, value = all[i], all[i + 1]
    if field == RUN.current then
      current = value
    elseif field == RUN.context then
      context = value
    elseif field == RUN.state_at_start then
      state_at_start = value
    elseif field == RUN.header then
      of_task[3] = value
    elseif field == 'status' then
      of_task[1] = value
    end
    if LOADED[field] or LOADED[string.sub(field, 1, 2)] then
      reply[#reply + 1] = field
      reply[#reply + 1] = value
    end
  end
  if run ~= FIRST_RUN then
    of_task = redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.context, RUN.header)
  end
  if inst ~= '' then
    local v = redis.call('HMGET', base .. 'inst:' .. inst, INSTANCE.holders, 'state')
    if is_below_in(base, string.match(inst, '^[^/]*'), v[1], task .. '|' .. run) and current == args[4] then
      settle(base, args[5], args[4])
      redis.call('HSET', rk, RUN.current, 'pend')
      return {}
    end
    reply[4] = state_at_start or v[2] or ''
    if state_at_start then
      reply[#reply + 1] = INSTANCE.holders
      reply[#reply + 1] = v[1] or ''
    end
  end
  -- The context of the run's own event takes precedence over the task's.
  reply[1], reply[2], reply[3], reply[5] = current, of_task[1] or '', context or of_task[2] or '', of_task[3] or ''
  return reply
end
