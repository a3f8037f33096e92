-- Time: the partition's clock and the time in an entry id.

local function now_ms(base)
  local t = redis.call('TIME')
  local ms = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  local offset = redis.call('HGET', base .. 'meta', 'offset')
  if offset then ms = ms + tonumber(offset) end
  return ms
end

local function ms_of(entry) return string.match(entry, '^(%d+)') end
