-- Begins a model call in the middle of a turn: counts the attempt durably, and reserves the call's maximum usage, so
-- that
-- concurrent calls cannot exceed a limit of the task together. A repeat of the same step replaces its own reservation.
-- The write that journals the result, or the end of the run, releases it.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 step · 6 reservation (JSON: name to [least, most]) or ''
-- RETURNS {attempt, granted amounts (JSON: name to amount, of the names that the task limits)} · 'FENCED'
--         · 'DONE' if the turn is no longer this entry's
--         · 'WAIT <why>' if other calls hold what this one needs · 'LIMIT <why>' if it can never have it
local function begin_call(keys, args)
  local base, task, run, step = keys[1], args[3], args[4], args[5]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  local key = base .. 'task:' .. task
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', key, 'status', TASK.usage, TASK.limits, TASK.reserved, TASK.flags)
  local r = redis.call('HMGET', rk, RUN.current, RUN.attempts .. step)
  if r[1] ~= args[2] or ENDED[v[1]] then return redis.status_reply('DONE') end
  local granted, reserved = {}, nil
  if args[6] ~= '' then
    local used, limits = v[2] and cjson.decode(v[2]) or {}, v[3] and cjson.decode(v[3]) or {}
    local held, own = v[4] and cjson.decode(v[4]) or {}, run .. '|' .. step
    held[own] = nil
    local mine = {}
    for name, wanted in pairs(cjson.decode(args[6])) do
      local least, most = tonumber(wanted[1]), tonumber(wanted[2])
      if limits[name] then
        local free = limits[name] - (used[name] or 0)
        -- Sums of fractions are not exact: usage at the limit is within it.
        local fits = limits[name] * 1e-9
        local others = 0
        for _, amounts in pairs(held) do others = others + (amounts[name] or 0) end
        if least > free + fits then
          return redis.status_reply(string.format('LIMIT the next model call needs at least %.14g %s, and of the task\'s max_%s=%.14g it has used %.14g',
            least, name, name, limits[name], used[name] or 0))
        end
        if least > free - others + fits then
          return redis.status_reply(string.format('WAIT other model calls of the task have reserved %.14g %s', others, name))
        end
        granted[name] = math.min(most, free - others)
        mine[name] = granted[name]
      end
    end
    if next(mine) then
      held[own] = mine
      reserved = cjson.encode(held)
    end
  end
  local attempt = text(tonumber(r[2] or '0') + 1)
  redis.call('HSET', rk, RUN.attempts .. step, attempt)
  if reserved then redis.call('HSET', key, TASK.reserved, reserved, TASK.flags, flag(v[5] or '', FLAG.reserved)) end
  return {attempt, next(granted) and cjson.encode(granted) or '{}'}
end
