-- Usage and limits: what a task has used, what it may use, and what its model calls have reserved.

-- What has been used, with more of it added: both are JSON, names to numbers, with `models` for the same by model.
-- Raises where one of them is something else, so it belongs before the first write.
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

-- Says which limit the usage is over, or nil. At the limit is within it, whatever sums of fractions make of it.
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

-- Removes reservations from those `held` (JSON): of one model call, or where `place` ends with `|`, of all calls of a run.
local function give_back(key, held, place)
  local left, found = {}, false
  for name, amounts in pairs(cjson.decode(held)) do
    local of_run = string.sub(place, -1) == '|' and string.sub(name, 1, #place) == place
    if name ~= place and not of_run then left[name], found = amounts, true end
  end
  if found then redis.call('HSET', key, TASK.reserved, cjson.encode(left)) else redis.call('HDEL', key, TASK.reserved) end
end
