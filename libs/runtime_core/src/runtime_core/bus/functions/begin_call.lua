-- Begins a model call in mid-turn: counts the attempt durably, and reserves the call's maximum usage, so that
-- concurrent calls cannot exceed a limit of the task together. A repeat of the same step replaces its own reservation.
-- The write that journals the result, or the end of the run, releases it.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 reservation (JSON: name to [least, most]) or ''
-- RETURNS {attempt, granted amounts (JSON: name to amount, of the names that the task limits)} · 'FENCED'
--         · 'DONE' if the turn is no longer this entry's
--         · 'WAIT <why>' if other calls hold what this one needs · 'LIMIT <why>' if it can never have it

-- The amounts to reserve for a call, by name, of what the task limits. `held` are the reservations of other calls.
-- Returns nil and the reply if one of them does not fit.
local function grant(wanted, used, limits, held)
  local granted = {}
  for name, bounds in pairs(wanted) do
    local least, most, limit = tonumber(bounds[1]), tonumber(bounds[2]), limits[name]
    if limit then
      local free, others = limit - (used[name] or 0), 0
      for _, amounts in pairs(held) do others = others + (amounts[name] or 0) end
      -- Sums of fractions are not exact: usage at the limit is within it.
      local tolerance = limit * 1e-9
      if least > free + tolerance then
        return nil, string.format(
          'LIMIT the next model call needs at least %.14g %s, and of the task\'s max_%s=%.14g it has used %.14g',
          least, name, name, limit, used[name] or 0)
      end
      if least > free - others + tolerance then
        return nil, string.format('WAIT other model calls of the task have reserved %.14g %s', others, name)
      end
      granted[name] = math.min(most, free - others)
    end
  end
  return granted
end

local function begin_call(keys, args)
  local base, task, run, step = keys[1], args[3], args[4], args[5]
  local key, run_hash = base .. 'task:' .. task, run_key(base, task, run)
  local status, used, limits, reserved, flags, current, attempts = read_run(base, task, run, 5,
    'status', TASK.usage, TASK.limits, TASK.reserved, TASK.flags, RUN.current, RUN.attempts .. step)
  local lost = turn_lost(base, args[1], args[2], current, status)
  if lost then return lost end
  local granted, held = {}, reserved and cjson.decode(reserved) or {}
  if args[6] ~= '' then
    local own, refused = run .. '|' .. step, nil
    held[own] = nil
    granted, refused = grant(cjson.decode(args[6]), used and cjson.decode(used) or {},
      limits and cjson.decode(limits) or {}, held)
    if refused then return redis.status_reply(refused) end
    if next(granted) then held[own] = granted end
  end
  local attempt = text(tonumber(attempts or '0') + 1)
  redis.call('HSET', run_hash, RUN.attempts .. step, attempt)
  if next(granted) then
    redis.call('HSET', key, TASK.reserved, cjson.encode(held), TASK.flags, flag(flags or '', FLAG.reserved))
  end
  return {attempt, next(granted) and cjson.encode(granted) or '{}'}
end
