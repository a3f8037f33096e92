-- Usage and limits: a task's usage, its limits, and the reservations of its model calls.

-- Adds usage to usage: both are JSON, names to numbers, with `models` for the same by model.
-- Raises if one of them is something else, so call it before the first write.
local function usage_with(held, more)
  local total = held and cjson.decode(held) or {}
  local function add(into, amounts)
    for name, amount in pairs(amounts) do into[name] = (into[name] or 0) + amount end
  end
  for _, one in ipairs(more) do
    local amounts = cjson.decode(one)
    local models = amounts.models
    amounts.models = nil
    local known = total.models
    total.models = nil
    add(total, amounts)
    if models then
      known = known or {}
      for model, of_model in pairs(models) do
        known[model] = known[model] or {}
        add(known[model], of_model)
      end
    end
    total.models = known
  end
  return total
end

-- Returns the limit that the usage exceeds, or nil. Usage at the limit is within it, despite inexact sums of fractions.
local function over_limit(used, limits)
  if not limits then return nil end
  local most = cjson.decode(limits)
  for _, name in ipairs({'tokens', 'cost'}) do
    if most[name] and (used[name] or 0) > most[name] * (1 + 1e-9) then
      return string.format('the task has used %.14g %s, over its max_%s=%.14g', used[name], name, name, most[name])
    end
  end
  return nil
end

-- Removes reservations from `held` (JSON): of one model call, or of all calls of a run if `place` ends with `|`.
local function give_back(key, held, place)
  local left, found = {}, false
  for name, amounts in pairs(cjson.decode(held)) do
    local of_run = string.sub(place, -1) == '|' and string.sub(name, 1, #place) == place
    if name ~= place and not of_run then left[name], found = amounts, true end
  end
  if found then
    redis.call('HSET', key, TASK.reserved, cjson.encode(left))
  else
    redis.call('HDEL', key, TASK.reserved)
  end
end
