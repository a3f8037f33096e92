-- Time: the server's clock, the partition's clock, and the time in an entry id.

-- The server's own time in ms, as in entry ids and heartbeats.
local function server_ms()
  local seconds, micros = unpack(redis.call('TIME'))
  return tonumber(seconds) * 1000 + math.floor(tonumber(micros) / 1000)
end

-- The partition's time in ms: the server's time with the stored offset, which corrects steps of the server's clock.
local function now_ms(base)
  return server_ms() + tonumber(redis.call('HGET', base .. 'meta', 'offset') or '0')
end

local function ms_of(entry) return string.match(entry, '^(%d+)') end
