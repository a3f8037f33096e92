-- Counts the bytes of dead letters again, in case a person has changed the stream.
-- KEYS 1 base · ARGV 1 `-` to begin, then the return value of the last call
-- RETURNS where to continue, or '' at the end
local function recount_letters(keys, args)
  redis.call('XLEN', keys[1] .. 'dead')
  return dead.recount(keys[1], args[1])
end
