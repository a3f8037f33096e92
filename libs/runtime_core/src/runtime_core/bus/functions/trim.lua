-- Trims the record stream behind the slower of its two groups. The groups are fixed: if one is missing, it is recreated
-- at 0 and nothing is trimmed.
-- KEYS 1 base · RETURNS {entries removed, groups recreated}
local function trim(keys, args)
  local key = keys[1] .. 'record'
  if redis.call('EXISTS', key) == 0 then return {0, 0} end
  local passed, made = {}, 0
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local named = {}
    for i = 1, #info, 2 do named[info[i]] = info[i + 1] end
    passed[named.name] = named['last-delivered-id']
  end
  for _, group in ipairs({'state-manager', 'trajectory-recorder'}) do
    if not passed[group] then
      redis.call('XGROUP', 'CREATE', key, group, '0')
      made = made + 1
    end
  end
  if made > 0 then return {0, made} end
  local function parts(id)
    local ms, seq = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(ms), tonumber(seq)
  end
  local low = passed['state-manager']
  local other = passed['trajectory-recorder']
  local low_ms, low_seq = parts(low)
  local other_ms, other_seq = parts(other)
  if other_ms < low_ms or (other_ms == low_ms and other_seq < low_seq) then
    low, low_ms, low_seq = other, other_ms, other_seq
  end
  if low_ms == 0 then return {0, 0} end
  return {redis.call('XTRIM', key, 'MINID', '=', text(low_ms) .. '-' .. text(low_seq + 1)), 0}
end
