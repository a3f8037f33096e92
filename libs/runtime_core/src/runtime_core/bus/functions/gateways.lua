-- Returns the gateways that serve a stream of an engine.
-- KEYS 1 base · ARGV 1 stream
-- RETURNS {number of live gateways, ms since the last sign of life of one (-1: never), the partition's time (epoch ms),
--         the message for a stream without any}
local function gateways(keys, args)
  local base, stream = keys[1], args[1]
  local heard = redis.call('ZSCORE', base .. 'gateways', stream)
  local clock = redis.call('HGET', base .. 'meta', 'beat_clock') or '0'
  local silent = -1
  if heard then silent = math.max(0, tonumber(clock) - tonumber(heard)) end
  return {gateways_of(base, stream), silent, now_ms(base), no_gateway(stream)}
end
